"""From settings to a question ready to be measured: all that can be refused is refused here, before a rank starts."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice, missing_to_explain, number, several, whole
from ddpm_lab.config import NETWORKS, RunConfig
from ddpm_lab.data.packed import read_manifest, resolve
from ddpm_lab.explain import stats
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import LOOK, study
from ddpm_lab.files import LEDGER, PREPARED, check_room, output_folder
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign, OnCores
from ddpm_lab.measure.cluster import current
from ddpm_lab.measure.code_version import CodeVersion, code_version
from ddpm_lab.measure.group import Limits
from ddpm_lab.measure.others import free_cores, measuring
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.output import Progress
from ddpm_lab.plan import LEAST_SETS, OURS, RECOMMENDATION, SEARCH, TUNED, Experiment, Family, Plan, usual_network
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.questions import probe
from ddpm_lab.questions.ask import STAGES, ask, every_question, questions
from ddpm_lab.questions.peers import PUBLISHED
from ddpm_lab.questions.recommendation import all_cores_first
from ddpm_lab.questions.search import SEARCH_PLAN
from ddpm_lab.record import TWIN, RunRecord, crowded
from ddpm_lab.training import setting
from ddpm_lab.training.setting import OWN_DATA, Images, Setup, code_of, usual_device

MOST_SETS = 100  # where a resolution says how many sets are measured, and nothing else limits them
LEAST_RESOLUTION = 0.001
"""The smallest difference that MOST_SETS sets detect on the quietest machines, whose sets scatter by 0.25 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a question.

    Args:
        preset: smoke, quick or full: how much is run.
        minutes: time budget, which determines the number of sets; if it is too short, configurations are dropped.
            Default: no limit. 0 measures nothing.
        sets: exact number of sets per comparison. Default: what fits into the time, or the preset's number.
        resolution: measure each comparison precisely enough to detect this relative difference (0.02 for 2 %), in at
            most ``sets`` sets (100 by default). Default: the planned number of sets.
        output_dir: folder for ``trace_output/``. Default: the checkout.
        quiet: do not show progress. ``say`` receives its lines instead of the terminal.
        further: whether comparisons whose answer was shown get more sets.
        data, held_out, skip_bad: the images; prepared ones are kept in ``cache``, by default in the output folder.
        network: Default: ``tiny`` on a CPU; on a GPU, and in comparisons with other trainers, the published ``seed``.
        device: Default: the GPU if there is one.
        image_size: ``image_sizes`` instead makes one part of the experiment for each size.
        oversubscribe: allow more ranks than devices.
        workload: the user's own training, with its own data and model.
        cores: CPU cores to use. Default: as in earlier sets of this question, or all free ones.
        grid: settings specific to the question; see ``questions``.
    """

    preset: str = "quick"
    minutes: float | None = None
    sets: int | None = None
    resolution: float | None = None
    output_dir: str | Path | None = None
    quiet: bool = False
    say: Callable[[str], None] | None = None
    further: bool = True
    data: str = "synthetic"
    held_out: str | None = None
    skip_bad: bool = False
    cache: Path | None = None
    network: str | None = None
    device: str | None = None
    image_size: int = 32
    image_sizes: Sequence[int] | None = None
    seed: int = 0
    oversubscribe: bool = False
    workload: str | None = None
    cores: int | None = None
    grid: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **settings: Any) -> "Settings":
        """Settings by name; names that are not known here are the question's own."""
        mine = {f.name for f in dataclasses.fields(cls)} & settings.keys()
        grid = {name: value for name, value in settings.items() if name not in mine}
        return cls(**{name: settings[name] for name in mine}, grid=grid)

    def check(self, question: str) -> None:
        """Raise ConfigError for what cannot be meant or run; what the question itself takes it checks."""
        choice("experiment", question, (*questions(), *STAGES))
        device = usual_device(self.device)
        setting.check_ranks(device, 1, len(hardware.gpus()), 1)
        if self.network is not None:
            choice("network", self.network, NETWORKS)
        if self.image_sizes is not None:
            several("image_sizes", self.image_sizes)
        whole("seed", self.seed, 0)
        choice("oversubscribe", self.oversubscribe, (True, False))
        if self.workload is not None:
            names = ("data", "held_out", "skip_bad", "network", "image_size", "image_sizes")
            setting.check_brought(self.workload, {name: getattr(self, name) for name in names})
            setting.check_name(question, self.workload)


