"""What a search for the fastest configuration chooses from, and how what it found is measured again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpm_lab.checks import ConfigError, choice, several
from ddpm_lab.plan import RECOMMENDATION, SEARCH, START, Experiment, Family, Plan, Trial
from ddpm_lab.questions.quality import identity_trials
from ddpm_lab.space import BATCH, Cell, Space, Value
from ddpm_lab.training.setting import Batch, Setup, usual_settings

LOADER = "loader"
SEARCH_PLAN = Plan(turns=6)
"""Half as many turns as elsewhere: a search has no verdict to give, and more sets for those that stay in the race."""
CUDA_ONLY = {"tf32": "needs a CUDA device", "fp16": "needs a CUDA device"}
_PRECISIONS = ("fp32", "bf16", *CUDA_ONLY)
_FREED = {"default": " given back", "kept": " kept"}
_WORKERS = {"smoke": (0,), "quick": (0, 1, 2), "full": (0, 1, 2, 8)}
_BATCHES = {"smoke": (1,), "quick": (1, 2, 4), "full": (1, 2, 4)}
"""Multiples of the baseline's batch."""


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
    settings, left_out = _settings(setup, setup.batch_size(global_batch_size))
    settings = _only(settings, only or {}, dict(left_out))
    changes: dict[str, Any] = {}
    for values in settings.values():
        changes |= values[0].changes
    base = setup.config(**changes)
    space = Space(
        baseline=base,
        settings=settings,
        guess=_guess(settings, setup),
        left_out=tuple(left_out),
        any_batch=any_batch,
    )
    others = [(space.changed(cell, space.start), config) for cell, config in space.cells.items()][1:]
    if not others:
        raise ConfigError("only leaves one value of every setting: nothing is left to be searched; give more values")
    family = Family(
        name=setup.family_name(base.global_batch_size), baseline=base, baseline_label=START, candidates=tuple(others)
    )
    return Experiment(name=SEARCH, families=(family,), space=space)


def _settings(setup: Setup, batch: int) -> tuple[dict[str, tuple[Value, ...]], list[tuple[str, str]]]:
    """All settings with the values that this machine can run, the plain step's first; and the others, with reasons."""
    cuda, preset, own = setup.device == "cuda", setup.preset, setup.own
    able = [p for p in _PRECISIONS if cuda or p not in CUDA_ONLY]
    left_out = [(p, CUDA_ONLY[p]) for p in _PRECISIONS if p not in able]
    compiles = [Value("off", "eager", {"compile": "off"}), Value("whole", "compiled", {"compile": "whole"})]
    memory = [Value("channels_last", "channels_last", {"channels_last": True, "kernels": "aten"})]
    memory.append(Value("nchw", "NCHW", {"channels_last": False, "kernels": "aten"}))
    if own:  # it is trained as it is written, and loads its own samples
        memory.reverse()
        able = able if "loss" in own.offers else ["fp32"]
    loaders = [Value("packed", "packed data", {"loader": "packed", "loader_workers": 0})]
    freed = [] if cuda else [Value(kind, f"freed memory{end}", {"freed_memory": kind}) for kind, end in _FREED.items()]
    modes = {"reduce-overhead": "compiled, CUDA graphs", "max-autotune": "compiled, max-autotune"}
    if preset == "full" and not own:
        compiles.append(Value("regional", "compiled block by block", {"compile": "regional"}))
    if own:
        loaders = [] if "dataset" in own.offers else [Value("own", "batches of its own", {})]
    elif cuda:
        loaders.append(Value("resident", "images on the GPU", {"loader": "resident", "loader_workers": 0}))
    else:
        left_out += [("images on the GPU", "need a CUDA device"), *((v, "need a GPU") for v in modes.values())]
    if not own:
        memory.append(Value("fused", "joined kernels", {"channels_last": True, "kernels": "fused"}))
    if cuda and preset == "full":
        compiles += [Value(m, label, {"compile": "whole", "compile_mode": m}) for m, label in modes.items()]
    for count in _WORKERS[preset] if not own or "dataset" in own.offers else ():
        label = f"{'' if own else 'files, '}{count} worker{'s' * (count != 1)}"
        if count > setup.usable_cores:
            left_out.append((label, f"more than the {setup.cores_name}"))
        else:
            loaders.append(Value(f"files-{count}", label, {"loader": "files", "loader_workers": count}))
    ranks = setup.doubled_ranks
    if ranks == [1]:
        left_out.append((setup.ranks_label(2), setup.why_alone))
    sizes = [batch * multiple for multiple in _BATCHES[preset]]
    return {
        "precision": tuple(Value(p, p, {"precision": p}) for p in able),
        "memory": tuple(memory),
        "compile": tuple(compiles),
        **({"freed_memory": tuple(freed)} if freed else {}),
        "ranks": tuple(Value(str(n), setup.ranks_label(n), {"world_size": n, "nodes": setup.nodes(n)}) for n in ranks),
        LOADER: tuple(loaders),
        BATCH: tuple(Value(str(n), f"batch {n}", {"global_batch_size": n}) for n in sizes),
    }, left_out


def _only(
    settings: dict[str, tuple[Value, ...]], only: Mapping[str, Sequence[object]], left_out: Mapping[str, str]
) -> dict[str, tuple[Value, ...]]:
    found = dict(settings)
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


def _guess(settings: Mapping[str, tuple[Value, ...]], setup: Setup) -> Cell:
    """The trainer's settings for speed on this kind of device, as far as they are among the values."""
    usual = usual_settings(setup.device)

    def fits(value: Value) -> bool:
        said = value.changes.keys() & usual.keys()
        return bool(said) and all(value.changes[name] == usual[name] for name in said)

    return tuple(next((i for i, v in enumerate(values) if fits(v)), 0) for values in settings.values())


def recommendation(setup: Setup, *, space: Space, steps: Sequence[Cell]) -> Experiment:
    """What a search found, and before it each step on the way from the baseline, in one family.

    ``steps`` are cells, the baseline first, each with more changes than the one before; what was found is the last, and
    the candidate that time is taken for first. Where a step changes the loader alone, twenty steps of training show
    that it learns the same.
    """
    cells, name = space.cells, setup.family_name(space.baseline.global_batch_size)
    rows = [(space.changed(cell, space.start), cells[cell]) for cell in steps[1:]]
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
