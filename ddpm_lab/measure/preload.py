"""The last module that the fork server imports: it freezes what is there, which each rank would search and copy."""

import atexit
import gc
import os
import warnings

from ddpm_lab.measure.code_version import PACKAGE, loaded
from ddpm_lab.measure.guard import adopt, end_below
from ddpm_lab.measure.process import SAFE_PATH, sweep

if os.environ.get(SAFE_PATH) == PACKAGE.name:
    del os.environ[SAFE_PATH]  # programs that ranks start are the user's
loaded()  # which folders hold libraries is remembered
gc.collect()
gc.freeze()


def _leave(server: int) -> None:
    """End the fork server, whose parent was killed, as it is: libraries would report each frozen object as leaked."""
    if os.getpid() == server:
        end_below(server)
        sweep()
        os._exit(0)


adopt()
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of what it has adopted
atexit.register(_leave, os.getpid())
