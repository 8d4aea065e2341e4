"""What a search for the fastest configuration chooses from, and how what it found is measured again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddpm_lab.checks import ConfigError, choice, several
from ddpm_lab.plan import RECOMMENDATION, SEARCH, START, Experiment, Family, Plan, Trial
from ddpm_lab.questions.quality import identity_trials
from ddpm_lab.space import BATCH, Cell, Space, Value
from ddpm_lab.training.setting import Batch, Setup, usual_settings

SEARCH_PLAN = Plan(turns=6)
"""Half as many turns as elsewhere: a search has no verdict to give, and more sets for those that stay in the race."""
_WORKERS = {"smoke": (0,), "quick": (0, 1, 2), "full": (0, 1, 2, 8)}
_BATCHES = {"smoke": (1,), "quick": (1, 2, 4), "full": (1, 2, 4)}
"""Multiples of the baseline's batch."""
_EAGER, _WHOLE = {"compile": "off"}, {"compile": "whole"}
_CUDA, _GPU = "needs a CUDA device", "need a GPU"


def search(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    only: Mapping[str, Sequence[object]] | None = None,
    any_batch: bool = False,
) -> Experiment:
    """Every combination of settings that can apply here; the first value of each makes the baseline, a plain step.

    ``only`` names settings that are held to some of their values, by their short names: ``{"precision": ["bf16"]}``
    sets out from bf16 and stays there. Raises ConfigError for a setting or a value that there is not.
    """
    able: dict[str, list[Value]] = {}
    left_out: dict[str, str] = {}
    for name, value, why in _values(setup, setup.batch_size(global_batch_size)):
        if why:
            left_out[value.label] = why
        else:
            able.setdefault(name, []).append(value)
    settings = _only(able, only or {}, left_out)
    base = setup.config(**{name: new for values in settings.values() for name, new in values[0].changes.items()})
    space = Space(
        baseline=base,
        settings=settings,
        guess=_guess(settings, setup),
        left_out=tuple(left_out.items()),
        any_batch=any_batch,
    )
    others = tuple((space.changed(cell), config) for cell, config in space.cells.items())[1:]
    if not others:
        raise ConfigError("only leaves one value of every setting: nothing is left to be searched; give more values")
    name = setup.family_name(base.global_batch_size)
    family = Family(name=name, baseline=base, baseline_label=START, candidates=others)
    return Experiment(name=SEARCH, families=(family,), space=space)


def _values(setup: Setup, batch: int) -> Iterator[tuple[str, Value, str]]:
    """Yield each value with its setting and why it cannot run here, if so; the plain step's values come first."""
    cuda, own, full = setup.device == "cuda", setup.own, setup.preset == "full"
    offers = own.offers if own else ("loss", "dataset")  # one's own is trained as it is written
    needs_cuda = "" if cuda else _CUDA
    for name, why in (("fp32", ""), ("bf16", ""), ("tf32", needs_cuda), ("fp16", needs_cuda)):
        if name == "fp32" or why or "loss" in offers:
            yield "precision", Value(name, name, {"precision": name}), why
    last = Value("channels_last", "channels_last", {"channels_last": True, "kernels": "aten"})
    nchw = Value("nchw", "NCHW", {"channels_last": False, "kernels": "aten"})
    fused = Value("fused", "joined kernels", {"channels_last": True, "kernels": "fused"})
    for value in (nchw, last) if own else (last, nchw, fused):
        yield "memory", value, ""
    yield "compile", Value("off", "eager", _EAGER), ""
    yield "compile", Value("whole", "compiled", _WHOLE), ""
    if full and not own:
        yield "compile", Value("regional", "compiled block by block", {"compile": "regional"}), ""
    for mode, label in (("reduce-overhead", "compiled, CUDA graphs"), ("max-autotune", "compiled, max-autotune")):
        if full if cuda else not own:
            yield "compile", Value(mode, label, {**_WHOLE, "compile_mode": mode}), "" if cuda else _GPU
    for kind, end in (("default", "given back"), ("kept", "kept")) if not cuda else ():
        yield "freed_memory", Value(kind, f"freed memory {end}", {"freed_memory": kind}), ""
    ranks = setup.doubled_ranks
    for n in ranks if ranks != [1] else (1, 2):
        changes = {"world_size": n, "nodes": setup.nodes(n)} if n in ranks else {}
        yield "ranks", Value(str(n), setup.ranks_label(n), changes), "" if n in ranks else setup.why_alone
    if not own:
        yield "loader", Value("packed", "packed data", {"loader": "packed", "loader_workers": 0}), ""
        resident = Value("resident", "images on the GPU", {"loader": "resident", "loader_workers": 0})
        yield "loader", resident, "" if cuda else "need a CUDA device"
    elif "dataset" not in offers:
        yield "loader", Value("own", "batches of its own", {}), ""
    for count in _WORKERS[setup.preset] if "dataset" in offers else ():
        label = f"{'' if own else 'files, '}{count} worker{'s' * (count != 1)}"
        why = f"more than the {setup.cores_name}" if count > setup.usable_cores else ""
        yield "loader", Value(f"files-{count}", label, {"loader": "files", "loader_workers": count}), why
    for n in (batch * multiple for multiple in _BATCHES[setup.preset]):
        yield BATCH, Value(str(n), f"batch {n}", {"global_batch_size": n}), ""


