"""Jobs that torchrun starts on this machine, for tests: whatever becomes of one, nothing of it is left afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parent
_MARK = "DDPM_LAB_TEST_JOB"


class Torchrun(subprocess.Popen[str]):
    """One torchrun with everything that it started, which is known by a variable of its environment."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        super().__init__(
            [sys.executable, "-m", "torch.distributed.run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
                **environment,
                _MARK: self.mark,
            },
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of JSON that the job writes, as they come."""
        assert self.stdout is not None
        return (json.loads(line) for line in self.stdout if line.startswith("{"))

    def wait_until_connected(self, port: int) -> None:
        """Return once torchrun itself has reached a port."""
        process = psutil.Process(self.pid)
        while not any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
            time.sleep(0.1)

    def left(self, seconds: float = 3.0) -> list[int]:
        """Processes of the job that still run after some seconds, in which helpers see that their parent has gone."""
        deadline = time.monotonic() + seconds
        while (pids := self.running()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return pids

    def running(self) -> list[int]:
        """Processes of the job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found


@contextlib.contextmanager
def torchrun(*words: str, **environment: str) -> Iterator[Torchrun]:
    """A job that is ended with everything that it started."""
    job = Torchrun(*words, **environment)
    try:
        yield job
    finally:
        while pids := job.running():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.communicate()


def on_host(rows: list[Any]) -> list[str]:
    """The script that works through the groups ``rows`` and prints what became of each."""
    return [str(TESTS / "fleet_job.py"), json.dumps(rows)]
