"""The questions: one function for each experiment, from settings to the configurations that answer it.

Each takes a ``Setup`` (what is trained, on what, how much) and a grid, of which None means the preset's choice for this
machine. What the machine cannot run is left out and named, or refused if it was asked for by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from ddpm_lab import collectives
from ddpm_lab.bottleneck import bottleneck
from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.claims import claims
from ddpm_lab.collectives import all_reduce
from ddpm_lab.config import DDPM, LOADER_ALONE
from ddpm_lab.declared import Opt, arguments
from ddpm_lab.exchange import exchange
from ddpm_lab.lost_scaling import lost_scaling as lost_scaling_of
from ddpm_lab.own_workload import nothing_asked
from ddpm_lab.plan import RECOMMENDATION, SCALINGS, SEARCH, WEAK, WITH_TRIALS, Experiment, Family
from ddpm_lab.quality import identity_trials, quality, with_trials
from ddpm_lab.search_space import SEARCH_PLAN, recommendation, search
from ddpm_lab.setting import Batch, Batches, Precision, Precisions, Setup, Workers, WorldSize, WorldSizes
from ddpm_lab.trainers import PLAN, peers

CUDA_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
CPU_PRECISIONS = ("fp32", "bf16")
FULL_BATCH_SIZES = (32, 64, 128, 256, 512)
MOST_CPU, MOST_CUDA = 1024, 65_536
"""Where a search for the largest batch ends if nothing else ends it."""
PRIMARY_WORKERS = 2
"""Whose comparison with none is the primary one."""
FULL_WORKERS = (0, 1, 2, 4, 8, 12, 16, 20)


def profile(
    setup: Setup, *, global_batch_size: Batch = None, precision: Precision = "fp32", world_size: WorldSize = 1
) -> Experiment:
    """Where does the time of a training step go? One profiled run, which supplies no speed."""
    setup.check_ranks(world_size)
    config = setup.config(
        purpose="profile",
        global_batch_size=setup.batch_size(global_batch_size, world_size),
        precision=precision,
        world_size=world_size,
    )
    label = f"{setup.precision_name(precision)}, {setup.ranks_label(world_size)}"
    family = setup.family_name(config.global_batch_size, world_size)
    return Experiment(name="profile", families=(), profiles=((family, label, config),))


def multi_gpu(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    global_batch_sizes: Batches = None,
    precision: Precision = "fp32",
    scaling: Annotated[str | None, Opt("which scaling (default: both; smoke: strong)", choices=SCALINGS)] = None,
    lost_scaling: Annotated[bool | None, Opt("where the rest of the ideal speed-up went")] = None,
    loader_workers: Workers = None,
    alone: Annotated[bool, Opt("the most ranks without one rank beside them")] = False,
) -> Experiment:
    """Do more ranks or GPUs train faster? Strong scaling: the ranks share the batch. Weak: each rank brings its own.

    Weak scaling takes ``global_batch_sizes`` as those of one rank: n ranks take n times as many images. ``scaling``
    None is both; in ``smoke`` strong alone, in ``quick`` weak of the first batch size, last, if there is time.
    ``lost_scaling`` measures where the rest of the ideal went, for the most ranks that have a device each and can share
    a batch, the smallest one; None does so in ``full``. ``loader_workers`` decode files while they are needed; None
    packs the images beforehand. ``alone`` measures the most ranks without one rank beside them, and so no ratio.
    """
    full = setup.preset == "full"
    usual = [*setup.doubled_ranks, setup.most_ranks] if full or setup.device == "cuda" else [1, 2]
    ranks = [n for n in setup.world_sizes(world_sizes, sorted(set(usual))) if n > 1]
    small = (128, 512) if setup.device == "cuda" else (16, 32)
    batches = global_batch_sizes or (FULL_BATCH_SIZES if full else small if setup.preset == "quick" else small[:1])
    families, left_out, profiles = [], [], []
    settings = {"precision": precision, **({} if loader_workers is None else setup.files(loader_workers))}
    for batch in batches:
        if scaling != "weak":
            uneven = [n for n in ranks if batch % n]
            if uneven and world_sizes is not None:
                raise ConfigError(f"a global batch of {batch} cannot be shared by {uneven[0]} ranks: give a multiple")
            family = _scaled(setup, batch, [n for n in ranks if n not in uneven], settings)
            families += [family] if family.candidates or not uneven else []  # one rank alone compares with nothing
            images = f"{batch} image{'s' * (batch != 1)} cannot be shared by"
            left_out += [(family.name, setup.ranks_label(n), f"{images} {setup.ranks_label(n)}") for n in uneven]
    weak = batches if full or scaling else batches[:1] if setup.preset == "quick" else ()
    if scaling == "weak" or (ranks and scaling != "strong"):
        families += [_scaled(setup, b, ranks, settings, weak=True) for b in weak]
    if not families:
        raise ConfigError(f"{left_out[0][2]}, so nothing can be compared: give a batch size that they can share")
    if alone:
        families = [_alone(family) for family in families]
    if not ranks and world_sizes is None:
        left_out += [(f.name, setup.ranks_label(2), setup.why_alone) for f in families]
        if setup.device == "cuda" and setup.usable_cores >= 2 and setup.places != 1 and not setup.own:
            families.append(_mechanism(setup, precision))
    # Ranks that share a core show no speed, and so no loss: they are split only where nothing else was asked for.
    shared = [(n <= setup.most_ranks, n, -batch) for n in ranks for batch in batches if batch % n == 0]
    if setup.splits_scaling(lost_scaling) and shared:
        _, most, negative = max(shared)
        lost = lost_scaling_of(
            setup.config(global_batch_size=-negative, **settings),
            setup.config(global_batch_size=-negative, world_size=most, **settings),
            name=setup.family_name(-negative, most),
            ranks_label=setup.ranks_label(most),
            usable_cores=setup.usable_cores,
        )
        families.append(lost)
        label, config = lost.candidates[0]
        profiles.append((lost.name, label, dataclasses.replace(config, purpose="profile")))
    elif lost_scaling and ranks:
        sizes = ", ".join(map(str, batches))
        raise ConfigError(
            f"lost_scaling: {setup.ranks_label(ranks[0])} cannot share a batch of {sizes}: give a multiple"
        )
    elif lost_scaling and world_sizes is not None:
        raise ConfigError("lost_scaling is what several ranks lose, and one rank alone was asked for: give world_sizes")
    return Experiment(name="multi_gpu", families=tuple(families), left_out=tuple(left_out), profiles=tuple(profiles))


def _alone(family: Family) -> Family:
    """The most ranks of a family as its only configuration."""
    if not family.candidates:
        return family
    label, most = family.candidates[-1]
    return dataclasses.replace(family, baseline=most, baseline_label=label, candidates=())


def _scaled(setup: Setup, batch: int, ranks: Sequence[int], settings: dict[str, Any], *, weak: bool = False) -> Family:
    """Strong: the same global batch on each number of ranks. Weak: the same batch on each rank, over equal images."""
    many = [(n, setup.config(global_batch_size=n * batch if weak else batch, world_size=n, **settings)) for n in ranks]
    return Family(
        name=f"{setup.family_name(batch, per_rank=True)}{WEAK}" if weak else setup.family_name(batch),
        baseline_label=setup.ranks_label(1),
        baseline=setup.config(global_batch_size=batch, **settings),
        candidates=tuple((setup.ranks_label(n), config) for n, config in many),
        primary=setup.ranks_label(ranks[-1]) if ranks and not weak else "",
    )


def _mechanism(setup: Setup, precision: str) -> Family:
    """Two gloo ranks on the CPU of a machine with one GPU: they show that several ranks work, nothing about speed."""
    cpu = dataclasses.replace(setup, device="cpu", network="tiny")
    one = cpu.config(global_batch_size=16, precision=precision if precision in CPU_PRECISIONS else "fp32")
    return Family(
        name=f"{cpu.family_name(16)}, CPU ranks",
        baseline_label="1 rank",
        baseline=one,
        candidates=(("2 ranks", dataclasses.replace(one, world_size=2)),),
        mechanism=True,
    )


def amp(
    setup: Setup,
    *,
    precisions: Precisions = None,
    world_sizes: WorldSizes = None,
    global_batch_size: Batch = None,
) -> Experiment:
    """Does mixed precision speed up training? fp32 against each narrower format, for each number of ranks."""
    able = CUDA_PRECISIONS if setup.device == "cuda" else CPU_PRECISIONS
    wanted = [p for p in (precisions or CUDA_PRECISIONS) if p != "fp32"]
    usual = sorted({1, setup.most_ranks}) if setup.preset == "full" else [1]
    families, left_out = [], []
    for ranks in setup.world_sizes(world_sizes, usual):
        batch = setup.batch_size(global_batch_size, ranks)
        name = setup.family_name(batch, ranks)
        families.append(
            Family(
                name=name,
                baseline_label="fp32",
                baseline=setup.config(global_batch_size=batch, world_size=ranks),
                candidates=tuple(
                    (p, setup.config(global_batch_size=batch, world_size=ranks, precision=p))
                    for p in sorted(wanted, key=("bf16", "fp16", "tf32").index)
                    if p in able
                ),
                primary="bf16",
            )
        )
        left_out += [(name, p, "needs a CUDA device") for p in wanted if p not in able]
    return Experiment(name="amp", families=tuple(families), left_out=tuple(left_out))


def workers(
    setup: Setup,
    *,
    worker_counts: Annotated[Sequence[int] | None, Opt("numbers of workers", least=0)] = None,
    precisions: Precisions = None,
    global_batch_size: Batch = None,
) -> Experiment:
    """How many loader workers are worth having? Each file decoded when needed; training, and the loader alone."""
    usual = {"smoke": (0, 1), "quick": (0, 1, 2), "full": FULL_WORKERS}[setup.preset]
    able = CUDA_PRECISIONS if setup.device == "cuda" else CPU_PRECISIONS
    for p in precisions or ():
        choice("precisions", p, able)
    asked = tuple(dict.fromkeys(worker_counts or usual))
    formats = tuple(dict.fromkeys(precisions or ("fp32", setup.usual_precision if setup.preset == "full" else "fp32")))
    batch = setup.batch_size(global_batch_size)
    first, *others = sorted(n for n in asked if n <= setup.usable_cores) or [0]
    others = others[-1:] + others[:-1]  # the most workers are the most telling
    families, left_out = [], []
    kinds: list[tuple[str, dict[str, Any]]] = [
        (f"training, {setup.family_name(batch)}, {setup.precision_name(p)}", {"precision": p}) for p in formats
    ]
    if setup.preset != "quick":  # it would take the time that the other questions need for a verdict
        kinds.append((f"loader alone, {setup.loader_name(batch)}", {"workload": LOADER_ALONE}))
    for name, settings in kinds:
        base = setup.config(global_batch_size=batch, loader="files", loader_workers=first, **settings)
        families.append(
            Family(
                name=name,
                baseline_label=_workers_label(first),
                baseline=base,
                candidates=tuple((_workers_label(n), dataclasses.replace(base, loader_workers=n)) for n in others),
                primary=_workers_label(PRIMARY_WORKERS if PRIMARY_WORKERS in others else max(asked)),
            )
        )
        left_out += [
            (name, _workers_label(n), f"more than the {setup.cores_name}") for n in asked if n > setup.usable_cores
        ]
    # What a loader changes is nothing: shown in seconds, and to the last bit. A user's dataset may draw in its workers.
    trials = tuple(t for f in families if f.baseline.workload == DDPM for t in identity_trials(f))
    return Experiment(name="workers", families=tuple(families), left_out=tuple(left_out), trials=trials)


def _workers_label(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def torch_compile(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    precision: Precision | None = None,
    global_batch_size: Batch = None,
    loader_workers: Workers = None,
) -> Experiment:
    """Is torch.compile worth its compile time? Eager against compiled, in bf16 autocast unless said otherwise.

    In ``full`` block by block too, which compiles less and leaves what lies between the blocks eager.
    """
    precision = precision or setup.usual_precision
    count = loader_workers
    if count is None:
        count = min(4, setup.usable_cores) if setup.preset == "full" else 0
    loader = setup.files(count) if count else {"loader": "packed"}
    usual = sorted({1, setup.most_ranks}) if setup.preset == "full" else [1]
    families = []
    for ranks in setup.world_sizes(world_sizes, usual):
        batch = setup.batch_size(global_batch_size, ranks)
        eager = setup.config(global_batch_size=batch, world_size=ranks, precision=precision, **loader)
        families.append(
            Family(
                name=f"{setup.family_name(batch, ranks)}, {setup.precision_name(precision)}",
                baseline_label="eager",
                baseline=eager,
                candidates=tuple(
                    (label, dataclasses.replace(eager, compile=how))
                    for label, how in (("compiled", "whole"), ("compiled block by block", "regional"))
                    if how == "whole" or (setup.preset == "full" and not setup.own)
                ),
                primary="compiled",
            )
        )
    return Experiment(name="torch_compile", families=tuple(families))


def batch_size(
    setup: Setup,
    *,
    global_batch_sizes: Batches = None,
    precision: Precision = "fp32",
    world_size: WorldSize = 1,
) -> Experiment:
    """How large a batch fits, and does a larger one train faster? The smallest size against its multiples."""
    cuda = setup.device == "cuda"
    setup.check_ranks(world_size)
    first = 32 if setup.preset == "full" else setup.batch_size(None)
    count = {"smoke": 2, "quick": 5, "full": 8 if cuda else 5}[setup.preset]
    usual = [-(-first * 2**i // world_size) * world_size for i in range(count)]
    smallest, *larger = sorted(set(global_batch_sizes or usual))
    most = 2 * max(usual) if setup.preset == "smoke" else MOST_CUDA if cuda else MOST_CPU
    base = setup.config(global_batch_size=smallest, precision=precision, world_size=world_size)
    family = Family(
        name=f"{setup.family_name(None, world_size)}, {setup.precision_name(precision)}",
        baseline=base,
        baseline_label=f"batch {smallest}",
        candidates=tuple((f"batch {n}", dataclasses.replace(base, global_batch_size=n)) for n in larger),
        search_up_to=max(most, smallest, *larger),
        primary=f"batch {larger[min(1, len(larger) - 1)]}" if larger else "",
    )
    return Experiment(name="batch_size", families=(family,))


PLANS = {"peers": PLAN, "all_reduce": collectives.PLAN, SEARCH: SEARCH_PLAN}
"""How a set is measured where it is not as the preset says."""
LONG = ("peers", "quality", "claims")
"""Questions that take too long to be measured beside the others: notebooks do so in the preset ``full`` only."""
QUESTIONS: dict[str, Callable[..., Experiment]] = {
    f.__name__: f
    for f in (
        *(profile, multi_gpu, amp, workers, torch_compile, batch_size, exchange, all_reduce, peers, quality),
        *(bottleneck, claims),
    )
}

STAGES: dict[str, Callable[..., Experiment]] = {f.__name__: f for f in (search, recommendation)}
"""What ``recommend`` measures in the course of its answer; nobody asks for one alone."""


def ask(name: str, setup: Setup, *, seeds: int | None = None, images: int | None = None, **grid: Any) -> Experiment:
    """The experiment that answers a question; ``seeds`` and ``images`` are those of the runs that are for quality."""
    grid = arguments({**QUESTIONS, **STAGES}[name], grid, name)
    experiment = _ask(name, setup, seeds=seeds, images=images, **grid)
    # A question has one primary comparison: that of its first family.
    others = tuple(dataclasses.replace(f, primary="") for f in experiment.families[1:])
    return dataclasses.replace(experiment, families=experiment.families[:1] + others)


def _ask(name: str, setup: Setup, *, seeds: int | None, images: int | None, **grid: Any) -> Experiment:
    if setup.own and setup.own.lacks(name):
        return nothing_asked(name, setup)
    trained = {option: value for option, value in (("seeds", seeds), ("images", images)) if value is not None}
    if name in (*WITH_TRIALS, RECOMMENDATION):
        return with_trials({**QUESTIONS, **STAGES}[name](setup, **grid), setup, seeds=seeds, images=images)
    if name == SEARCH:
        return search(setup, **grid)
    for option, value in trained.items():
        if name != "quality":
            able = ", ".join((*WITH_TRIALS, "quality"))
            raise ConfigError(f"{option} is {value!r}, and {name} trains no runs for quality: only {able} do")
    return QUESTIONS[name](setup, **grid, **arguments(QUESTIONS[name], trained, name))
