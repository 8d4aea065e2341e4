"""From settings to something ready to be measured: all that can be refused is refused here, before a rank starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice, number, several, whole
from ddpm_lab.chosen_once import compiled_in, cores_of
from ddpm_lab.config import DEVICES, NETWORKS
from ddpm_lab.data.packed import resolve
from ddpm_lab.data.prepared import read_manifest
from ddpm_lab.files import LEDGER, PREPARED, output_folder, writing
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.cluster import current
from ddpm_lab.measure.code_version import CodeVersion, code_version
from ddpm_lab.measure.network_choice import choose_network
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument
from ddpm_lab.measure.shortfall import LEAST_SETS, RESOLUTION, Target
from ddpm_lab.own_workload import check_brought, check_name, code_of, look_at, with_changes, with_own
from ddpm_lab.plan import Experiment, Plan
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.planned import Planned
from ddpm_lab.questions import PLANS, QUESTIONS, STAGES, ask
from ddpm_lab.record import LedgerError
from ddpm_lab.setting import Images, Setup, check_ranks, usual_device

LEAST_PLACE_SECONDS = 1.0
"""What one configuration in one set takes at least, where nothing is known of it."""
MOST_SETS = 100
"""Where a resolution says how many sets are measured, and nothing else limits them."""


def plan_question(
    name: str,
    *,
    preset: str = "quick",
    minutes: float | None = None,
    sets: int | None = None,
    resolution: float | None = None,
    output_dir: str | Path | None = None,
    start_method: str = "forkserver",
    quiet: bool = False,
    say: Callable[[str], None] | None = None,
    further: bool = True,
    decided: Collection[tuple[str, str]] = (),
    **settings: Any,
) -> Planned:
    """Check a question and prepare its images: nothing of it is refused any more.

    Args:
        name: a question, such as profile, multi_gpu or amp, or a stage of a search.
        preset: smoke, quick or full: how much is run.
        minutes: time budget, which says how many sets there are; what does not fit becomes fewer configurations. None
            is no limit, 0 measures nothing.
        sets: sets per comparison, just so many; None is what the time gives, or the preset's number.
        resolution: measure each comparison until a relative difference of this size would be found (0.02 is 2 %), in
            at most ``sets`` sets (100 by default); None measures the planned number of sets.
        output_dir: folder that receives ``trace_output/``; None is the checkout.
        start_method: forkserver, or spawn, which costs some 5 seconds more for each group.
        quiet: show no progress.
        say: gets the lines of progress instead of the terminal.
        further: whether comparisons whose answer was shown get more sets; none of ``decided``, each the run ids
            of baseline and configuration.
        settings: those of ``prepare_experiment``.

    Raises:
        ConfigError: a setting cannot be run on this machine.
        DataError: there are no images where ``data`` says.
        LedgerError: the output folder cannot be written.
    """
    choice("experiment", name, (*QUESTIONS, *STAGES))
    scope = preset_called(preset)
    output, progress = output_folder(output_dir), Progress(name, quiet=quiet, say=say)
    plan = PLANS.get(name, scope.plan)
    if preset == "smoke":
        plan = dataclasses.replace(plan, turns=scope.plan.turns)
    target = _target(plan, sets, minutes, resolution, planned=scope.sets, cold_compiles=scope.cold_compiles)
    exact = target.exact or preset == "smoke"
    target = dataclasses.replace(target, exact=exact, further=further, decided=frozenset(decided))
    ledger = Ledger(output / LEDGER)
    instrument = instrument_for(output, progress, start_method)
    experiment, instrument = prepare_experiment(
        name, preset=preset, output=output, instrument=instrument, ledger=ledger, target=target, **settings
    )
    campaign = Campaign(experiment, target, instrument, ledger, output / "trace_output")
    if name not in STAGES:  # these get the time that a search leaves
        _check_time(campaign)
    limits = {"preset": preset, "minutes": minutes, "sets": sets, "resolution": resolution, "output_dir": output_dir}
    same: dict[str, Any] = {**limits, "start_method": start_method, "quiet": quiet, **settings}
    on_cores = (
        None
        if settings.get("cores") or preset == "smoke" or name in STAGES
        else lambda free: plan_question(name, **{**same, "cores": free, "say": say, "further": further})
    )
    return Planned(campaign=campaign, output=output, progress=progress, on_cores=on_cores)


def _check_time(campaign: Campaign) -> None:
    """Refuse a budget in which not even the primary comparison can get its least sets. Raises ConfigError."""
    target, family = campaign.target, next(iter(campaign.experiment.families), None)
    if not target.seconds or target.exact or family is None or not family.candidates:
        return
    base, candidates = family.baseline.run_id, dict(family.candidates)
    place = campaign.held.place_seconds(base) or LEAST_PLACE_SECONDS
    have = campaign.held.sets(base, candidates.get(family.primary, family.candidates[0][1]).run_id)
    needed = max(0, LEAST_SETS - have) * 3 * place
    if needed > target.seconds:
        raise ConfigError(
            f"minutes is {target.seconds / 60:.2g}: {LEAST_SETS} sets of the primary comparison take about "
            f"{math.ceil(needed / 0.6) / 100:g} minutes here; give at least that"
        )


def plan_experiment(
    experiment: Experiment,
    *,
    data_name: str,
    plan: Plan,
    sets: int,
    resolution: float | None,
    minutes: float | None,
    output: Path,
    quiet: bool = False,
    code: CodeVersion | None = None,
) -> Planned:
    """Make an experiment of any workloads ready; one code version covers the sources of all of them.

    ``code`` is that version where it is known; None looks at each workload that is not of the lab.
    """
    target = _target(plan, sets, minutes, resolution)
    progress = Progress(experiment.name, quiet=quiet)
    instrument = instrument_for(output, progress)
    code = code or code_of(experiment.configurations, instrument)
    instrument = dataclasses.replace(instrument, code=code, data_name=data_name)
    campaign = Campaign(experiment, target, instrument, Ledger(output / LEDGER), output / "trace_output")
    return Planned(campaign=campaign, output=output, progress=progress)


def _target(
    plan: Plan,
    sets: int | None,
    minutes: float | None,
    resolution: float | None,
    *,
    planned: int = MOST_SETS,
    cold_compiles: int = 0,
) -> Target:
    """How much is measured. Without scipy nothing can say what an interval resolves: then the sets are planned."""
    if minutes is not None and not (number(minutes) and minutes >= 0):
        raise ConfigError(f"minutes is {minutes!r}: give a number from 0, or leave it out for no limit")
    if sets is not None:
        whole("sets", sets, 1)
    to_come = None
    if resolution is not None:
        if not (isinstance(resolution, int | float) and 0 < resolution < 1):
            raise ConfigError(f"resolution is {resolution!r}: give a share such as 0.02, for 2 %")
        try:
            from ddpm_lab.explain import decisions  # noqa: PLC0415 - the explaining half is not on a bare GPU node
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"resolution needs {missing.name}, which is not installed here: give the number of sets instead"
            ) from missing
        to_come = partial(decisions.sets_to_come, effect=resolution)
        planned = MOST_SETS
    return Target(
        plan=plan,
        sets=sets or planned,
        cold_compiles=cold_compiles,
        exact=sets is not None,
        seconds=None if minutes is None else minutes * 60,
        resolution=RESOLUTION if resolution is None else resolution,
        sets_to_come=to_come,
    )


def instrument_for(output: Path, progress: Callable[[str], None], start_method: str = "forkserver") -> Instrument:
    """What measuring the lab's own workloads with results in ``output`` needs to know.

    Raises LedgerError if that is not writable.
    """
    _check_writable(output)
    return Instrument(
        code=code_version(),
        cache=output / "trace_output" / "cache",
        usable_cores=hardware.usable_cores(),
        data_name="",
        start_method=start_method,
        progress=progress,
    )


def prepare_experiment(
    name: str,
    *,
    preset: str,
    output: Path,
    instrument: Instrument,
    ledger: Ledger,
    target: Target,
    data: str = "synthetic",
    held_out: str | None = None,
    skip_bad: bool = False,
    network: str | None = None,
    device: str | None = None,
    image_size: int = 32,
    image_sizes: Sequence[int] | None = None,
    seed: int = 0,
    oversubscribe: bool = False,
    cache: Path | None = None,
    workload: str | None = None,
    cores: int | None = None,
    **grid: Any,
) -> tuple[Experiment, Instrument]:
    """Settle what None leaves open, prepare the images, and make the experiment's configurations.

    Returns them with the instrument, which then knows images and code. ``cores`` are those to measure with on a CPU;
    None is as many as earlier sets of this question had, or as are free. ``image_sizes`` makes one part of the
    experiment for each size. ``cache`` keeps prepared images, by default in the output folder. ``workload`` is a
    training of the user's, which brings its own data and model. ``grid`` goes to ``questions.ask``.
    """
    visible = hardware.gpus()
    device = usual_device(device)
    choice("device", device, DEVICES)
    check_ranks(device, 1, len(visible), 1)
    if network is not None:
        choice("network", network, NETWORKS)
    if image_sizes is not None:
        several("image_sizes", image_sizes)
    whole("seed", seed, 0)
    if workload is not None:
        brought = {"data": data, "held_out": held_out, "skip_bad": skip_bad, "network": network}
        check_brought(workload, {**brought, "image_size": image_size, "image_sizes": image_sizes})
        check_name(name, workload)
    parts = []
    chosen = network
    if preset == "smoke":  # which calls nothing
        cores = cores or instrument.usable_cores
    cores = cores_of(name, cores, device, instrument, ledger, target=target, own=workload is not None)
    if name == "torch_compile" and grid.get("precision") is None and device == "cpu" and workload is None:
        grid = {**grid, "precision": compiled_in(instrument, ledger)}
    cluster = current()
    for size in image_sizes or (image_size,):
        setup = Setup(
            preset=preset,
            network=chosen or ("seed" if name == "peers" else "tiny"),  # the smallest that may be chosen
            images=Images(folder="", sha256="", name="", image_size=size),
            device=device,
            gpus=len(visible),
            usable_cores=cores,
            limited=cores < instrument.usable_cores,
            seed=seed,
            oversubscribe=oversubscribe,
            hosts=len(cluster.hosts) if cluster else 1,
            places=cluster.node_size if cluster else 0,
        )
        ask(name, setup, **grid)  # refuses a bad size or grid before an image is decoded or anything is tried
        if workload is not None:
            own, code = look_at(workload, instrument, device=device, seed=seed)
            setup, instrument = with_own(setup, own), dataclasses.replace(instrument, code=code)
        else:
            how = {"held_out": held_out, "skip_bad": skip_bad, "progress": instrument.progress}
            images = _images(data, cache or output / PREPARED, image_size=size, **how)
            setup = dataclasses.replace(setup, images=images)
        if chosen is None and workload is None:
            chosen = _network(name, setup, instrument, ledger, target)
            setup = dataclasses.replace(setup, network=chosen)
        parts.append(ask(name, setup, **grid))
    instrument = dataclasses.replace(instrument, data_name=setup.images.name)
    return with_changes(merged(parts), setup.own, ledger, instrument.code.key), instrument


def merged(parts: Sequence[Experiment]) -> Experiment:
    """Parts of one question as one experiment; what a question has only one of is the first part's."""
    rows = ("families", "left_out", "profiles", "trials", "checks")
    every: dict[str, Any] = {name: tuple(row for part in parts for row in getattr(part, name)) for name in rows}
    return dataclasses.replace(parts[0], **every)


