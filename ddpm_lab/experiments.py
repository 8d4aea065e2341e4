"""Ask a question: measure what the ledger does not have yet, and return the records that answer it.

``run`` is the one call of every notebook. ``measure`` is the measuring half alone, which needs no pandas, no Jupyter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_lab.config import DDPM, DEVICES, NETWORKS, ConfigError, Experiment, choice, several, whole
from ddpm_lab.config import preset as preset_called
from ddpm_lab.data.packed import resolve
from ddpm_lab.data.prepared import read_manifest
from ddpm_lab.ledger import Ledger, LedgerError, read_all
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign, Target
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.group import sweep
from ddpm_lab.measure.network_choice import choose_network
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument
from ddpm_lab.questions import QUESTIONS, Images, Setup

if TYPE_CHECKING:
    from ddpm_lab.explain.frames import Study

CHECKOUT = Path(__file__).resolve().parents[1]
LEDGER = Path("trace_output", "ledger.jsonl")


def output_folder(output_dir: str | Path | None) -> Path:
    """Where figures, traces and records go: ``output_dir``, or the checkout this package belongs to.

    An installed copy has no checkout; there it is the working directory.
    """
    if output_dir is not None:
        return Path(output_dir).expanduser().absolute()
    return CHECKOUT if (CHECKOUT / "notebooks").is_dir() else Path.cwd()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a call to ``measure`` answered with: the question's run ids, their cohort, and how many sets it added.

    ``completed`` says whether the ledger now holds anything that answers the question.
    """

    experiment: Experiment
    ledger: Path
    output_dir: Path
    cohort: tuple[str, str, str, str]
    measured_sets: int
    completed: bool


def run(
    name: str,
    *,
    output_dir: str | Path | None = None,
    ledger: Sequence[str | Path] | str | Path | None = None,
    machine: str | None = None,
    **settings: Any,
) -> Study:
    """Answer a question with records, measuring first what is missing.

    With ``ledger`` (files to read) or ``machine`` (whose records to show) nothing is measured. The other settings are
    those of ``measure``. Raises ConfigError, DataError or LedgerError, in one sentence, before any rank is started.
    """
    choice("experiment", name, QUESTIONS)
    if ledger is not None or machine is not None:
        return _stored(name, output_dir, ledger, machine)
    return study_of(measure(name, output_dir=output_dir, **settings))


def study_of(measured: Measured) -> Study:
    """The records that answer what was measured."""
    from ddpm_lab.explain.frames import study  # noqa: PLC0415 - the explaining half is not on a bare GPU node

    records, damaged = Ledger(measured.ledger).read()
    for line in damaged:
        print(f"note: {line}")
    machine, code, _, plan = measured.cohort
    configurations = measured.experiment.configurations
    parts = [  # images of several sizes are several sets of data: each compares only with itself
        study(
            [r for r in records if r.environment.machine.key == machine],
            measured.experiment.name,
            run_ids={c.run_id for c in configurations},
            cohort=(machine, code, data, plan),
            output_dir=measured.output_dir,
        )
        for data in dict.fromkeys(c.data_sha256 for c in configurations)
    ]
    answer = dataclasses.replace(parts[0], records=tuple(r for part in parts for r in part.records))
    return dataclasses.replace(answer, measured_sets=measured.measured_sets)


def recommendation(
    *,
    output_dir: str | Path | None = None,
    ledger: Sequence[str | Path] | str | Path | None = None,
    machine: str | None = None,
) -> Study:
    """All experiments' records of one machine: by default of this one, from the ledger of the output folder."""
    from ddpm_lab.explain.frames import RECOMMENDATION, study  # noqa: PLC0415 - as above

    if ledger is None and machine is None:
        machine = hardware.machine().key
        path = output_folder(output_dir) / LEDGER
        if not any(r.environment.machine.key == machine for r in Ledger(path).read()[0]):
            return study([], RECOMMENDATION, output_dir=output_folder(output_dir))
    return _stored(RECOMMENDATION, output_dir, ledger, machine)


def _stored(
    name: str, output_dir: str | Path | None, ledger: Sequence[str | Path] | str | Path | None, machine: str | None
) -> Study:
    from ddpm_lab.explain.frames import study  # noqa: PLC0415 - as above

    output = output_folder(output_dir)
    if ledger is None:
        ledger = [output / LEDGER]
    paths = [ledger] if isinstance(ledger, str | Path) else list(ledger)
    records, damaged = read_all([Path(p).expanduser() for p in paths])
    for line in damaged:
        print(f"note: {line}")
    return study(records, name, machine=machine, output_dir=output)


def measure(
    name: str,
    *,
    preset: str = "quick",
    minutes: float | None = None,
    sets: int | None = None,
    output_dir: str | Path | None = None,
    start_method: str = "forkserver",
    quiet: bool = False,
    **settings: Any,
) -> Measured:
    """Measure what the ledger lacks for a question, and say which records answer it.

    Args:
        name: profile, multi_gpu, amp, workers or torch_compile.
        preset: smoke, quick or full: how much is run.
        minutes: time budget; what does not fit becomes fewer configurations or fewer sets. None is no limit.
        sets: sets per comparison; None is the preset's number.
        output_dir: folder that receives ``trace_output/``; None is the checkout.
        start_method: forkserver, or spawn, which costs some 5 seconds more for each group.
        quiet: show no progress.
        settings: those of ``prepare_experiment``.

    Raises:
        ConfigError: a setting cannot be run on this machine.
        DataError: there are no images where ``data`` says.
        LedgerError: the output folder cannot be written.
    """
    return Planned(
        name, preset, minutes, sets, output_dir=output_dir, start_method=start_method, quiet=quiet, **settings
    ).measure()