def plan_question(name: str, **settings: Any) -> Campaign:
    """Check a question, or a stage of a search, and prepare its images: nothing of it is refused any more.

    ``settings`` are those of ``Settings``, and of the question itself. Raises ConfigError for what cannot be run on
    this machine, DataError where there are no images.
    """
    asked = Settings.of(**settings)
    asked.check(name)
    scope, smoke = preset_called(asked.preset), asked.preset == "smoke"
    output, progress = output_folder(asked.output_dir), Progress(name, quiet=asked.quiet, say=asked.say)
    plan = (SEARCH_PLAN if name == SEARCH else every_question()[name].about.plan) or scope.plan
    # Short windows too, by which its sets are told from those of an answer.
    plan = replace(plan, turns=scope.plan.turns, window_seconds=scope.plan.window_seconds) if smoke else plan
    target = _target(plan, asked.minutes, asked.sets, asked.resolution, planned=scope.sets)
    target = replace(target, exact=target.exact or smoke, further=asked.further, cold_compiles=scope.cold_compiles)
    own = target.seconds if asked.workload else math.inf
    instrument, ledger = instrument_for(output, progress, own), Ledger(output / LEDGER)
    experiment, instrument = _experiment(name, asked, instrument, ledger, target)
    # A stage of a search gets the time that the search leaves, and its cores.
    again = None if asked.cores or smoke or name in STAGES else lambda n: plan_question(name, **settings | {"cores": n})
    return Campaign(experiment, target, instrument, output, again)


def _target(
    plan: Plan, minutes: float | None, sets: int | None, resolution: float | None, *, planned: int = MOST_SETS
) -> Target:
    """How much is measured. Without scipy nothing can say what an interval resolves: then the sets are planned."""
    seconds = seconds_of(minutes)
    if sets is not None:
        whole("sets", sets, 1)
    if resolution is None:
        return Target(plan=plan, sets=sets or planned, exact=sets is not None, seconds=seconds)
    if not (number(resolution) and LEAST_RESOLUTION <= resolution < 1):
        least = f"{LEAST_RESOLUTION} (0.1 %), which {MOST_SETS} sets resolve on a quiet machine"
        raise ConfigError(f"resolution is {resolution!r}: give a share below 1, such as 0.02, and at least {least}")
    if missing := missing_to_explain():
        raise ConfigError(f"resolution needs {missing}, which is not installed here: give the number of sets")
    to_come = partial(stats.sets_to_come, effect=resolution)
    return Target(plan=plan, sets=sets or MOST_SETS, seconds=seconds, resolution=resolution, sets_to_come=to_come)


def seconds_of(minutes: object) -> float:
    """A time budget in seconds, infinite without one. Raises ConfigError for what is none."""
    if minutes is None:
        return math.inf
    if not number(minutes) or minutes < 0:
        raise ConfigError(f"minutes is {minutes!r}: give a number from 0, or leave it out for no limit")
    return 60 * minutes


def instrument_for(output: Path, progress: Progress, seconds: float = math.inf) -> Instrument:
    """Return an instrument with the lab's own code version; ``seconds`` limits how long the user's code may be silent.

    Raises ConfigError if ``output`` is not writable.
    """
    check_room(output / LEDGER.parent, output / "image_output", ledger=output / LEDGER)
    code, cache, cores = code_version(), output / "trace_output" / "cache", hardware.usable_cores()
    limits = Limits.of_own(seconds)
    return Instrument(code=code, cache=cache, usable_cores=cores, data_name="", limits=limits, progress=progress)


