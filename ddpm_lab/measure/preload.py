"""What the fork server does once: it imports, and freezes what is there, which each rank would search and copy."""

import atexit
import gc
import os
import signal
import sys
import warnings
from importlib import import_module

from ddpm_lab.measure.code_version import PACKAGE, is_library, loaded
from ddpm_lab.measure.guard import PR_SET_PDEATHSIG, adopt, end_below, prctl
from ddpm_lab.measure.process import PYTHON_PATH, SAFE_PATH, sweep

MODULES = (  # which start no thread and touch no device
    *("torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "numpy", "PIL.Image"),
    *("ddpm_lab.measure.rank", "ddpm_lab.training.train", "ddpm_lab.training.own", "ddpm_lab.training.training"),
)
os.setsid()  # a signal to the parent's process group is the parent's to handle; killed with it, none would end ranks
prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # for the seconds in which it does not look whether its parent lives
failed: Exception | None = None  # the first, which tells why; torch then says only that it was tried before
for name in MODULES:
    try:
        import_module(name)
    except Exception as error:  # as for want of memory
        failed = failed or error
prctl(PR_SET_PDEATHSIG, 0)

if os.environ.get(SAFE_PATH) == PACKAGE.name:
    del os.environ[SAFE_PATH]  # programs that ranks start are the user's
if not is_library(str(PACKAGE)):
    os.environ[PYTHON_PATH] = os.environ[PYTHON_PATH].partition(os.pathsep)[2]  # so is their path
loaded()  # which files are of libraries is remembered
gc.collect()
gc.freeze()


def _leave(server: int) -> None:
    """End the fork server, whose parent was killed, as it is: libraries would report each frozen object as leaked."""
    if os.getpid() == server:
        end_below(server)
        sweep()
        os._exit(0)


adopt()
# Of a rank whose start was interrupted before it was told what to do.
sys.excepthook = lambda kind, *more: None if kind is EOFError else sys.__excepthook__(kind, *more)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of what it has adopted
atexit.register(_leave, os.getpid())