def forecast(name: str, *, preset: str = "quick", output_dir: str | Path | None = None, **settings: Any) -> float:
    """Seconds that measuring what is missing will take, from earlier sets on this machine where there are any."""
    settings = {k: v for k, v in settings.items() if k not in ("ledger", "machine")}
    minutes, sets = settings.pop("minutes", None), settings.pop("sets", None)
    return Planned(name, preset, minutes, sets, output_dir=output_dir, quiet=True, **settings).campaign.forecast()


class Planned:
    """A question, checked and ready to be measured: all that can be refused is refused when it is made."""

    def __init__(
        self,
        name: str,
        preset: str,
        minutes: float | None,
        sets: int | None,
        *,
        output_dir: str | Path | None,
        start_method: str = "forkserver",
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        choice("experiment", name, QUESTIONS)
        scope = preset_called(preset)
        if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
            raise ConfigError(f"minutes is {minutes!r}: give a number above 0, or leave it out for no limit")
        if sets is not None:
            whole("sets", sets, 1)
        self.output = output_folder(output_dir)
        _check_writable(self.output)
        target = Target(
            plan=scope.plan,
            sets=sets or scope.sets,
            cold_compiles=scope.cold_compiles,
            seconds=None if minutes is None else minutes * 60,
        )
        ledger = Ledger(self.output / LEDGER)
        self.progress = Progress(name, quiet=quiet)
        instrument = Instrument(
            code=code_version(DDPM),
            cache=self.output / "trace_output" / "cache",
            usable_cores=hardware.usable_cores(),
            data_name="",
            start_method=start_method,
            progress=self.progress,
        )
        experiment, images = prepare_experiment(
            name, preset=preset, output=self.output, instrument=instrument, ledger=ledger, target=target, **settings
        )
        instrument = dataclasses.replace(instrument, data_name=images.name)
        self.campaign = Campaign(experiment, target, instrument, ledger, self.output / "trace_output")

    def measure(self) -> Measured:
        """Measure what the ledger lacks."""
        sweep()
        campaign = self.campaign
        campaign.run(self.progress)
        count = campaign.measured_sets
        text = f"measured {count} set{'s' if count != 1 else ''} now" if count else "every set is in the ledger"
        self.progress.done(text)
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
    **grid: Any,
) -> tuple[Experiment, Images]:
    """Settle what None leaves open, prepare the images, and make the experiment's configurations.

    ``image_sizes`` makes one part of the experiment for each size. ``grid`` goes to the function in ``questions``.
    """
    visible = hardware.gpus()
    device = device or ("cuda" if visible else "cpu")
    choice("device", device, DEVICES)
    if device == "cuda" and not visible:
        raise ConfigError("device is 'cuda', but no GPU is visible: use device cpu, or check the driver (nvidia-smi)")
    if network is not None:
        choice("network", network, NETWORKS)
    if image_sizes is not None:
        several("image_sizes", image_sizes)
    whole("seed", seed, 0)
    parts = []
    chosen = network
    for size in image_sizes or (image_size,):
        setup = Setup(
            preset=preset,
            network=chosen or "tiny",
            images=Images(folder="", sha256="", name="", image_size=size),
            device=device,
            gpus=len(visible),
            usable_cores=instrument.usable_cores,
            seed=seed,
            oversubscribe=oversubscribe,
        )
        QUESTIONS[name](setup, **grid)  # refuses a bad size or grid before an image is decoded or anything is tried
        images = _images(
            data, held_out=held_out, skip_bad=skip_bad, size=size, output=output, progress=instrument.progress
        )
        setup = dataclasses.replace(setup, images=images)
        if chosen is None:
            chosen = _network(setup, instrument, ledger, target)
            setup = dataclasses.replace(setup, network=chosen)
        parts.append(QUESTIONS[name](setup, **grid))
    merged = Experiment(
        name=name,
        families=tuple(f for part in parts for f in part.families),
        left_out=tuple(row for part in parts for row in part.left_out),
        profiles=tuple(row for part in parts for row in part.profiles),
    )
    return merged, images


def _network(setup: Setup, instrument: Instrument, ledger: Ledger, target: Target) -> str:
    """``tiny`` on a CPU; on a GPU the published network in ``full``, else the largest that fits the budget."""
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


def _images(data: str, *, held_out: str | None, skip_bad: bool, size: int, output: Path, progress: Any) -> Images:
    folder = resolve(
        data, output / "data" / "prepared", image_size=size, held_out=held_out, skip_bad=skip_bad, progress=progress
    )
    manifest = read_manifest(folder)
    kind = (
        "synthetic images"
        if manifest.kind == "synthetic"
        else f"images from {'/'.join(Path(manifest.source).parts[-2:])}"
    )
    return Images(
        folder=str(folder), sha256=manifest.content_hash, name=f"{manifest.train_count:,} {kind}", image_size=size
    )


def _check_writable(output: Path) -> None:
    """Refuse an output folder before anything is measured for it."""
    folder = output / LEDGER.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LedgerError(f"cannot write to {folder}: {error.strerror}; choose another --output-dir") from error
