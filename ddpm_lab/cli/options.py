"""Options that several commands have, each declared once; what they mean, and how an answer is printed."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DEVICES, NETWORKS
from ddpm_lab.explain.bands import DEFAULT, NAMED
from ddpm_lab.plan import PRESETS

if TYPE_CHECKING:
    from ddpm_lab.questions.planning import Measured

KEY_VARIABLE = "COMET_API_KEY"
RESOLUTION = "smallest difference to be found, such as 2%%"
SHARED: dict[str, dict[str, Any]] = {
    "preset": {"default": "quick", "help": f"how much is run: {', '.join(PRESETS)} (default: quick)"},
    "minutes": {"type": float, "help": "time budget"},
    "sets": {"type": int, "help": "sets per comparison (default: what the time gives, at least 4)"},
    "resolution": {"metavar": "SHARE", "help": RESOLUTION},
    "device": {"choices": DEVICES, "help": "default: the GPU where there is one"},
    "network": {"help": f"{', '.join(NETWORKS)} (default: the preset's choice for this machine)"},
    "workload": {
        "metavar": "MODULE:FUNCTION",
        "help": "a training of your own in place of the lab's DDPM (docs/your_own_model.md)",
    },
    "batch-size": {"type": int, "help": "global batch size"},
    "seed": {"type": int, "default": 0, "help": "seed of weights, data order and noise (default: 0)"},
    "data": {"default": "synthetic", "help": "images: a folder, an archive, or synthetic (the default)"},
    "held-out": {"metavar": "FOLDER", "help": "images never to train on (default: 5 %% of the data)"},
    "skip-bad": {"action": "store_true", "help": "leave damaged images out, and list them"},
    "image-size": {"type": int, "default": 32, "help": "side of the images in pixels (default: 32)"},
    "ledger": {"nargs": "+", "metavar": "FILE", "help": "records to read (default: your own ledger)"},
    "machine": {"metavar": "NAME", "help": "whose records: a name, a part of it, or a key"},
    "bands": {
        "default": DEFAULT,
        "metavar": "TABLE",
        "help": f"names of parallel efficiency: {', '.join(NAMED)}, or your own, such as good=75%%,fair=50%%,poor=0 "
        f"(default: {DEFAULT})",
    },
    "tracker": {
        "choices": ("comet", "comet-offline", "none"),
        "help": f"log to Comet ML, or into an archive for it (default: comet where {KEY_VARIABLE} is set, else none)",
    },
    "output-dir": {"help": "folder that receives all results (default: this checkout)"},
    "json": {"action": "store_true", "help": "print JSON"},
}
COMMON = ("preset", "data", "network", "workload", "minutes", "output-dir", "held-out", "skip-bad")
"""Options of ``run`` and of ``report``, which does the same with notebooks."""


def add(parser: argparse._ActionsContainer, *names: str, **otherwise: Any) -> None:
    """Add options of ``SHARED`` to a command, in this order; ``otherwise`` replaces what is said of them there."""
    for name in names:
        parser.add_argument(f"--{name}", **{**SHARED[name], **otherwise})


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options by name, as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON, which has no number that is not finite: what is unknown is null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def tell(options: argparse.Namespace, values: Any, lines: Iterable[object]) -> None:
    """Print an answer: ``values`` as JSON where that is asked for, else ``lines``."""
    print(*([json.dumps(values, indent=1)] if options.json else lines), sep="\n")


def tracker_chosen(option: str | None) -> str | None:
    """The tracker that the option names, or comet where its key is in the environment; None is none.

    Raises:
        ConfigError: comet is asked for and there is no key.
    """
    has_key = bool(os.environ.get(KEY_VARIABLE))
    if option == "comet" and not has_key:
        raise ConfigError(
            f"--tracker comet needs your key in the environment variable {KEY_VARIABLE}: set it, or give "
            "--tracker comet-offline for an archive"
        )
    name = option or ("comet" if has_key else "none")
    return None if name == "none" else name


def track(tracker: str, measured: Measured) -> None:
    """Tell a tracker what was measured, when nothing is measured any more; never raises."""
    try:
        from ddpm_lab.questions import experiments  # noqa: PLC0415 - not on a bare GPU node
        from ddpm_lab.reports import tracked  # noqa: PLC0415 - not on a bare GPU node

        tracked.tell(tracker, experiments.study_of(measured))
    except Exception as error:  # whatever fails here takes nothing from what was measured
        reason = f"{type(error).__name__}: {error}"
        print(f"tracker: {measured.experiment.name} is not, or not wholly, logged ({reason})", file=sys.stderr)