def _network(name: str, setup: Setup, instrument: Instrument, ledger: Ledger, target: Target) -> str:
    """``tiny`` on a CPU; on a GPU the published network in ``full``, else the largest that fits the budget.

    Beside other trainers it is ``seed``, which they train too.
    """
    if name == "peers":
        return "seed"
    if setup.device == "cpu":
        return "tiny"
    if setup.preset == "full":
        return "seed"
    budget = preset_called(setup.preset).minutes
    assert budget is not None
    instrument = dataclasses.replace(instrument, data_name=setup.images.name)
    candidates = [
        (name, dataclasses.replace(setup, network=name).config(global_batch_size=setup.batch_size(None)))
        for name in ("tiny", "seed", "ddpm")
        if setup.images.image_size % NETWORKS[name] == 0
    ]
    return choose_network(candidates, instrument, ledger, target, budget_seconds=budget * 60)


def _images(data: str, cache: Path, *, image_size: int, **how: Any) -> Images:
    folder = resolve(data, cache, image_size=image_size, **how)
    manifest = read_manifest(folder)
    source = f"images from {'/'.join(Path(manifest.source).parts[-2:])}"
    kind = "synthetic images" if manifest.kind == "synthetic" else source
    return Images(
        folder=str(folder), sha256=manifest.content_hash, name=f"{manifest.train_count:,} {kind}", image_size=image_size
    )


def _check_writable(output: Path) -> None:
    """Refuse an output folder before anything is measured for it."""
    folder = output / LEDGER.parent
    with writing(folder, LedgerError):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