def _experiment(
    name: str, asked: Settings, instrument: Instrument, ledger: Ledger, target: Target
) -> tuple[Experiment, Instrument]:
    """The experiment with its images prepared, and the instrument, which then knows images and code."""
    device, grid, fleet = usual_device(asked.device), dict(asked.grid), current()
    network = asked.network or usual_network(device, name)
    work = asked.workload or network
    cores = _cores_of(name, asked, instrument, ledger, target=target, device=device, work=work)
    compiles = name == "torch_compile" and grid.get("precision") is None and device == "cpu"
    setup = Setup(
        preset=asked.preset,
        network=network,
        images=Images(folder="", sha256="", name=""),
        device=device,
        gpus=len(hardware.gpus()),
        usable_cores=cores,
        limited=cores < instrument.usable_cores,
        seed=asked.seed,
        oversubscribe=asked.oversubscribe,
        hosts=len(fleet.hosts) if fleet else 1,
        places=fleet.node_size if fleet else 0,
    )
    if name == "bottleneck":  # of a step as the trainer makes it here, where nothing else is said
        usual = setting.usual_settings(device)
        if grid.get("compile", "off") != "off" or not grid.get("channels_last", True):
            usual.pop("kernels")  # fused kernels work eagerly and in channels-last alone
        grid = usual | grid
    parts = []
    for size in asked.image_sizes or (asked.image_size,):
        setup = replace(setup, images=Images(folder="", sha256="", name="", image_size=size))
        ask(name, setup, **grid)  # refuses a wrong size or grid before an image is decoded or a rank is started
        if asked.workload is not None:
            judged = bool(grid.get("seeds"))
            found, code = setting.look_at(asked.workload, instrument, device=device, seed=asked.seed, judged=judged)
            setup, instrument = setting.with_own(setup, found), replace(instrument, code=code)
        else:
            setup = replace(setup, images=_images(asked, size, instrument.progress))
            if name == "peers" and device == "cpu":
                probing = asked.preset != "smoke" and target.seconds != 0
                how = {"output": output_folder(asked.output_dir), "progress": instrument.progress, "probing": probing}
                setup = replace(setup, formats=_formats(ask(name, setup, **grid), cores, **how))
        if compiles:
            grid["precision"] = compiled_in(work, target.plan, instrument, ledger)
        parts.append(ask(name, setup, **grid))
    rows = ("families", "left_out", "profiles", "trials", "checks")  # of the rest a question has only one
    every: dict[str, Any] = {row: tuple(one for part in parts for one in getattr(part, row)) for row in rows}
    return replace(parts[0], **every), replace(instrument, data_name=setup.images.name)


def _formats(experiment: Experiment, cores: int, **how: Any) -> dict[str, dict[str, Any]]:
    """Settings in which this trainer is fastest here, and formats of each tuned one; measured once for a batch."""
    ours = experiment.families[0].baseline
    rows = [(label.removesuffix(TUNED), c) for f in experiment.families for label, c in f.candidates if TUNED in label]
    able = [(peer, config) for peer, config in rows if peer == PUBLISHED or hardware.package_version(peer)]
    found = {OURS: probe.settings_of(ours, threads=ours.rank_threads(cores), **how)}
    return found | {peer: probe.formats_of(c, threads=c.rank_threads(cores), **how) for peer, c in able}


def _images(asked: Settings, image_size: int, progress: Callable[[str], None]) -> Images:
    cache = asked.cache or output_folder(asked.output_dir) / PREPARED
    how = {"held_out": asked.held_out, "skip_bad": asked.skip_bad, "progress": progress}
    folder = resolve(asked.data, cache, image_size=image_size, **how)  # type: ignore[arg-type]
    manifest = read_manifest(folder)
    source = f"images from {'/'.join(Path(manifest.source).parts[-2:])}"
    name = f"{manifest.train_count:,} {'synthetic images' if manifest.kind == 'synthetic' else source}"
    return Images(folder=str(folder), sha256=manifest.content_hash, name=name, image_size=image_size)


