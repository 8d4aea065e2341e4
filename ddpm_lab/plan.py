"""What is measured, and how much of it: plans, presets, and the families of configurations in an experiment."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any, NamedTuple

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import RunConfig, digest
from ddpm_lab.declared import Opt, reader, validate

USUAL_TURNS = 12  # assumed for a set until its number of turns is computed
LEAST_SETS = 4  # with fewer sets the ratio is shown without a verdict
RESOLUTION = 0.03  # default of the smallest relative difference that a comparison should detect
MOST_CANDIDATES = 5  # per set, in a family whose candidates are compared one by one
PRIMARY, OTHERS = STAGES = "primary", "others"
"""The stages of a question: first its primary comparison, then all others in the remaining time."""
BATCH = "batch"
Cell = tuple[int, ...]  # for each setting, the index of its value; the baseline is all zeros


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one set is measured.

    A window lasts ``window_seconds`` or ``window_steps`` steps, whichever is longer; with loader workers, at least
    twice the number of prefetched batches. ``turns`` is the number of turns in a set; 0 computes it in the first set of
    a comparison, from the time that starting up and one turn take, and keeps it for all later sets.
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
        """Hash of all fields except ``turns``: sets with equal keys may be pooled."""
        return digest({k: v for k, v in dataclasses.asdict(self).items() if k != "turns"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How much is run: sets per comparison, the plan of a set, cold compiles, and a time budget for all notebooks."""

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
    choice("preset", name, PRESETS)
    return PRESETS[name]


def usual_network(device: str, question: str = "") -> str:
    """Return the network that a question measures by default."""
    return "tiny" if device == "cpu" and question != "peers" else "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configurations that are compared with one baseline, in the same sets.

    ``candidates`` are in order of importance: if time is short, the last ones are dropped first. A family that only
    shows that a mechanism works (``mechanism``) needs one set. If ``search_up_to`` is not 0, the largest global batch
    size up to it that fits into memory is searched first, and larger candidates are dropped. ``together`` puts all
    candidates into each set, whatever their number, for results that are computed from several of them. ``primary`` is
    the label of the candidate that the answer is about, fixed in advance and measured first, in its own sets.
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
        """Maximum number of candidates in one set."""
        return max(1, len(self.candidates)) if self.together else MOST_CANDIDATES


