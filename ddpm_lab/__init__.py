"""Which settings train a diffusion model fastest on this machine, and do they cost quality?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpm_lab.questions.comparison import ComparisonResult, compare

__all__ = ["ComparisonResult", "compare"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a name of ``__all__`` on first use, which keeps it out of the code version: no rank runs any of it."""
    if name in __all__:
        return getattr(importlib.import_module("ddpm_lab.questions.comparison"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
