"""How much is measured: the plan of a set, the presets, and the families that make up an experiment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any, NamedTuple

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import RunConfig, digest
from ddpm_lab.declared import Opt, validate

USUAL_TURNS = 12  # of a set whose turns are not computed yet
LEAST_SETS = 4  # with fewer sets a ratio is shown and no verdict is given
RESOLUTION = 0.03  # the smallest relative difference that a comparison is asked to find, unless another is given
MOST_CANDIDATES = 5  # in one set of a family whose candidates are compared one by one
PRIMARY, OTHERS = STAGES = "primary", "others"
"""The stages of a question: its primary comparison first, then all others with the time that is left."""
BATCH = "batch"
Cell = tuple[int, ...]  # one value of each setting, by its place; the baseline is all zeros


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one set is measured.

    A window lasts ``window_seconds`` or ``window_steps`` steps, whichever is longer; with loader workers at least twice
    what they prefetch. A set has ``turns`` turns; 0 computes them before the first set of a comparison from what its
    start and its turns cost, and every further set has as many.
    """

    turns: Annotated[int, Opt(least=0)] = 0
    window_seconds: Annotated[float, Opt(above=0, below=3600)] = 0.2
    window_steps: Annotated[int, Opt(least=1)] = 1
    settle_steps: Annotated[int, Opt(least=1)] = 2
    warmup_steps: Annotated[int, Opt(least=1)] = 10

    def __post_init__(self) -> None:
        validate(self, "plan.")
        object.__setattr__(self, "window_seconds", float(self.window_seconds))  # 1 and 1.0 are one plan

    @cached_property
    def key(self) -> str:
        """Hash that says which sets may be pooled; their number of turns is fixed for each comparison instead."""
        return digest({k: v for k, v in dataclasses.asdict(self).items() if k != "turns"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How much is run: sets per comparison, the plan of a set, cold compiles, and the budget of all notebooks."""

    sets: int
    plan: Plan
    cold_compiles: int
    minutes: float | None


PRESETS = {
    "smoke": Preset(sets=1, plan=Plan(turns=2, window_seconds=0.1), cold_compiles=1, minutes=3.0),
    "quick": Preset(sets=6, plan=Plan(), cold_compiles=1, minutes=9.5),
    "full": Preset(sets=12, plan=Plan(), cold_compiles=3, minutes=None),
}


def preset(name: str) -> Preset:
    """The preset called ``name``; raises ConfigError for another."""
    choice("preset", name, PRESETS)
    return PRESETS[name]


def usual_network(device: str, question: str = "") -> str:
    """The network that a question measures where none is named."""
    return "tiny" if device == "cpu" and question != "peers" else "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configurations that are compared with one baseline, in the same sets.

    ``candidates`` come in order of importance: where time is short the last ones are left out first. A family that only
    shows that a mechanism works (``mechanism``) needs one set. With ``search_up_to`` the largest global batch size that
    fits into memory, up to this one, is searched first, and larger candidates are left out. ``together`` puts all
    candidates into each set, however many they are: what is computed from several of them needs them side by side.
    ``primary`` is the label of the candidate that the question's answer is about: the definition of the question fixes
    it, and it is measured before all others, in sets of its own.
    """

    name: str
    baseline: RunConfig
    baseline_label: str
    candidates: tuple[tuple[str, RunConfig], ...]
    mechanism: bool = False
    search_up_to: int = 0
    together: bool = False
    primary: str = ""

    @property
    def at_once(self) -> int:
        """The most candidates in one set."""
        return max(1, len(self.candidates)) if self.together else MOST_CANDIDATES


def by_stage(families: Sequence[Family]) -> tuple[list[Family], list[Family]]:
    """The primary comparisons, and all others; of a question without a primary comparison everything is primary."""
    first, rest = [], []
    for f in families:
        mine = tuple(row for row in f.candidates if row[0] == f.primary or (f.primary and f.together))
        others = tuple(row for row in f.candidates if row not in mine)
        first += [dataclasses.replace(f, candidates=mine)] if mine else []
        rest += [dataclasses.replace(f, candidates=others)] if others or not f.candidates else []
    return (first, rest) if first else (list(families), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fid:
    """A FID that is asked for: of how many images, and the Inception's file of weights with its SHA-256.

    It changes nothing of what is trained, and so it is no part of a configuration.
    """

    inception: str
    sha256: str
    images: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run that trains for the weights, with one seed: what it learns is compared with the baseline's of that seed.

    ``timed`` is the configuration of the family whose quality it tells: a trial of what the sets leave out is none.
    The ``fid`` of its averaged weights is measured if one is asked for.
    """

    family: str
    label: str
    baseline: RunConfig
    config: RunConfig
    timed: RunConfig | None = None
    fid: Fid | None = None


class Value(NamedTuple):
    """A value of a setting: its short name for a command line, its name for people, and what it changes."""

    key: str
    label: str
    changes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space:
    """Settings in order, each with its values, the baseline's own first, and what was left out with the reason.

    ``guess`` is what is thought to be fast, and tried first; ``only`` are values that settings were held to.
    Which values there are is the choice of the ``preset``.
    """

    baseline: RunConfig
    settings: Mapping[str, tuple[Value, ...]]
    guess: Cell = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (label, reason)
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (setting, keys)
    preset: str = ""

    @property
    def start(self) -> Cell:
        return (0,) * len(self.settings)

    @cached_property
    def cells(self) -> dict[Cell, RunConfig]:
        """Every combination that is a configuration of its own: what excludes itself is not there."""
        found: dict[RunConfig, Cell] = {}
        for cell in product(*(range(len(values)) for values in self.settings.values())):
            changes: dict[str, Any] = {}
            for value in self.values(cell):
                changes |= value.changes
            with suppress(ConfigError, TypeError):  # TypeError: a setting of no configuration, in a record
                found.setdefault(dataclasses.replace(self.baseline, **changes), cell)
        return {cell: config for config, cell in found.items()}

    def values(self, cell: Cell) -> list[Value]:
        return [values[i] for values, i in zip(self.settings.values(), cell, strict=True)]

    def changed(self, cell: Cell, since: Cell | None = None) -> str:
        """Return what a cell has that another, or the baseline, has not: "bf16, 2 ranks"."""
        pairs = zip(self.values(cell), cell, since or self.start, strict=True)
        return ", ".join(value.label for value, mine, others in pairs if mine != others)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, without the baseline."""
        names = ("settings", "guess", "left_out", "only", "preset")
        values: dict[str, Any] = json.loads(json.dumps({name: getattr(self, name) for name in names}))
        return values

    @classmethod
    def from_dict(cls, baseline: RunConfig, values: Mapping[str, Any]) -> Space:
        """The space of a record."""
        return cls(
            baseline=baseline,
            settings={name: tuple(Value(*value) for value in found) for name, found in values["settings"].items()},
            guess=tuple(values["guess"]),
            left_out=tuple((label, reason) for label, reason in values["left_out"]),
            only=tuple((name, tuple(keys)) for name, keys in values.get("only", ())),
            preset=values.get("preset", ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One question: families of configurations, and what was left out of them before any measuring, with reasons.

    A search has a ``space`` that its one family's candidates are all combinations of.
    """

    name: str
    families: tuple[Family, ...]
    left_out: tuple[tuple[str, str, str], ...] = ()  # (family, label, reason)
    profiles: tuple[tuple[str, str, RunConfig], ...] = ()  # (family, label, configuration): they supply no time
    trials: tuple[Trial, ...] = ()
    checks: tuple[Trial, ...] = ()  # of loss and gradient, or wrong ways to measure: they come first and take seconds
    space: Space | None = None
    asked: RunConfig | None = None  # what the question was asked of, where nothing of it can be measured

    @property
    def configurations(self) -> tuple[RunConfig, ...]:
        """Every configuration, baselines first within each family."""
        compared = [c for f in self.families for c in (f.baseline, *(config for _, config in f.candidates))]
        others = [*(c for _, _, c in self.profiles), *(trial.config for trial in (*self.checks, *self.trials))]
        return (*compared, *others) or ((self.asked,) if self.asked else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a question declares of itself.

    Its name is that of its ``file``, a notebook or figures, without the number. It asks by the function of that name
    and answers by ``answer``. ``trains`` says whether its configurations can be trained for their quality too, ``long``
    whether it takes too long to be measured beside others, ``plan`` how a set is measured where that is not as the
    preset says, and ``asked`` whether ``ddpm-lab run`` measures it. Elsewhere stand the words of its headlines and
    commands (``explain/findings.py``), and whether a user's training can be asked (``training/setting.py``).
    """

    title: str
    file: str
    trains: bool = False
    long: bool = False
    plan: Plan | None = None
    asked: bool = True

    @property
    def name(self) -> str:
        """Such as "amp" of 03_amp."""
        return self.file.lstrip("0123456789_")


NOT_TRAINED = "not trained"
"""Begins the note of a configuration that is not trained for its quality since its gradient check failed."""
SEARCH, RECOMMENDATION, START = "search", "recommendation", "baseline"
"""Short sets of a search, the sets that measure its winner again, and the label of the plain step it sets out from."""
WHOLE_QUESTION = "the whole question"  # label of what is left out where nothing of a question can be asked

# Names in the experiment "peers" that the questions write and the explaining half reads.
OURS, TUNED, FORMATS, COMPILED = "this trainer", ", tuned", " and channels_last", ", compiled"
LEVERS = ", one lever at a time"
FLASH_ATTENTION = "flash_attention"  # an option of the trainer that has it
ATTENTION = ("cudnn", "flash", "mem_efficient", "math")
"""Torch's kernels of softmax attention on a GPU; the option "attention" leaves it one alone."""
FUSED_PARTS = (
    *("group norm", "layer norm", "linear attention", "upsampling", "time layers"),
    *("weights' gradient", "attention products"),
)
"""What kernels 'fused' joins or replaces, the last two in bf16 alone; the option "without" leaves one out."""

# Families of the experiment "multi_gpu": a name without any of these is strong scaling.
SCALINGS = ("strong", "weak", "both")
WEAK, LOST = ", weak scaling", ", lost scaling"

# Configurations from whose differences the lost scaling is computed, beside one of all ranks, such as "2 ranks".
NO_EXCHANGE, READY_BATCHES, ALL_OFF = "no exchange", "ready batches", "all of these off"
ONE_RANK, ONE_OFF = "one rank", "one rank, all of these off"
ONE_SMALL, ONE_SMALL_THREADS = "one rank, batch of a rank", "one rank, batch and threads of a rank"


def scaling(family: str) -> str | None:
    """Which scaling a family of the experiment "multi_gpu" shows: strong or weak; None if it asks something else."""
    if LOST in family:
        return None
    return "weak" if WEAK in family else "strong"
