"""The option ``--tracker``: which tracker a command tells what it has done, and what sets have shown."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ddpm_lab.checks import ConfigError

if TYPE_CHECKING:
    from ddpm_lab.planning import Measured

TRACKERS = ("comet", "comet-offline", "none")
KEY_VARIABLE = "COMET_API_KEY"


def chosen(option: str | None) -> str | None:
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
        from ddpm_lab.experiments import study_of  # noqa: PLC0415 - not on a bare GPU node
        from ddpm_lab.tracked import tell  # noqa: PLC0415

        tell(tracker, study_of(measured))
    except Exception as error:  # whatever fails here takes nothing from what was measured
        reason = f"{type(error).__name__}: {error}"
        print(f"tracker: {measured.experiment.name} is not, or not wholly, logged ({reason})", file=sys.stderr)
