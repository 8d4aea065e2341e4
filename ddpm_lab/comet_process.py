"""The process that hands to Comet ML what ``tracking`` tells it, and the only place that imports comet_ml.

It is run by its path and imports nothing of the lab, so that what comet_ml patches, hangs in or starts in its own
threads stays here. Standard input: a JSON object that says where to, then one for each call; its end is the end of the
experiment, also where the run was killed. Standard output: JSON objects with ``failed``, ``at`` or ``ended``.
"""

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

OFF = {
    "COMET_DISABLE_AUTO_LOGGING": "1",  # else importing it patches torch, matplotlib and other packages
    "COMET_ERROR_TRACKING_ENABLE": "0",
    "COMET_INTERNAL_REPORTING": "0",
    "COMET_DISABLE_ANNOUNCEMENT": "1",
}
NOTHING_BY_ITSELF = {
    **dict.fromkeys(("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch"), False),
    **dict.fromkeys(("auto_param_logging", "auto_metric_logging", "auto_output_logging", "auto_log_co2"), False),
    **dict.fromkeys(("auto_histogram_tensorboard_logging", "auto_histogram_weight_logging"), False),
    **dict.fromkeys(("auto_histogram_gradient_logging", "auto_histogram_activation_logging"), False),
    **dict.fromkeys(("log_env_details", "log_env_gpu", "log_env_host", "log_env_cpu"), False),
    **dict.fromkeys(("log_env_network", "log_env_disk"), False),
    "display_summary_level": 0,
}
IMPORT_SECONDS = 120
"""For a package of some thousand files on a slow disk, at a low priority."""


class _FirstError(logging.Handler):
    """Keeps the first error that comet_ml logs: it seldom raises one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


def main() -> None:
    """Log what arrives until there is no more."""
    # A signal to the whole job is the run's to handle; the end of the input is what ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    os.environ.update(OFF)
    heard = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever comet_ml prints is no message
    calls = sys.stdin
    errors = _FirstError()
    try:
        _log(json.loads(calls.readline()), calls, heard, errors)
    except ModuleNotFoundError as missing:
        _tell(heard, failed=f"{missing.name} is not installed: run make trackers")
    except Exception as error:
        _tell(heard, failed=errors.text or f"{type(error).__name__}: {error}")
    os._exit(0)  # comet_ml would wait for its threads, up to hours


def _log(where: dict[str, Any], calls: TextIO, heard: TextIO, errors: _FirstError) -> None:
    """Open the experiment, make the calls, and end it; an alarm ends what takes too long, even inside of C."""
    signal.alarm(IMPORT_SECONDS)
    import comet_ml  # noqa: PLC0415 - after what it must not do is switched off

    logging.getLogger("comet_ml").addHandler(errors)
    signal.alarm(where["connect_seconds"])
    if not where["online"]:
        Path(where["folder"]).mkdir(parents=True, exist_ok=True)
    experiment: Any = comet_ml.start(
        online=where["online"],
        mode="get_or_create",
        experiment_key=where["key"],
        experiment_config=comet_ml.ExperimentConfig(
            name=where["name"], offline_directory=where["folder"], **NOTHING_BY_ITSELF
        ),
    )
    if not experiment.alive:
        _tell(heard, failed=errors.text or "it did not accept the experiment")
        return
    signal.alarm(0)
    for line in calls:
        with contextlib.suppress(ValueError):  # the last line of a run that was killed
            call = json.loads(line)
            getattr(experiment, call["call"])(*call["values"], **call["named"])
    signal.alarm(where["end_seconds"])
    experiment.end()
    signal.alarm(0)
    _tell(heard, **({"failed": errors.text} if errors.text else {"ended": experiment.url if where["online"] else ""}))


def _tell(heard: TextIO, **values: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(values), file=heard, flush=True)


if __name__ == "__main__":
    main()
