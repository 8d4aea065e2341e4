"""From settings to something ready to be measured: all that can be refused is refused here, before a rank starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice, several, whole
from ddpm_lab.config import DDPM, DEVICES, NETWORKS
from ddpm_lab.data.packed import resolve
from ddpm_lab.data.prepared import read_manifest
from ddpm_lab.files import LEDGER, PREPARED, output_folder, writing
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign, Target
from ddpm_lab.measure.code_version import CodeVersion, code_version
from ddpm_lab.measure.fleet import current
from ddpm_lab.measure.group_folder import sweep
from ddpm_lab.measure.measuring_lock import measuring
from ddpm_lab.measure.network_choice import choose_network
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument
from ddpm_lab.own_workload import check_brought, code_of_own, with_changes, with_own
from ddpm_lab.plan import Experiment, Plan
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.quality import WORKLOADS as TRAINED
from ddpm_lab.questions import PLANS, QUESTIONS, STAGES, WORKLOADS, ask
from ddpm_lab.record import LedgerError
from ddpm_lab.setting import Images, Setup, check_ranks, usual_device

MOST_SETS = 100
"""Where a resolution says how many sets are measured, and nothing else limits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a call to ``measure`` answered with: the question's run ids, their cohort, and how many sets it added.

    ``completed`` says whether the ledger now holds an answer; ``seconds_left`` is below 0 where time was overrun.
    """

    experiment: Experiment
    ledger: Path
    output_dir: Path
    cohort: tuple[str, str, str, str]
    measured_sets: int
    completed: bool
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An experiment that is checked and ready to be measured: nothing is refused any more."""

    campaign: Campaign
    output: Path
    progress: Progress

    def renewed(self, experiment: Experiment | None = None) -> Planned:
        """The same with what the ledger holds by now, or for another experiment."""
        c = self.campaign
        again = Campaign(experiment or c.experiment, c.target, c.instrument, c.ledger, c.traces, trials=c.for_trials)
        return dataclasses.replace(self, campaign=again)

    def measure(self) -> Measured:
        """Measure what the ledger lacks, once no other process measures here."""
        sweep()
        with measuring(self.progress.always) as waited:
            campaign = self.renewed().campaign if waited else self.campaign
            campaign.run(self.progress)
        count = campaign.measured_sets
        self.progress.done(f"measured {count} set{'s' * (count != 1)} now" if count else "every set is in the ledger")
        return Measured(
            experiment=campaign.experiment,
            ledger=campaign.ledger.path,
            output_dir=self.output,
            cohort=(
                campaign.machine_key,
                campaign.instrument.code.key,
                campaign.experiment.configurations[0].data_sha256,
                campaign.target.plan.key,
            ),
            measured_sets=count,
            completed=campaign.held.any,
            seconds_left=campaign.seconds_left(),
        )


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
    **settings: Any,
) -> Planned:
    """Check a question and prepare its images: nothing of it is refused any more.

    Args:
        name: a question, such as profile, multi_gpu or amp, or a stage of a search.
        preset: smoke, quick or full: how much is run.
        minutes: time budget; what does not fit becomes fewer configurations or fewer sets. None is no limit.
        sets: sets per comparison; None is the preset's number.
        resolution: measure each comparison until a relative difference of this size would be found (0.02 is 2 %), in
            at most ``sets`` sets (100 by default); None measures the planned number of sets.
        output_dir: folder that receives ``trace_output/``; None is the checkout.
        start_method: forkserver, or spawn, which costs some 5 seconds more for each group.
        quiet: show no progress.
        settings: those of ``prepare_experiment``.

    Raises:
        ConfigError: a setting cannot be run on this machine.
        DataError: there are no images where ``data`` says.
        LedgerError: the output folder cannot be written.
    """
    choice("experiment", name, (*QUESTIONS, *STAGES))
    scope = preset_called(preset)
    output, progress = output_folder(output_dir), Progress(name, quiet=quiet)
    plan = PLANS.get(name, scope.plan)
    if preset == "smoke":
        plan = dataclasses.replace(plan, turns=scope.plan.turns)
    target = _target(plan, sets, minutes, resolution, planned=scope.sets, cold_compiles=scope.cold_compiles)
    ledger = Ledger(output / LEDGER)
    workload = settings.get("workload")
    runs = WORKLOADS.get(name, (DDPM,)) if workload is None else code_of_own(name, workload)
    instrument = instrument_for(runs, output, progress, start_method)
    experiment, images = prepare_experiment(
        name, preset=preset, output=output, instrument=instrument, ledger=ledger, target=target, **settings
    )
    instrument = dataclasses.replace(instrument, data_name=images.name)
    campaign = Campaign(
        experiment, target, instrument, ledger, output / "trace_output", trials=_for_trials(instrument, experiment)
    )
    return Planned(campaign=campaign, output=output, progress=progress)


