"""A rank's process, seen from both sides: what the parent tells it, how it is watched, how it ends.

A rank cannot outlive its parent: a thread waits on a pipe whose only write end the parent holds and kills the rank's
whole process group at end of file. The rank, and the fork server above it, adopt what loses its parent below them, so
that it is found and ended with the rank. Nothing here imports torch until the rank runs.
"""

import contextlib
import faulthandler
import fcntl
import importlib
import json
import mmap
import multiprocessing
import os
import pickle
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic  # which somebody's code may replace in its module
from typing import IO, Any, NamedTuple

import psutil

from ddpm_lab.config import RunConfig, digest
from ddpm_lab.declared import parsed
from ddpm_lab.measure.code_version import PACKAGE, Tree, is_library
from ddpm_lab.measure.guard import END_SECONDS, adopt, end_below
from ddpm_lab.measure.hardware import oom_kills
from ddpm_lab.workload import Unsupported

SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "10000"
"""OpenMP threads wait for each other briefly awake, then asleep, unless the user's environment says otherwise.

By default they spin for milliseconds, and a step of two threads slows down manyfold as soon as a neighbour wants one of
the cores. It must be in the environment before torch is imported, and it is the same for every configuration."""

SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps a file numpy.py of the working folder from the fork server, which would import it as the library."""

PYTHON_PATH = "PYTHONPATH"
"""Begins, for the fork server, with the folder of this lab: another checkout may be the one that is installed."""

WORKER_TOLD_SECONDS = 0.5  # in which the signal of a loader worker's death comes after what broke by it
BEAT = struct.Struct("<dqq24s")  # monotonic seconds, steps done, marks made, what the rank is about to do


class Store(NamedTuple):
    """A part of the store that torchrun serves for its job: address, port, and what the keys begin with."""

    address: str
    port: int
    prefix: str


def join_store(address: str, port: int, prefix: str, *, seconds: float) -> Any:
    """Connect to a part of a store; ``seconds`` limits this and each wait. RuntimeError where nobody answers."""
    import torch.distributed as dist  # noqa: PLC0415 - only processes of a job need torch here

    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What the parent tells a rank at its start.

    ``threads`` are the rank's own compute threads, ``device_index`` the number of its GPU on its host; ``modules`` the
    hashes of modules that it may load beside the lab and libraries. Ranks of several processes of torchrun meet in a
    ``store``; without one they meet in the folder. The sources of a revision lie in a ``tree``.
    """

    config: RunConfig
    rank: int
    folder: Path
    threads: int
    collective_seconds: float
    modules: Mapping[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    device_index: int = 0
    store: Store | None = None
    tree: Tree | None = None


class Life(NamedTuple):
    """A rank's last sign of life: how long ago, its steps, marks and phase."""

    silent_seconds: float
    steps: int
    marks: int
    phase: str


class Heartbeat:
    """A memory-mapped file in which a rank says what it is about to do; the parent reads it without disturbing it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), BEAT.size)
        self.steps = self.marks = 0

    def mark(self, phase: str) -> None:
        """Note the time and the phase; about a microsecond."""
        self.marks += 1
        # In one copy: pack_into would clear the bytes first, and a reader in between would see a rank silent for ever.
        self._map[:] = BEAT.pack(monotonic(), self.steps, self.marks, phase.encode()[:24])

    def touch(self) -> None:
        """The parent's mark: from now on silence counts. A sleeping rank's own last mark is old."""
        self._map[:8] = BEAT.pack(monotonic(), 0, 0, b"")[:8]

    def read(self) -> Life:
        """What the rank said last; read until two looks agree, since the rank may be writing."""
        before = self._map[:]
        while (now := self._map[:]) != before:
            before = now
        seconds, steps, marks, phase = BEAT.unpack(now)
        return Life(monotonic() - seconds, steps, marks, phase.rstrip(b"\0").decode(errors="replace"))


def rank_main(job: RankJob, commands: Connection, lifeline: Connection) -> None:
    """Entry point of a rank's process: build, then serve commands until told to finish."""
    adopt()
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:  # the server ends with the parent, and waits for no rank
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    os.environ.update(temporary(job.folder))
    tempfile.tempdir = None
    if job.tree and job.tree.package != PACKAGE:
        # Be a rank of the revision's own lab: this one was there before, since the fork server holds it.
        pickled = pickle.dumps(job)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name]:
            del sys.modules[name]
        importlib.import_module(__name__).rank_main(pickle.loads(pickled), commands, lifeline)  # which does not return
    os.setsid()  # a process group of the server's session would be hung up on, where stopped, if the server is killed
    # As in a training script of one's own. With the start method that this rank inherits, each lock that a library
    # makes (tqdm does, when torch compiles) would be a named semaphore, and this process, which is killed or leaves
    # by os._exit, would leave it behind.
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    del sys.argv[1:]  # the lab's: a training that reads a command line would take them as its own
    try:
        log = os.open(job.folder / f"rank{job.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except FileNotFoundError:  # the start was interrupted, and the group is gone
        os._exit(1)
    _flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    beat = Heartbeat(job.folder / f"rank{job.rank}.beat")
    failed = False
    try:
        threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
        try:
            from ddpm_lab.measure.rank import Rank  # noqa: PLC0415 - torch belongs to the rank, not to its parent
        except ImportError as error:
            raise getattr(sys.modules.get("ddpm_lab.measure.preload"), "failed", None) or error from None
        try:
            Rank(job, commands, beat).serve()
        except (EOFError, OSError):  # perhaps of a loader worker that was killed, which torch tells by a signal
            time.sleep(WORKER_TOLD_SECONDS)
            raise
    except BaseException as error:
        failed = True
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise here once more
        with contextlib.suppress(OSError):
            commands.send_bytes(json.dumps({"error": _ending_by(error)}).encode())
    _flush()
    os._exit(failed)  # in order nothing is worth it, and a library's exit handler must not keep a group alive


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # as of a disk that is full
            stream.flush()


def _die_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(0, signal.SIGKILL)


class Ending(NamedTuple):
    """How a rank ended: the error that it reported, or how its process left; ``time`` is of this host's clock."""

    status: str
    message: str
    detail: str
    time: float
    reported: bool = True


def _ending_by(error: BaseException) -> Ending:
    """What a rank says of its failure: type and text, and in brackets the last line of the user's own code."""
    name, said, detail = type(error).__name__, "", "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # in whose class somebody has written this
        said = str(error)
    if isinstance(error, Unsupported):
        return Ending("unsupported", said, detail, time.monotonic())
    text = said
    if "in DataLoader worker process" in text:  # torch hands on the worker's whole traceback
        text = text.strip().splitlines()[-1].removeprefix(f"{name}: ")
    text = " ".join(text.split())
    # A syntax error names the line of a file that was never run.
    where = [f" ({place})" for place in own_places(detail)[-1:] if place not in said]
    message = "".join([f"{name}: {text}"[:400] if text else name, *where])
    return Ending("oom" if tells_of_memory(f"{name}: {said}") else "crashed", message, detail, time.monotonic())


def own_places(stack: str) -> list[str]:
    """The lines of the user's own code in a printed stack, in its order, such as "mine.py, line 12"."""
    found = [(Path(file), line) for file, line in re.findall(r'File "(.+?)", line (\d+)', stack)]
    own = [(f, n) for f, n in found if f.is_file() and not is_library(f) and not f.is_relative_to(PACKAGE)]
    return [f"{file.name}, line {line}" for file, line in own]


OUT_OF_MEMORY = (
    *("out of memory", "memoryerror", "defaultcpuallocator", "alloc_failed", "cannot allocate memory"),
    "unable to allocate shared memory",  # in /dev/shm, of which Docker gives 64 MB
)


def tells_of_memory(text: str) -> bool:
    """Whether there was too little of it; cuBLAS and cuDNN, which allocate for themselves, speak of their status."""
    return any(word in text.lower() for word in OUT_OF_MEMORY)


def killed_for_memory(how: str, kills: int) -> bool:
    """Whether a process that ended so, or a loader worker of it, was killed when the kernel's count exceeded ``kills``.

    The kernel says nothing to whom it kills, as in a container of little memory.
    """
    return any(word in how for word in ("SIGKILL", "signal: Killed")) and oom_kills() > kills


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_id() -> str:
    """Twelve hexadecimal digits that tell hosts apart: those of one network and one boot of a kernel are one host."""
    return digest([str(Path("/proc/self/ns/net").readlink()), _boot_id()])


def kill_group(leader: psutil.Process) -> None:
    """Kill a process group, which keeps its leader's number, unless that has passed on to another process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if leader.is_running() or not psutil.pid_exists(leader.pid):
            os.killpg(leader.pid, signal.SIGKILL)


OWNER = "owner"  # file in a private folder that this process holds locked while it lives
SOCKET_BYTES = 75  # of the name of a folder in which multiprocessing can still name a socket


def _prefix() -> str:
    """How the names of private folders begin on this host, until it starts anew."""
    return f"ddpm_lab.{_boot_id()[:8]}."


def temporary(folder: Path) -> dict[str, str]:
    """Environment of programs that are to keep temporary files in ``folder``; what torch has compiled stays outside."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    there = folder.is_relative_to(tempfile.gettempdir())  # else it is in /tmp, which may be small
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": compiled} if there else {}


_home: tuple[Path, int] | None = None  # this process's own private folder, and the lock on it


def home() -> Path:
    """The private folder in which all of this process are; its lock ends with this process, however that ends."""
    global _home  # noqa: PLW0603 - as long as the process
    if _home is None:
        own = _prefix() + secrets.token_hex(3)
        fits = len(os.fsencode(f"{tempfile.gettempdir()}/{own}/12345678")) < SOCKET_BYTES
        path = Path(tempfile.gettempdir() if fits else "/tmp", own)
        util.Finalize(None, end_all, exitpriority=10)
        path.mkdir(0o700)
        lock = os.open(path / "owner.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        _home = path, lock
        with contextlib.suppress(OSError):  # a file system without locks: then nobody gets one, and all stay away
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (path / "owner.new").rename(path / OWNER)  # locked before anybody can see it
    return _home[0]


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a private folder, as for a group while it lives; what killed processes have left is removed."""
    sweep()
    return tempfile.TemporaryDirectory(prefix="", dir=home(), ignore_cleanup_errors=True)


def sweep() -> None:
    """Remove private folders whose owner was killed before it could; those of other hosts and users stay."""
    for folder in (f for place in {tempfile.gettempdir(), "/tmp"} for f in Path(place).glob(f"{_prefix()}*")):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with (folder / OWNER).open("r+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
                    shutil.rmtree(folder, ignore_errors=True)


_guards: set[subprocess.Popen[bytes]] = set()


def guarded(command: list[str], output: IO[bytes], env: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
    """Start a program below a guard, which ends with this process."""
    words = [sys.executable, "-I", str(PACKAGE / "measure" / "guard.py"), *command]
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(words, **streams, start_new_session=True, env=env, **how)
    _guards.add(process)
    return process


def end_guarded(process: subprocess.Popen[bytes], seconds: float = END_SECONDS + 1) -> None:
    """End a guard and all that is below it, which it has ``seconds`` to do itself."""
    assert process.stdin
    process.stdin.close()  # at whose end it ends
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:  # it is stopped, or a second signal ends all
        end_below(process.pid)
        process.kill()
        process.wait()
    _guards.discard(process)


LOG_CHARACTERS = 4000
LOG_BYTES = 2**27  # of a log; of what prints more, the beginning stays, and the end


def shorten(log: Path) -> None:
    """Leave the beginning and the end of a log that has become too long; what prints goes on behind them."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            end = tail(log)
            os.truncate(log, LOG_BYTES // 2)
            with log.open("a", errors="replace") as file:
                file.write(f"\n...\n{end}")


def tail(log: Path, start: int = 0) -> str:
    """The last characters of a log, and none before ``start`` unless it was shortened since."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - LOG_CHARACTERS))
        return file.read(LOG_CHARACTERS).decode(errors="replace")
    return ""


_server: Any = forkserver.ForkServer()
"""The lab's own: what is below it was started by ranks, and nothing by whoever imports the lab."""
_ranks: "dict[int, LocalRank]" = {}  # of groups that live
_seen: int | None = None  # the fork server that was there at the last look
_turn: Path | None = None  # folder of the group that was started, or told something, last


def _look_at_server(turn: Path | None = None) -> None:
    """Where the fork server was killed since the last look, end the group whose turn it was; from now on another's.

    Ranks of other groups go on. It is looked before each turn, since a killed process takes a while to end.
    """
    global _seen, _turn  # noqa: PLW0603 - as the server
    before, now = _seen, _server._forkserver_pid
    _seen = now if now and _lives(now) else None
    if before is not None and _seen != before:
        for rank in _ranks.values():
            if rank.job.folder == _turn and not rank.ending:
                how = "the process that starts ranks was killed in its turn"
                rank.ending = Ending("crashed", how, "", time.monotonic())
    _turn = turn or _turn


def start_server() -> None:
    """Start the fork server, whose ranks inherit the signals that are blocked now, and do not wait for it."""
    _server.set_forkserver_preload(["ddpm_lab.measure.preload"])
    with _fresh_start(sys.path):
        _server.ensure_running()


def _wake_server() -> None:
    """Have the fork server go on where a rank has stopped it: it would start nothing, and this process would wait."""
    if pid := _server._forkserver_pid:
        with contextlib.suppress(ProcessLookupError):  # not yet waited for by anybody else, so that it is this one
            os.kill(pid, signal.SIGCONT)


def _lives(pid: int) -> bool:
    """Whether a process lives; nobody but the kernel knows where the fork server, its parent, was killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def end_all() -> None:
    """End what this process has started, and whatever that has left; remove its private folder."""
    global _home, _seen  # noqa: PLW0603 - as long as the process
    for process in [*_guards]:  # of which a signal had interrupted the end
        end_guarded(process, 0.0)
    if pid := _server._forkserver_pid:
        end_below(pid)
        os.kill(pid, signal.SIGKILL)  # not yet waited for, so that it is this one
        with contextlib.suppress(FileNotFoundError):  # somebody's code has removed the folder with its socket
            _server._stop()
        _seen = None
    if _home:
        shutil.rmtree(_home[0], ignore_errors=True)
        os.close(_home[1])
        _home = None


@contextlib.contextmanager
def _fresh_start(path: list[str]) -> Iterator[None]:
    """What a starting process inherits: the Python path, the lab's threading environment, and no ``__main__``.

    multiprocessing hands the path on before it unpickles anything, so that a rank finds even the lab itself there; a
    main module would be run again in every rank, and a script without a guard would start itself over and over.
    """
    settings: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    usual, sockets = forkserver.connect_to_new_process, settings.get("tempdir")
    main, here = sys.modules["__main__"], sys.path
    spin = {} if {SPIN_VARIABLE, "OMP_WAIT_POLICY"} & os.environ.keys() else {SPIN_VARIABLE: SPIN_COUNT}
    spin |= {} if SAFE_PATH in os.environ else {SAFE_PATH: PACKAGE.name}
    told = os.environ.get(PYTHON_PATH)
    if not is_library(str(PACKAGE)):
        spin[PYTHON_PATH] = os.pathsep.join(filter(None, (str(PACKAGE.parent), told)))
    sys.modules["__main__"], sys.path = types.ModuleType("__main__"), path
    os.environ.update(spin)
    forkserver.connect_to_new_process = _server.connect_to_new_process
    settings["tempdir"] = str(home())
    try:
        yield
    finally:
        forkserver.connect_to_new_process, settings["tempdir"] = usual, sockets
        sys.modules["__main__"], sys.path = main, here
        for name in spin:
            del os.environ[name]
        os.environ.update({} if told is None else {PYTHON_PATH: told})


class LocalRank:
    """A rank's process, and its pipe, heartbeat and files in the group's folder."""

    host = ""
    unheard = False

    def __init__(self, job: RankJob) -> None:
        self.job = job
        self.report: dict[str, Any] = {}  # what the rank measured by its latest command
        context = multiprocessing.get_context("forkserver")
        _server.set_forkserver_preload(["ddpm_lab.measure.preload"])
        self._file("beat").write_bytes(BEAT.pack(time.monotonic(), 0, 0, b"start"))
        self._beat = Heartbeat(self._file("beat"))
        self._pipe, theirs = context.Pipe()
        end, self._lifeline = context.Pipe(duplex=False)
        self.ending: Ending | None = None
        self._done, self._oom_kills = False, oom_kills()
        how: dict[str, Any] = {"args": (job, theirs, end), "name": f"ddpm_lab rank {job.rank}"}
        self._process: Any = context.Process(target=rank_main, **how)
        try:
            with _fresh_start(job.tree.path if job.tree else sys.path):
                _wake_server()
                self._process.start()
            self.leader = psutil.Process(self._process.pid)
            self.pid = self.leader.pid
            _look_at_server(job.folder)
            _ranks[self.pid] = self
            self.ears: list[Any] = [self._pipe]  # ready when the rank speaks, or ends and no child of it holds the pipe
        except BaseException:
            self._lifeline.close()  # so that a rank that was just started ends
            raise
        finally:
            theirs.close()
            end.close()

    def _file(self, kind: str) -> Path:
        return self.job.folder / f"rank{self.job.rank}.{kind}"

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        """Give the rank a command. One that died is found when it is listened to, with its reason."""
        _look_at_server(self.job.folder)
        self._beat.touch()
        self._done = False
        with contextlib.suppress(OSError):
            self._pipe.send((command, arguments))

    def hear(self) -> bool:
        """Whether the rank has reported that it did what it was told; ``ending`` says why it will not."""
        _look_at_server()
        alive, said = _lives(self.pid), dict[str, Any]()  # looked at first: what was said before the end is not lost
        if self.ending:
            return False
        try:
            if self._pipe.poll():
                said = parsed(self._pipe.recv_bytes())
        except (EOFError, OSError):
            alive = False
        if "report" in said:
            self.report, self._done, self._oom_kills = said["report"], True, oom_kills()
        elif "error" in said:
            self.ending = Ending(*said["error"])
        elif not alive:
            self._process.join(1)
            code: int | None = self._process.exitcode
            if code or not self._done:  # else it left in order
                how = (
                    "left without a word, as by closing all files," if code is None else f"ended with exit code {code}"
                )
                how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else how
                self.ending = Ending("crashed", how, self.log(), time.monotonic(), reported=False)
        if self.ending and killed_for_memory(f"{self.ending.message} {self.ending.detail}", self._oom_kills):
            self.ending = self.ending._replace(status="oom", message=f"{self.ending.message} for want of memory")
        return "report" in said

    def life(self) -> Life:
        return self._beat.read()

    def log(self) -> str:
        return tail(self._file("log"))

    def stack(self) -> str:
        """The log with the stacks of the rank's threads as they are now, unless it is stopped."""
        with contextlib.suppress(psutil.Error):
            self.leader.send_signal(signal.SIGUSR1)
        time.sleep(0.3)  # faulthandler writes them to the log
        return self.log()

    def kill(self) -> None:
        """Kill the rank and all below it."""
        with contextlib.suppress(psutil.Error):  # it has ended
            if self.leader.is_running():  # also where the fork server was killed
                end_below(self.pid)
                self.leader.kill()

    def close(self) -> None:
        """See the killed rank off, and whatever it had started; once more where a signal came before the end."""
        _wake_server()  # which tells of the end
        with contextlib.suppress(ValueError):
            self._process.join(10)
        # The leader is gone; what it started may still stand in its process group, or below the fork server.
        kill_group(self.leader)
        _ranks.pop(self.pid, None)
        if pid := _server._forkserver_pid:
            end_below(pid, spared=_ranks)
        with contextlib.suppress(ValueError):
            self._process.close()
        for end in (self._pipe, self._lifeline):
            end.close()
