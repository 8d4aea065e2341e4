"""Settings in a TOML file: from a file to a configuration, and back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig

NONE = "none"
"""How a file says that a number is left out, such as ``clip_norm``: TOML has no null."""
OWN = ("purpose", "workload", "options")
"""Settings that a training decides by itself, so that no file gives them."""
MAY_BE_NONE = (("diffusion", "min_snr_gamma"), ("optimizer", "clip_norm"))


def read_settings(path: Path, place: str) -> dict[str, Any]:
    """The settings in a TOML file, as they stand there. Raises ConfigError, which names ``place``."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{place}: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: {path} is not TOML: {error}") from error
    for table, name in MAY_BE_NONE:
        if isinstance(values.get(table), dict) and values[table].get(name) == NONE:
            values[table][name] = None
    return values


def configuration(values: Mapping[str, Any], place: str) -> RunConfig:
    """The configuration with these settings. Raises ConfigError, which names ``place``."""
    if values.get("revision"):
        raise ConfigError(f"{place}: revision is {values['revision']!r}: leave it out, and use compare --against")
    try:
        return RunConfig.from_dict(values)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from error


def settings_text(values: Mapping[str, Any]) -> str:
    """Settings as TOML that ``read_settings`` reads back; a dictionary among them becomes a table."""
    tables = {name: table for name, table in values.items() if isinstance(table, Mapping)}
    lines = [f"{name} = {_value(value)}" for name, value in values.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Strings, numbers, booleans and lists of them are written in TOML as in JSON, but for inf and nan."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return float.__repr__(value)
    return json.dumps(NONE if value is None else value, ensure_ascii=False)