# --- what is chosen once for a question by this machine, and kept by its ledger: cores and a precision ---


def _cores_of(
    name: str, asked: Settings, instrument: Instrument, ledger: Ledger, *, target: Target, device: str, work: str
) -> int:
    """Cores to measure a question with: those asked for, those of its answer or last set here, or those that are free.

    They are chosen once for a network, or training of the user's, and a batch that is asked for: a later change of load
    measures nothing again by itself. Of several answers that with all cores leads. Too few sets that count are no
    answer, and after a set that other processes disturbed there are fewer cores.
    """
    most, own, batch = instrument.usable_cores, asked.workload is not None, asked.grid.get("global_batch_size")
    if asked.cores is not None:
        return _checked(asked.cores, most)
    if device == "cuda" or most == 1 or asked.preset == "smoke":  # which calls nothing
        return most
    names, here = (SEARCH, RECOMMENDATION) if name == SEARCH else (name,), hardware.machine().key
    mine = [r for r in ledger.read()[0] if r.experiment in names and r.machine.key == here]
    # The code of a user's training is known when a rank has loaded it, which needs the configurations.
    code = None if own else instrument.code.key
    mine = [r for r in mine if own == r.cohort[2].startswith(OWN_DATA) and code in (None, r.code_version)]

    def alike(*roles: str) -> list[RunRecord]:
        found = [r for r in mine if r.role in roles and r.plan.key == target.plan.key]
        found = [r for r in found if (r.config.work_name, r.config.device) == (work, "cpu")]
        return [r for r in found if batch in (None, r.config.global_batch_size)]

    known = alike("look") or alike("baseline", "profile")[-1:]
    if target.seconds != 0:  # else what was measured is shown
        known = [r for r in known if r.role != "look" or _answers(r)]
    cores = [r.config.threads * r.config.node_size or most for r in known]
    if target.seconds == 0 or (cores and not crowded(known)):
        return max(cores, default=most)
    with measuring(instrument.progress):  # whatever measures here takes cores, and will be over
        return max(1, min([free_cores(), *(n - 1 for n in cores)]))


def _answers(look: RunRecord) -> bool:
    """Whether what was shown rests on the least sets, or had nothing to compare though all cores were there."""
    logs = {k: v for k, v in (look.look or {"log_ratios": {}})["log_ratios"].items() if k != TWIN}
    return any(len(v) >= LEAST_SETS for v in logs.values()) or not (logs or look.config.threads)


def _checked(cores: int, most: int) -> int:
    """Cores that are asked for. Raises ConfigError for more than are usable."""
    whole("cores", cores, 1)
    if cores > most:
        raise ConfigError(f"cores is {cores}: {most} are usable here, give at most that")
    return cores


def compiled_in(work: str, plan: Plan, instrument: Instrument, ledger: Ledger) -> str:
    """In what a CPU compiles a network, or the user's training: as in earlier sets, bf16 if called faster, or fp32."""
    here = (hardware.machine().key, instrument.code.key)
    mine = [r for r in ledger.read()[0] if r.cohort[:2] == here]
    wanted = ("torch_compile", "baseline", plan.key)
    before = [r for r in mine if (r.experiment, r.role, r.plan.key) == wanted]
    if earlier := [r.config.precision for r in before if (r.config.work_name, r.config.device) == (work, "cpu")]:
        return earlier[-1]
    if missing_to_explain():
        return "fp32"
    records = [r for r in mine if r.experiment == "amp" or r.role == LOOK]
    records = [r for r in records if r.role == LOOK or (r.config.work_name, r.config.device) == (work, "cpu")]
    found = all_cores_first(comparisons(study(records, "amp"))) if records else []
    return "bf16" if any(c.primary and c.verdict == stats.FASTER for c in found) else "fp32"


# --- two configurations, measured in the same sets -------------------------------------------------------------------


Pair = tuple[RunConfig, RunConfig]


