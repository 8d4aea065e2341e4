"""The last module that the fork server imports: it freezes what is there, which each rank would search and copy."""

import atexit
import gc
import os

from ddpm_lab.measure.code_version import PACKAGE, loaded
from ddpm_lab.measure.process import SAFE_PATH

if os.environ.get(SAFE_PATH) == PACKAGE.name:
    del os.environ[SAFE_PATH]  # programs that ranks start are the user's
loaded()  # which folders hold libraries is remembered
gc.collect()
gc.freeze()


def _leave(server: int) -> None:
    """End the fork server as it is: libraries would report each frozen object as leaked."""
    if os.getpid() == server:
        os._exit(0)


atexit.register(_leave, os.getpid())
