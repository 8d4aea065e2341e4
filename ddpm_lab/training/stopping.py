"""Stop at a signal: SIGINT, SIGTERM or SIGHUP asks a run to come to an end, and a second one ends it at once."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 3.0
"""A scheduler sends SIGTERM to every process of a job, and torchrun passes it on; a shell, and the kernel, SIGHUP:
for so long it is one signal."""


class Stopped(KeyboardInterrupt):
    """A signal that ends the run where it is, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stop:
    """While entered, the first signal is noted in ``number``, and raises Stopped if not ``gentle``; others raise it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.gentle = False
        self._seen: int | None = None
        self._noted = -math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        heeded = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # as under nohup
        self._before = {number: signal.signal(number, self._handle) for number in heeded}
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._unraisable

    def _lost(self, what: "sys.UnraisableHookArgs") -> None:
        """Signal again where Stopped was raised in a finalizer or a callback, in which Python drops what is raised."""
        if not isinstance(what.exc_value, Stopped):
            self._unraisable(what)
            return
        self._seen = None
        # Later than the start of a thread takes, which waits in here, where what is raised is dropped too.
        threading.Timer(0.1, os.kill, (os.getpid(), what.exc_value.number)).start()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT and self._seen == number and time.monotonic() - self._noted < REPEAT_SECONDS:
            return
        self._seen, self._noted = number, time.monotonic()
        first, self.number = self.number is None, self.number or number
        if not (first and self.gentle):
            raise Stopped(number)


@contextlib.contextmanager
def without_sigterm() -> Iterator[None]:
    """Processes that start here never get SIGTERM or SIGHUP: what is sent to all of them is the parent's to handle."""
    resource_tracker.ensure_running()  # it would let SIGTERM through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
