"""An archive that comet_ml has written, opened with zipfile, with comet's own schemas and with its own command."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any


def messages(archive: Path) -> list[dict[str, Any]]:
    """Every message, in order."""
    with zipfile.ZipFile(archive) as file:
        return [json.loads(line) for line in file.read("messages.json").splitlines()]


def metric(archive: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of each time that a number was logged."""
    found = [m["payload"]["metric"] for m in messages(archive) if m["type"] == "metric_msg"]
    return [(m["step"], m["metricValue"]) for m in found if m["metricName"] == name]


def others(archive: Path) -> dict[str, Any]:
    """What is neither hyper-parameter nor metric, by name."""
    return {m["payload"]["key"]: m["payload"]["value"] for m in messages(archive) if m["type"] == "log_other"}


def read_by_comet(archive: Path) -> list[dict[str, str]]:
    """The rows that ``comet offline --csv`` makes of an archive."""
    words = [sys.executable, "-m", "comet_ml.scripts.comet", "offline", "--csv", "--level", "detail", str(archive)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    return list(csv.DictReader(io.StringIO(shown.stdout)))
