"""Set-up: one command from a fresh clone, and refusals that come before any download."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def test_make_help_lists_every_target_and_is_the_default() -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    assert targets == set(phony.split())
    assert targets >= {"help", "setup", "report", "lab", "test", "test-slow", "lint", "lock", "clean"}
    shown = subprocess.run(["make", "--no-print-directory"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^  ([a-z-]+)  ", shown.stdout, flags=re.MULTILINE)) == targets


# --- the refusals of scripts/setup.sh ------------------------------------------------------------------------------

# Runs setup.sh's own code in an interpreter that claims to be something else, and leaves a mark when it is asked for a
# download instead.
PYTHON_SHIM = """\
import sys
with_code, *rest = sys.argv[1:]
if with_code != "-c":
    print(*sys.argv[1:], file=open({calls!r}, "a"))
    sys.exit(9)
sys.executable = {name!r}
sys.modules["urllib.request"] = None  # no network in these tests
{disguise}
exec(rest[0])
"""
OLD = "sys.version_info = (3, 10, 13, 'final', 0)"
NO_PIP = "sys.modules['pip'] = None"


TOOLS = (
    *("awk", "cat", "cksum", "cp", "df", "dirname", "flock", "grep", "head", "ln", "mkdir", "mv", "rm"),
    *("sh", "sleep", "sort", "tail", "uname"),
)


class Machine:
    """A copy of what set-up reads, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "clone with space"
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.calls = folder / "calls"
        for path in (self.checkout / "scripts", self.bin, self.home):
            path.mkdir(parents=True)
        shutil.copy(CHECKOUT / "scripts" / "setup.sh", self.checkout / "scripts")
        for name in ("uv.lock", "pyproject.toml"):
            shutil.copy(CHECKOUT / name, self.checkout)
        for tool in TOOLS:
            found = shutil.which(tool)
            if found is not None:
                (self.bin / tool).symlink_to(found)

    def shim(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def python(self, name: str = "python3", disguise: str = "") -> None:
        code = self.bin / f".{name}.py"
        code.write_text(PYTHON_SHIM.format(calls=str(self.calls), name=str(self.bin / name), disguise=disguise))
        self.shim(name, f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n')

    def set_up(self, **extra: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.home), **extra}
        shell = shutil.which("sh")
        assert shell is not None
        script = self.checkout / "scripts" / "setup.sh"
        return subprocess.run([shell, script], env=environment, capture_output=True, text=True, check=False)

    def refuses(self, *words: str, **extra: str) -> None:
        before = sorted(self.checkout.rglob("*"))
        result = self.set_up(**extra)
        assert result.returncode == 1
        assert result.stdout == ""
        sentence = result.stderr
        assert sentence.count("\n") == 1, sentence
        assert re.fullmatch(r"setup: .+\.\n", sentence)
        for word in words:
            assert word in sentence
        assert not self.calls.exists(), "it tried to download"
        assert sorted(self.checkout.rglob("*")) == before
        assert not list(self.home.iterdir())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.python()
    return machine


@pytest.mark.parametrize(
    ("option", "answer", "words"),
    [("-s", "Darwin", ("Darwin", "use a Linux machine")), ("-m", "riscv64", ("riscv64", "x86_64 or aarch64"))],
)
def test_refuses_another_platform(machine: Machine, option: str, answer: str, words: tuple[str, ...]) -> None:
    real = shutil.which("uname")
    machine.shim("uname", f'#!/bin/sh\nif [ "$1" = {option} ]; then echo {answer}; else exec {real} "$@"; fi\n')
    machine.refuses(*words)


def test_refuses_another_python(machine: Machine) -> None:
    machine.python(disguise=OLD)
    machine.refuses("python3", "Python 3.10", "install Python 3.11, 3.12 or 3.13")


def test_refuses_a_machine_without_python(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    machine.refuses("no python3 on PATH", "install Python 3.11, 3.12 or 3.13")


def test_refuses_a_python_named_by_hand_that_is_too_old(machine: Machine) -> None:
    machine.python("my-python", disguise=OLD)
    machine.refuses("PYTHON=my-python", "Python 3.10", PYTHON="my-python")
    machine.refuses("PYTHON=/no/such/python", "3.11, 3.12 or 3.13", PYTHON="/no/such/python")


def test_refuses_a_c_library_without_builds(machine: Machine) -> None:
    machine.python(disguise="import os; os.confstr = lambda name: 'glibc 2.17'")
    machine.refuses("glibc 2.28 or newer")


def test_refuses_python_without_pip_and_no_uv(machine: Machine) -> None:
    machine.python(disguise=NO_PIP)
    machine.refuses("has no pip", "apt install python3-pip")


def df_answering(kilobytes: int) -> str:
    return (
        f"#!/bin/sh\necho Filesystem 1024-blocks Used Available Capacity Mounted on\necho /dev/x 9 9 {kilobytes} 9% /\n"
    )


def test_refuses_too_little_disk(machine: Machine) -> None:
    machine.shim("df", df_answering(3_000_000))
    machine.refuses("3 GB of free disk space", "needs 8 GB", "free some")


def test_a_disk_with_room_passes_all_checks(machine: Machine) -> None:
    machine.shim("df", df_answering(9_000_000))
    result = machine.set_up()
    assert "downloading uv" in result.stderr
    assert "-m pip install" in machine.calls.read_text()


def test_another_python_on_path_is_found(machine: Machine) -> None:
    machine.python(disguise=OLD)
    machine.shim("python3.13", "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    machine.python("python3.12")
    assert "downloading uv" in machine.set_up().stderr


UV_SHIM = """\
#!/bin/sh
if [ "$1" = --version ]; then echo 'uv {version} (some build)'; exit; fi
echo "$*" >>{calls}
mkdir -p .venv/bin && cp {python_shim} .venv/bin/python
"""


def add_uv(machine: Machine, version: str) -> None:
    machine.shim("uv", UV_SHIM.format(version=version, calls=machine.calls, python_shim=machine.bin / "python3"))


def test_uses_the_uv_on_path_and_needs_no_pip(machine: Machine) -> None:
    machine.python(disguise=NO_PIP)
    add_uv(machine, "0.13.0")
    machine.set_up()
    assert machine.calls.read_text().startswith("sync --frozen")


def test_keeps_the_cache_in_the_checkout_when_home_cannot_be_written(machine: Machine) -> None:
    add_uv(machine, "0.13.0")
    machine.shim("uv", (machine.bin / "uv").read_text().replace('"$*"', '"$UV_CACHE_DIR"'))
    machine.set_up(HOME="/dev/null")
    assert Path(machine.calls.read_text().strip()) == machine.checkout / ".boot" / "cache"


def test_passes_an_old_uv_over(machine: Machine) -> None:
    add_uv(machine, "0.9.30")
    machine.set_up()
    assert machine.calls.read_text().startswith("-m pip install")


def test_does_nothing_when_up_to_date_and_something_when_not(machine: Machine) -> None:
    add_uv(machine, "0.13.0")
    first = machine.set_up()
    assert first.returncode == 0, first.stderr
    machine.calls.unlink()

    again = machine.set_up()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert not machine.calls.exists()

    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert machine.set_up().returncode == 0
    assert "sync --frozen" in machine.calls.read_text()


def test_a_moved_checkout_gets_a_new_environment_and_a_link_to_it_does_not(machine: Machine, tmp_path: Path) -> None:
    add_uv(machine, "0.13.0")
    assert machine.set_up().returncode == 0
    (machine.checkout / ".venv" / "bin" / "ddpm-lab").write_text("#!/old/path\n")
    real = machine.checkout

    machine.checkout = tmp_path / "link"
    machine.checkout.symlink_to(real)
    machine.calls.unlink()
    assert machine.set_up().returncode == 0
    assert not machine.calls.exists()

    machine.checkout = real.rename(tmp_path / "elsewhere")
    assert machine.set_up().returncode == 0
    assert "sync --frozen" in machine.calls.read_text()
    assert not (machine.checkout / ".venv" / "bin" / "ddpm-lab").exists()


def test_a_failed_download_says_what_to_do_and_is_not_taken_for_done(machine: Machine) -> None:
    result = machine.set_up()
    assert result.returncode == 1
    assert "the package index (pypi.org) cannot be reached" in result.stderr.splitlines()[-1]
    assert "check the network" in result.stderr.splitlines()[-1]
    assert not list((machine.checkout / ".boot").glob("*uv*"))


@pytest.mark.parametrize("place", ["environment", "file"])
def test_a_failed_download_names_the_index_that_was_asked(machine: Machine, place: str) -> None:
    mirror = "https://user:secret@mirror.example:8443/simple"
    if place == "environment":
        result = machine.set_up(PIP_INDEX_URL=mirror)
    else:
        answer = f"if rest[:3] == ['pip', 'config', 'get']: print({mirror!r}); sys.exit()\n"
        code = machine.bin / ".python3.py"
        code.write_text(code.read_text().replace("if with_code", answer + "if with_code"))
        result = machine.set_up()
    assert "the package index (mirror.example:8443) cannot be reached" in result.stderr.splitlines()[-1]
    assert "pypi.org" not in result.stderr
    assert "secret" not in result.stderr


def test_a_failed_download_shows_what_pip_said_last(machine: Machine) -> None:
    said = "print('\\n'.join(f'pip line {n}.' for n in range(40)), file=sys.stderr)\n"
    code = machine.bin / ".python3.py"
    code.write_text(code.read_text().replace("    sys.exit(9)", "    " + said + "    sys.exit(9)"))
    result = machine.set_up()
    assert "pip line 39." in result.stderr
    assert "pip line 1." not in result.stderr
    assert str(machine.checkout / ".boot" / "pip.log") in result.stderr


def test_two_at_once_set_up_once(machine: Machine) -> None:
    if shutil.which("flock") is None:
        pytest.skip("no flock on this machine: uv's own lock has to do")
    add_uv(machine, "0.13.0")
    slow = (machine.bin / "uv").read_text() + "sleep 0.5\n"
    machine.shim("uv", slow)
    environment = {"PATH": str(machine.bin), "HOME": str(machine.home)}
    command = [str(shutil.which("sh")), str(machine.checkout / "scripts" / "setup.sh")]
    both = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=30)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert machine.calls.read_text().count("sync") == 1
    assert sum("waiting for another set-up" in output for output in outputs) == 1


def test_scripts_can_be_run() -> None:
    for name in ("scripts/setup.sh", ".ci/run"):
        assert os.access(CHECKOUT / name, os.X_OK), name
        subprocess.run(["bash", "-n", CHECKOUT / name], check=True)


def test_outputs_of_a_user_stay_out_of_git() -> None:
    def ignored(path: str) -> bool:
        command = ["git", "check-ignore", "--quiet", "--no-index", path]
        return subprocess.run(command, cwd=CHECKOUT, check=False).returncode == 0

    for path in (
        ".venv/x",
        ".boot/x",
        "reports/index.html",
        "data/x.npy",
        "image_output/a.png",
        "trace_output/l.jsonl",
    ):
        assert ignored(path), path
    for path in (
        "image_output/published/a.png",
        "trace_output/published/h.jsonl",
        "ddpm_lab/data/x.py",
        "tests/data/x",
    ):
        assert not ignored(path), path