def target_of_pair(
    resolution: float = stats.RESOLUTION, minutes: float | None = None, sets: int = MOST_SETS, cores: int | None = None
) -> Target:
    """Return how much of a pair is to be measured. Raises ConfigError for what cannot be, also of ``cores``."""
    if minutes == 0:
        raise ConfigError("minutes is 0: give more, or leave it out for no limit")
    if cores is not None:
        _checked(cores, hardware.usable_cores())
    return _target(Plan(), minutes, sets, resolution)


def plan_pair(
    pair: Pair,
    names: tuple[str, str],
    *,
    output: Path,
    resolution: float = stats.RESOLUTION,
    minutes: float | None = None,
    sets: int = MOST_SETS,
    cores: int | None = None,
    quiet: bool = False,
    code: CodeVersion | None = None,
) -> Campaign:
    """Make two configurations, the baseline first, ready to be measured in the same sets.

    ``cores`` of a CPU are those of an earlier answer, or that are free; all where a side says how many threads it
    takes. ``code`` covers the sources of both sides, None looks at each. Raises ConfigError where this machine cannot,
    or the work is not equal.
    """
    target, most = target_of_pair(resolution, minutes, sets, cores), hardware.usable_cores()
    chosen = most if cores is None else cores
    if chosen < most and any(c.threads for c in pair):
        raise ConfigError(f"cores is {cores}, and a side says how many threads it takes: leave one of the two out")
    one, two = _pair_on(pair, chosen)
    if one.data_sha256 and two.data_sha256 and one.data_sha256 != two.data_sha256:
        raise ConfigError("the two sides train on different images: give both the same data, or it is not equal work")
    images = f"{read_manifest(Path(one.data)).train_count:,} images" if one.data_sha256 else ""
    instrument = instrument_for(output, Progress("compare", quiet=quiet), target.seconds)
    instrument = replace(instrument, code=code or code_of(pair, instrument), data_name=images)

    def planned(cores: int, again: OnCores = None) -> Campaign:
        (base, label), (one, two) = names, _pair_on(pair, cores)
        name, rows = f"{label} against {base}", ((label, two),)
        family = Family(name=name, baseline=one, baseline_label=base, candidates=rows, primary=label)
        experiment = Experiment(name="compare", families=(family,))
        return Campaign(experiment, target, instrument, output, again)

    if cores is not None or most == 1 or any(c.device == "cuda" or c.threads for c in pair):
        return planned(chosen)
    return planned(_cores_of_pair(pair, planned(most)), planned)


def _cores_of_pair(pair: Pair, planned: Campaign) -> int:
    """Cores to compare two configurations with: those of an earlier answer of this code, or those that are free."""
    by_id = {on_cores(pair[0], n).run_id: n for n in range(1, hardware.usable_cores() + 1)}
    wanted, records = ("compare", "look", *planned.cohort[:2]), planned.ledger.read()[0]
    mine = [r for r in records if (r.experiment, r.role, *r.cohort[:2]) == wanted]
    if known := [by_id[r.run_id] for r in mine if r.run_id in by_id and _answers(r)]:
        return max(known)
    with measuring(planned.progress.always):
        return free_cores()


def _pair_on(pair: Pair, cores: int) -> Pair:
    """Return two configurations that use ``cores`` cores. Raises ConfigError if this machine cannot run them."""
    most, gpus = hardware.usable_cores(), len(hardware.gpus())
    for config in pair:
        setting.check_ranks(config.device, config.world_size, gpus, cores, limited=cores < most)
        setting.check_cores("loader_workers", config.loader_workers, most, config.world_size)
    return on_cores(pair[0], cores), on_cores(pair[1], cores)


def on_cores(config: RunConfig, cores: int) -> RunConfig:
    """Return a configuration whose ranks share ``cores`` cores; unchanged if these are all cores."""
    whole_machine = config.device == "cuda" or cores >= hardware.usable_cores()
    return config if whole_machine else dataclasses.replace(config, threads=max(1, cores // config.node_size))
