"""How files are written: whole or not at all, by whoever else writes them, and nowhere else."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpm_lab import files

WRITER = """
import sys
from pathlib import Path
from ddpm_lab.files import replace
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
for _ in range(100):
    replace(path, letter * 200_000)
    content = path.read_bytes()
    assert len(content) == 200_000 and len(set(content)) == 1
"""


def test_two_processes_write_one_file_whole(tmp_path: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "a"), letter]) for letter in "xy"]
    assert [process.wait(180) for process in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_is_not_followed_and_what_a_killed_process_left_is_gone(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "results"
    folder.mkdir()
    victim.write_text("mine")
    (folder / f"a.png.{os.getpid()}.partial").symlink_to(victim)
    (folder / f"a.png.{2**22 + 1}.partial").write_text("left")  # beyond the largest process id
    (folder / f"a.png.{os.getppid()}.partial").write_text("of one that still writes")
    files.replace(folder / "a.png", b"new")
    assert victim.read_text() == "mine"
    assert {path.name for path in folder.iterdir()} == {"a.png", f"a.png.{os.getppid()}.partial"}


def test_where_a_file_system_has_no_locks_all_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "a").open("a") as one, (tmp_path / "a").open("a") as two:
        assert files.lock(one)
        assert not files.lock(two, wait=False)
        monkeypatch.setattr(fcntl, "flock", no_locks)
        assert files.lock(two)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    values = {"a": "\x7f\x00\u202eé\n", "b": [0.5, -1, True, "x"], "c": float("inf"), "t": {"d": "\\"}}
    files.replace(tmp_path / "a.toml", files.settings_text({**values, "name": "x\udcff"}))
    assert files.read_settings(tmp_path / "a.toml", "A") == {**values, "name": "x?"}
