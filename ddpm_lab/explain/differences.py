"""Two runs side by side: only the settings that differ, and whether only what should differ does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain.grids import Grid
from ddpm_lab.explain.phrases import joined
from ddpm_lab.record import RunRecord

HOW = (
    *("device", "world_size", "nodes", "oversubscribe", "threads", "accumulation", "precision", "channels_last"),
    *("compile", "compile_mode", "implementation", "kernels", "freed_memory", "optimizer.adam", "optimizer.ema"),
    *("loader", "loader_workers", "read_loss"),
    *("exchange.bucket_view", "exchange.static_graph", "exchange.bucket_mb", "exchange.hook", "exchange.nccl"),
)
"""Settings of how a network is trained, which a benchmark varies: all others say what is trained."""
LENGTH = "train.steps"
"""How long a run trains, which is none of its settings: speeds compare all the same, losses do not."""
ABSENT = "\N{EN DASH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is compared: its settings, and what is known of where and how long it ran (``circumstances``)."""

    name: str
    config: RunConfig
    circumstances: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that differs; ``kind`` is how, what, length or where."""

    setting: str
    values: tuple[Any, Any]
    kind: str


KINDS = {
    "how": "how it is trained",
    "what": "what is trained",
    "length": "how long it is trained",
    "where": "where it ran",
}


def of_record(name: str, record: RunRecord) -> Run:
    """A record's run, with the machine, the code and the data that it was measured with."""
    where = {
        "machine": f"{record.machine.name} ({record.machine.key})",
        "torch": record.machine.torch,
        "code version": record.code_version,
        "images": record.data_name,
        "turns and windows": record.plan.key,
    }
    return Run(name=name, config=record.config, circumstances=where)


def differences(one: Run, other: Run) -> list[Difference]:
    """What differs, one row a setting; circumstances only where both sides know theirs."""
    sides = _flat(one.config), _flat(other.config)
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    found = [
        Difference(setting=n, values=(a, b), kind="how" if n in HOW else "what")
        for n in names
        if (a := sides[0].get(n)) != (b := sides[1].get(n))
    ]
    both = [n for n in one.circumstances if n in other.circumstances]
    values = ((n, one.circumstances[n], other.circumstances[n]) for n in both)
    return [
        *found,
        *(
            Difference(setting=n, values=(a, b), kind="length" if n == LENGTH else "where")
            for n, a, b in values
            if a != b
        ),
    ]


def _flat(config: RunConfig) -> dict[str, Any]:
    """Settings by name, those of a table with its name before: ``optimizer.learning_rate``; not where images lie."""
    found: dict[str, Any] = {}
    for name, value in config.as_dict().items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": v for key, v in value.items()}
        elif name != "data":
            found[name] = value
    return found


def grid(found: Sequence[Difference], one: Run, other: Run) -> Grid:
    """The differences as a table."""
    rows = [[d.setting, *(_said(v) for v in d.values), KINDS[d.kind]] for d in found]
    return [["Setting", one.name, other.name, "Says"], *rows]


def _said(value: Any) -> str:
    text = ABSENT if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:12]}\N{HORIZONTAL ELLIPSIS}"


def unexpected(found: Sequence[Difference], only: Sequence[str] | None) -> list[Difference]:
    """What differs and should not: all but ``only``, or, if it is None, all but how the same network is trained.

    Raises ConfigError for a name that is no setting; a table's name stands for all that is in it.
    """
    known = {*_flat(RunConfig()), "machine", "torch", "code version", "images", "turns and windows", LENGTH}
    tables = {name.partition(".")[0] for name in known if "." in name}
    for name in only or ():
        if name not in known | tables and not name.startswith("options."):
            raise ConfigError(f"--only has {name!r}, which is no setting: give names such as world_size,precision")
    if only is None:
        return [d for d in found if d.kind != "how"]
    return [d for d in found if d.setting not in only and d.setting.partition(".")[0] not in only]


def sentence(found: Sequence[Difference], only: Sequence[str] | None) -> str:
    """Whether only what should differ does."""
    if not found:
        return "Nothing differs: both do the same work."
    wrong = unexpected(found, only)
    allowed = f"only {joined(list(only))} may differ" if only else "nothing may differ"
    expected = "only how it is trained may differ" if only is None else allowed
    fine = [d.setting for d in found if d not in wrong]
    longer = (
        " Their trainings are not equally long, so their losses do not compare."
        if any(d.kind == "length" for d in found)
        else ""
    )
    if not wrong:
        return f"Only what should differ does: {joined(fine)} ({expected}).{longer}"
    told = f"{joined([d.setting for d in wrong])} should not differ ({expected})"
    if only is None and any(d.kind == "what" for d in wrong):
        told += ": another training, so that a ratio of speeds says nothing of equal work by itself"
    elif only is None and any(d.kind == "where" for d in wrong):
        told += ": the lab compares no records that disagree there"
    return f"{told}." + (f" As it should be: {joined(fine)}." if fine else "") + longer