def _only(
    settings: Mapping[str, Sequence[Value]], only: Mapping[str, Sequence[object]], left_out: Mapping[str, str]
) -> dict[str, tuple[Value, ...]]:
    found = {name: tuple(values) for name, values in settings.items()}
    if not isinstance(only, Mapping):
        raise ConfigError(f"only is {only!r}: give settings with lists of values, such as {{'precision': ['bf16']}}")
    for name, keys in only.items():
        choice("only", name, settings)
        several(f"only {name}", keys)
        known = {value.key: value for value in settings[name]}
        for key in map(str, keys):
            if name == BATCH and key.isdecimal() and int(key):
                known.setdefault(key, Value(key, f"batch {key}", {"global_batch_size": int(key)}))
            elif key not in known and key in left_out:
                raise ConfigError(f"only {name} has {key!r}, which {left_out[key]}: choose from {', '.join(known)}")
            else:
                choice(f"only {name}", key, known)
        found[name] = tuple(known[key] for key in dict.fromkeys(map(str, keys)))
    return found


def _guess(settings: Mapping[str, Sequence[Value]], setup: Setup) -> Cell:
    """Return the trainer's settings for speed on this kind of device, as far as they are among the values."""
    usual = usual_settings(setup.device).items()

    def fits(value: Value) -> bool:
        said = value.changes.items()
        return not said.isdisjoint(usual) and all(value.changes.get(name, new) == new for name, new in usual)

    return tuple(next((i for i, v in enumerate(values) if fits(v)), 0) for values in settings.values())


def recommendation(setup: Setup, *, space: Space, steps: Sequence[Cell]) -> Experiment:
    """What a search found, and before it each step on the way from the baseline, in one family.

    ``steps`` are cells, the baseline first, each with more changes than the one before; what was found is the last, and
    the candidate that time is taken for first. Where a step changes the loader alone, twenty steps of training show
    that it learns the same.
    """
    cells, name = space.cells, setup.family_name(space.baseline.global_batch_size)
    rows = [(space.changed(cell), cells[cell]) for cell in steps[1:]]
    trials: tuple[Trial, ...] = ()
    for (label, config), before in zip(rows, steps, strict=False):
        if config.differences(cells[before]).keys() <= {"loader", "loader_workers"} and not setup.own:
            pair = Family(name=name, baseline=cells[before], baseline_label=START, candidates=((label, config),))
            trials += identity_trials(pair)
    family = Family(
        name=", ".join([name, *(label for label, _ in rows[-1:])]),
        baseline=space.baseline,
        baseline_label=START,
        candidates=(*rows[-1:], *rows[:-1]),
        together=True,
        primary=rows[-1][0] if rows else "",
    )
    return Experiment(name=RECOMMENDATION, families=(family,), trials=trials, space=space)