def by_stage(families: Sequence[Family]) -> tuple[list[Family], list[Family]]:
    """Return the primary comparisons and all others, as families; without a primary candidate, all are primary."""
    first, rest = [], []
    for f in families:
        mine = tuple(row for row in f.candidates if row[0] == f.primary or (f.primary and f.together))
        others = tuple(row for row in f.candidates if row not in mine)
        first += [dataclasses.replace(f, candidates=mine)] if mine else []
        rest += [dataclasses.replace(f, candidates=others)] if others or not f.candidates else []
    return (first, rest) if first else (list(families), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fid:
    """A requested FID: the number of images, and the file of the Inception weights with its SHA-256.

    It does not affect training, so it is not part of a configuration.
    """

    inception: str
    sha256: str
    images: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A training run with one seed, whose quality is compared with that of the baseline trained with the same seed.

    ``timed`` is the configuration of the family whose quality the trial measures; the trial is skipped if that
    configuration is not timed. ``fid`` is the FID to compute from the averaged weights, if any.
    """

    family: str
    label: str
    baseline: RunConfig
    config: RunConfig
    timed: RunConfig | None = None
    fid: Fid | None = None


class Value(NamedTuple):
    """A value of a setting: its short name on the command line, its readable name, and the fields that it changes."""

    key: str
    label: str
    changes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space:
    """A search space: for each setting its values, the baseline's first, and what was left out with the reason.

    ``guess`` is the combination that is expected to be fast and tried first; ``only`` lists the settings that were
    restricted, with their allowed values. ``preset`` determines which values there are.
    """

    baseline: RunConfig
    settings: Mapping[str, tuple[Value, ...]]
    guess: Annotated[Cell, Opt(least=0)] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (label, reason)
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (setting, keys)
    preset: str = ""

    @property
    def start(self) -> Cell:
        return (0,) * len(self.settings)

    @cached_property
    def cells(self) -> dict[Cell, RunConfig]:
        """All combinations that give distinct, valid configurations."""
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
        """Return the labels of a cell's values that differ from ``since`` or the baseline, such as "bf16, 2 ranks"."""
        pairs = zip(self.values(cell), cell, since or self.start, strict=True)
        return ", ".join(value.label for value, mine, others in pairs if mine != others)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, without the baseline."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "baseline"}

    @classmethod
    def from_dict(cls, baseline: RunConfig, values: Mapping[str, Any]) -> "Space":
        """Rebuild a space from ``as_dict``; earlier ones held more. Raises ConfigError for anything else."""
        kept = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        found: Space = reader(cls)({**kept, "baseline": baseline}, "space")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What one question measures: families of configurations, and what was left out in advance, with reasons.

    A search has a ``space``; the candidates of its only family are all combinations of the space's values.
    """

    name: str
    families: tuple[Family, ...]
    left_out: tuple[tuple[str, str, str], ...] = ()  # (family, label, reason)
    profiles: tuple[tuple[str, str, RunConfig], ...] = ()  # (family, label, configuration); their times are not used
    trials: tuple[Trial, ...] = ()
    checks: tuple[Trial, ...] = ()  # of loss and gradient, or wrong ways to measure: they run first and take seconds
    space: Space | None = None
    asked: RunConfig | None = None  # the configuration in question, if nothing of it can be measured

    @property
    def configurations(self) -> tuple[RunConfig, ...]:
        """Every configuration, baselines first within each family."""
        compared = [c for f in self.families for c in (f.baseline, *(config for _, config in f.candidates))]
        others = [*(c for _, _, c in self.profiles), *(trial.config for trial in (*self.checks, *self.trials))]
        return (*compared, *others) or ((self.asked,) if self.asked else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The declaration of a question, in its module.

    Its name is that of its ``file``, a notebook or figure, without the number. The function of that name in the module
    returns its experiment, and ``answer`` its answer. ``trains`` says whether its configurations can also be trained
    for quality, and ``long`` whether it takes too long to be measured along with others. ``plan`` overrides the
    preset's plan of a set, and ``asked`` says whether ``ddpm-lab run`` measures it. Elsewhere stand the words of its
    headlines and commands (``explain/findings.py``), and whether a user's training can be asked
    (``training/setting.py``).
    """

    title: str
    file: str
    trains: bool = False
    long: bool = False
    plan: Plan | None = None
    asked: bool = True

    @property
    def name(self) -> str:
        """The file without its number, such as "amp" for 03_amp."""
        return self.file.lstrip("0123456789_")


NOT_TRAINED = "not trained"
"""Start of the note on a configuration that is not trained for quality because its gradient check failed."""
SEARCH, RECOMMENDATION, START = "search", "recommendation", "baseline"
"""The experiments that search and that measure the winner again, and the label of the search's plain first step."""
WHOLE_QUESTION = "the whole question"  # label of what was left out if nothing of a question can be measured

# Names in the experiment "peers", written by the package ``questions`` and read by ``explain``.
OURS, TUNED, FORMATS, COMPILED = "this trainer", ", tuned", " and channels_last", ", compiled"
LEVERS = ", one lever at a time"
FLASH_ATTENTION = "flash_attention"  # an option of the trainer that has it
ATTENTION = ("cudnn", "flash", "mem_efficient", "math")
"""Torch's kernels for softmax attention on a GPU; the option "attention" allows only one of them."""
FUSED_PARTS = (
    *("group norm", "layer norm", "linear attention", "upsampling", "time layers"),
    *("weights' gradient", "attention products"),
)
"""What kernels 'fused' combines or replaces, the last two only in bf16; the option "without" excludes one."""

# Families of the experiment "multi_gpu": names that contain neither WEAK nor LOST are strong scaling.
SCALINGS = ("strong", "weak", "both")
WEAK, LOST = ", weak scaling", ", lost scaling"

# Configurations that the lost scaling is computed from, in addition to one of all ranks, such as "2 ranks".
NO_EXCHANGE, READY_BATCHES, ALL_OFF = "no exchange", "ready batches", "all of these off"
ONE_RANK, ONE_OFF = "one rank", "one rank, all of these off"
ONE_SMALL, ONE_SMALL_THREADS = "one rank, batch of a rank", "one rank, batch and threads of a rank"


def scaling(family: str) -> str | None:
    """Return "strong" or "weak" for a family of the experiment "multi_gpu"; None if it measures neither."""
    if LOST in family:
        return None
    return "weak" if WEAK in family else "strong"
