"""Which settings train a diffusion model fastest on this machine, and do they cost quality?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpm_lab.questions.comparison import ComparisonResult, compare

__all__ = ["ComparisonResult", "compare"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``compare`` is loaded when it is asked for, out of sight of the code version: no rank runs anything of it."""
    if name in __all__:
        return getattr(importlib.import_module("ddpm_lab.questions.comparison"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
