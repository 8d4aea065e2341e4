"""How a report speaks of itself: times, and the command that makes it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def command(options: Mapping[str, Any], parameters: Mapping[str, Any], notebooks: Sequence[str | Path]) -> str:
    """The command that makes the same report again."""
    words = ["ddpm-lab", "report"]
    for name, value in options.items():
        words += [] if value in (None, "synthetic") else [f"--{name.replace('_', '-')}", str(value)]
    for name, value in parameters.items():
        words += ["-p", name, value if isinstance(value, str) else json.dumps(value)]
    for notebook in notebooks:
        words += ["--notebook", str(notebook)]
    return shlex.join(words)


def clock(seconds: float) -> str:
    """Such as 2:05, or 1:02:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def words(seconds: float) -> str:
    """Such as "2 min 5 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
