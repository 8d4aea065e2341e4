"""A SLURM cluster of two nodes on this machine, for tests: munge, slurmctld and two slurmd in a folder of their own."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from conftest import marked

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
WAIT_SECONDS = 60.0
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=1
MailProg=/bin/true
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 Gres=gpu:1
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=10 OverSubscribe=FORCE:8 State=UP
"""


def missing() -> str:
    """Why no cluster can be brought up here; empty if one can."""
    absent = ", ".join(name for name in PROGRAMS if _program(name) is None)
    return f"no SLURM here: {absent} is not installed" if absent else "only root can run slurmd" * (os.geteuid() != 0)


def _program(name: str) -> str | None:
    """The path of a program, also where only root looks for it."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def cluster() -> Iterator[Path]:
    """A running cluster: the folder of its logs and its ``slurm.conf``. Nothing of it is left afterwards."""
    # Not pytest's folder: a socket's path may have no more than 107 bytes, and munged wants folders that all may enter.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    try:
        _configure(folder)
        with ExitStack() as stack:
            stack.callback(_end_steps, folder)
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
            options = [f"--{name}={folder}/munge.{ending}" for name, ending in files.items()]
            _start(stack, folder, "munged", *options, "--num-threads=2", "--foreground")
            wait_for((folder / "munge.socket").exists, folder)
            _start(stack, folder, "slurmctld", "-D")
            for node in ("n1", "n2"):
                _start(stack, folder, "slurmd", "-D", "-N", node)
            stack.callback(_ask, folder, "scancel", "--user=root", "--signal=KILL", "--full")
            wait_for(lambda: _ask(folder, "sinfo", "-h", "-o", "%t %D").strip() == "idle 2", folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], bool], folder: Path, seconds: float = WAIT_SECONDS) -> None:
    """Wait until ``condition`` holds; with the daemons' last words if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            logs = [f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in folder.glob("*.log")]
            raise AssertionError("\n".join(["the cluster does not come that far", *logs]))
        time.sleep(0.1)


def left(folder: Path) -> list[psutil.Process]:
    """Processes of the cluster that still run: daemons, steps and the jobs' own."""
    return [process for process in marked("SLURM_CONF", str(folder / "slurm.conf")) if process.pid != os.getpid()]


def _configure(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with ExitStack() as stack:  # all open at once, so that they differ
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, ports=ports))
    (folder / "cgroup.conf").write_text("CgroupMountpoint=/sys/fs/cgroup\n")
    (folder / "gpu").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-2] Name=gpu File={folder}/gpu\n")


def _start(stack: ExitStack, folder: Path, name: str, *arguments: str) -> None:
    log = stack.enter_context((folder / f"{name}-{arguments[-1]}.start.log").open("wb"))
    command = [str(_program(name)), *arguments]
    process = subprocess.Popen(command, env=_environment(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}


def _ask(folder: Path, *command: str) -> str:
    return subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False).stdout


def _end_steps(folder: Path) -> None:
    """Steps are no children of the daemons that started them: what is left of them ends here."""
    for process in left(folder):
        with suppress(psutil.Error):
            process.kill()
    wait_for(lambda: not left(folder), folder, 20)
