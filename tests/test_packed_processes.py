"""Prepared folders and processes: helpers that decode, two who build at once, and one who is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from test_packed import CHECKOUT, run_python, write_images

from ddpm_lab.data.folder import DataError
from ddpm_lab.data.packed import open_packed, prepare
from ddpm_lab.data.synthetic import generate


def test_many_files_are_decoded_by_helpers_that_leave_nothing_behind(tmp_path: Path) -> None:
    """From a script without a ``__main__`` guard, which would start itself again if it were imported again."""
    images = generate(1_100, 4)
    write_images(tmp_path / "many", images)
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.sched_getaffinity = lambda pid: {0, 1}\n"
        "import psutil\n"
        "from ddpm_lab.data.packed import prepare\n"
        f"manifest = prepare({str(tmp_path / 'many')!r}, {str(tmp_path / 'dest')!r}, image_size=4)\n"
        "print(manifest.count, psutil.Process().children(recursive=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run([sys.executable, script], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout == "1100 []\n"
    assert done.stderr == ""
    assert np.array_equal(open_packed(tmp_path / "dest").images, images)


def test_a_damaged_file_among_many_stops_the_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    before = psutil.Process().children()
    write_images(tmp_path / "many", generate(700, 4))
    (tmp_path / "many" / "300.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"300\.png"):
        prepare(tmp_path / "many", tmp_path / "dest", image_size=4)
    manifest = prepare(tmp_path / "many", tmp_path / "dest", image_size=4, skip_bad=True)
    assert manifest.count == 699
    assert np.array_equal(open_packed(tmp_path / "dest").images, np.delete(generate(700, 4), 299, axis=0))
    assert set(psutil.Process().children()) <= set(before)


def test_a_helper_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    write_images(tmp_path / "many", generate(700, 4))
    with pytest.raises(DataError, match="ended with status 1"):
        prepare(tmp_path / "many", tmp_path / "dest", image_size=4)


def test_two_processes_at_once_share_one_build(tmp_path: Path) -> None:
    write_images(tmp_path / "many", generate(800, 8))
    code = (
        "from ddpm_lab.data.packed import *\n"
        f"prepare({str(tmp_path / 'many')!r}, {str(tmp_path / 'dest')!r}, image_size=8)\n"
        f"from pathlib import Path; dest = Path({str(tmp_path / 'dest')!r})\n"
        "print((dest / 'manifest.json').stat().st_ino, int(open_packed(dest).images.sum()))\n"
    )
    processes = [run_python(code, stdout=subprocess.PIPE) for _ in range(2)]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert len(answers) == 1
    assert answers.pop().split()[1] == str(generate(800, 8).sum())


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    source = write_images(tmp_path / "train", generate(40, 8))
    dest = tmp_path / "dest"
    code = (
        "from ddpm_lab.data import packed\n"
        "packed.content_hash = lambda *_: (print('decoded', flush=True), input())\n"
        f"packed.prepare({str(source)!r}, {str(dest)!r}, image_size=8)\n"
    )
    process = run_python(code, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "decoded\n"
    process.kill()
    process.communicate()
    with pytest.raises(DataError, match="not a prepared folder"):
        open_packed(dest)
    assert prepare(source, dest, image_size=8).count == 40
    assert not list(dest.glob("*.partial"))


@pytest.mark.slow
def test_helpers_end_when_their_caller_is_killed(tmp_path: Path) -> None:
    code = (
        "import os; os.sched_getaffinity = lambda pid: {0, 1}\n"
        "import psutil\n"
        "from ddpm_lab.data import decode_pool\n"
        "def stuck(*_, **__):\n"
        "    print(*[child.pid for child in psutil.Process().children()], flush=True); input()\n"
        "decode_pool.ThreadPoolExecutor = stuck\n"
        "import numpy as np; from pathlib import Path\n"
        f"path = Path({str(tmp_path / 'a.npy')!r}); np.save(path, np.zeros((1000, 4, 4, 3), np.uint8))\n"
        "decode_pool.decode_files(['x'] * 1000, path, 4, keep_going=True)\n"
    )
    process = run_python(code, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    helpers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(helpers) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in helpers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in helpers)


def test_no_torch_is_imported() -> None:
    code = "import sys; import ddpm_lab.data.packed; print('torch' in sys.modules, 'py7zr' in sys.modules)"
    assert run_python(code, stdout=subprocess.PIPE).communicate()[0] == "False False\n"