def _for_trials(instrument: Instrument, experiment: Experiment) -> Instrument | None:
    """What trials are measured with: one code for all questions, so that one run serves them all; None without any.

    Those of the user's training are measured with its own.
    """
    if not experiment.trials or experiment.trials[0].config.is_own:
        return None
    keys = {code_version(*workloads).key for workloads in ((DDPM,), *WORKLOADS.values())}
    return dataclasses.replace(instrument, code=code_version(*TRAINED), codes=tuple(sorted(keys)))


def plan_experiment(
    experiment: Experiment,
    *,
    workloads: Sequence[str],
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

    ``code`` is that version where it is known; None finds it.
    """
    target = _target(plan, sets, minutes, resolution)
    progress = Progress(experiment.name, quiet=quiet)
    instrument = dataclasses.replace(instrument_for(workloads, output, progress, code=code), data_name=data_name)
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
    if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
        raise ConfigError(f"minutes is {minutes!r}: give a number above 0, or leave it out for no limit")
    if sets is not None:
        whole("sets", sets, 1)
    to_come = None
    if resolution is not None:
        if not (isinstance(resolution, int | float) and 0 < resolution < 1):
            raise ConfigError(f"resolution is {resolution!r}: give a share such as 0.02, for 2 %")
        try:
            from ddpm_lab.explain import stats  # noqa: PLC0415 - the explaining half is not on a bare GPU node
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"resolution needs {missing.name}, which is not installed here: give the number of sets instead"
            ) from missing
        to_come = partial(stats.sets_to_come, effect=resolution)
        planned = MOST_SETS
    return Target(
        plan=plan,
        sets=sets or planned,
        cold_compiles=cold_compiles,
        seconds=None if minutes is None else minutes * 60,
        sets_to_come=to_come,
    )


def instrument_for(
    workloads: Sequence[str],
    output: Path,
    progress: Callable[[str], None],
    start_method: str = "forkserver",
    code: CodeVersion | None = None,
) -> Instrument:
    """What measuring workloads with results in ``output`` needs to know. Raises LedgerError if it is not writable."""
    _check_writable(output)
    return Instrument(
        code=code or code_version(*workloads),
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
    **grid: Any,
) -> tuple[Experiment, Images]:
    """Settle what None leaves open, prepare the images, and make the experiment's configurations.

    ``image_sizes`` makes one part of the experiment for each size. ``cache`` keeps prepared images, by default in the
    output folder. ``workload`` is a training of the user's, which brings its own data and model. ``grid`` goes to
    ``questions.ask``.
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
    parts = []
    chosen = network
    fleet = current()
    for size in image_sizes or (image_size,):
        setup = Setup(
            preset=preset,
            network=chosen or ("seed" if name == "peers" else "tiny"),  # the smallest that may be chosen
            images=Images(folder="", sha256="", name="", image_size=size),
            device=device,
            gpus=len(visible),
            usable_cores=instrument.usable_cores,
            seed=seed,
            oversubscribe=oversubscribe,
            hosts=len(fleet.hosts) if fleet else 1,
            places=fleet.node_size if fleet else 0,
        )
        ask(name, setup, **grid)  # refuses a bad size or grid before an image is decoded or anything is tried
        if workload is not None:
            setup = with_own(setup, workload, instrument)
        else:
            how = {"held_out": held_out, "skip_bad": skip_bad, "progress": instrument.progress}
            images = _images(data, cache or output / PREPARED, image_size=size, **how)
            setup = dataclasses.replace(setup, images=images)
        if chosen is None and workload is None:
            chosen = _network(name, setup, instrument, ledger, target)
            setup = dataclasses.replace(setup, network=chosen)
        parts.append(ask(name, setup, **grid))
    return with_changes(merged(parts), setup.own, ledger, instrument.code.key), setup.images


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
