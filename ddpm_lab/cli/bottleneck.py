"""The command that says what to change next in a configuration, from its options to a report."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError, percent
from ddpm_lab.cli.options import add, command, given, plain, tell
from ddpm_lab.config import COMPILE, LOADERS, NETWORKS, PARTS, PRECISIONS
from ddpm_lab.files import expanded, ledgers, output_folder
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.settings_file import configuration, read_settings

if TYPE_CHECKING:
    from ddpm_lab.explain.frames import Study
    from ddpm_lab.measure.campaign import Campaign

_PRESENT = ("precision", "loader", "loader_workers", "compile", "world_size", "seed", "image_size", "network", "device")


def add_options(subparsers: Any) -> None:
    """Add the command to the command line. Settings that are not given are absent, so that a file can say them."""
    summary = "Report what takes the time of a step, and what to change next."
    parser = command(subparsers, "bottleneck", summary, bottleneck_command, "bottleneck --batch-size 8")
    absent = argparse.SUPPRESS
    parser.add_argument("--config", metavar="FILE", help="TOML file with the present settings, by names of RunConfig")
    add(parser, "network", choices=NETWORKS, default=absent, help="default: the preset's for this machine")
    add(parser, "batch-size", help="global batch size (default: 128 on a GPU, 8 on a CPU)")
    parser.add_argument("--precision", choices=PRECISIONS, default=absent, help="present number format (default: fp32)")
    parser.add_argument("--world-size", type=int, default=absent, help="present number of ranks (default: 1)")
    parser.add_argument("--loader", choices=LOADERS, default=absent, help="present loader (default: packed)")
    parser.add_argument("--loader-workers", type=int, default=absent, help="present loader workers (default: 0)")
    parser.add_argument("--compile", choices=COMPILE, default=absent, help="present torch.compile (default: off)")
    add(parser, "image-size", "seed", "device", default=absent)
    add(parser, "data", default=None)
    add(parser, "held-out", "skip-bad")
    parser.add_argument("--changes", metavar="NAME,...", help="only these changes, by the names in the report")
    add(parser, "preset", "minutes", "sets", "resolution")
    add(parser, "ledger", help="report from these records, and measure nothing")
    add(parser, "machine", "output-dir", "json")


def bottleneck_command(options: argparse.Namespace) -> int:
    """Measure what is missing, write the report, and print its summary; 1 where there is nothing to report."""
    from ddpm_lab.explain import subject  # noqa: PLC0415
    from ddpm_lab.explain.questions import bottleneck  # noqa: PLC0415
    from ddpm_lab.questions import bottleneck_page, experiments  # noqa: PLC0415

    output = output_folder(options.output_dir)
    remarks: list[str] = []
    if options.ledger or options.machine:
        if options.changes or options.config:
            raise ConfigError("--changes and --config are about measuring, and --ledger and --machine measure nothing")
        study = experiments.read_study(ledgers(options.ledger, output), RECOMMENDATION, output, machine=options.machine)
    else:
        study, remarks = _measured(options, output)
    lines = [*bottleneck.summary(study), *remarks]
    if subject.subject(study) is None:
        print(*lines, sep="\n")
        return 1
    report = bottleneck_page.write(study, output / "reports", remarks)
    advice = [
        {
            **plain({f.name: getattr(a, f.name) for f in dataclasses.fields(a) if f.name != "config"}),
            "impact": a.impact,
            "expected": a.expected(),
        }
        for a in bottleneck.advice(study)
    ]
    values = {"summary": lines, "advice": advice, "report": str(report)}
    tell(options, values, [*lines, f"report: {report}", f"page: {report.with_suffix('.html')}"])
    return 0


def overrun(seconds: float | None, left: float | None) -> list[str]:
    """A sentence where measuring took longer than the ``seconds`` that were given; none where it did not."""
    if seconds is None or left is None or left > -1:
        return []
    return [f"Measuring took {seconds - left:.0f} s, and {seconds:.0f} s were given: what was begun was finished."]


def _measured(options: argparse.Namespace, output: Path) -> tuple[Study, list[str]]:
    """Every record of this machine that can say something, after measuring what the question lacks, and remarks."""
    from ddpm_lab.questions import planning  # noqa: PLC0415
    from ddpm_lab.questions.bottleneck import fitting  # noqa: PLC0415
    from ddpm_lab.questions.experiments import read_study, study_of  # noqa: PLC0415

    planned = planning.plan_question(
        "bottleneck",
        resolution=percent(options.resolution) if options.resolution else None,
        only=[name.strip() for name in options.changes.split(",")] if options.changes else None,
        **given(options, "preset", "minutes", "sets", "output_dir", "held_out", "skip_bad"),
        **_settings(options),
    )
    _check_memory(planned.campaign)
    campaign, seconds = planned.campaign, planned.campaign.target.seconds
    if seconds is not None:
        planned = planned.renewed(fitting(campaign.experiment, seconds, campaign.held))
    measured = planned.measure()
    asked = study_of(measured)
    every = read_study([measured.ledger], RECOMMENDATION, output, machine=measured.cohort[0])
    others = tuple(r for r in every.records if r.experiment != asked.experiment)
    found = dataclasses.replace(every, records=(*others, *asked.records), measured_sets=measured.measured_sets)
    return found, overrun(seconds, measured.seconds_left)


def _check_memory(campaign: Campaign) -> None:
    """Refuse a batch beyond the memory of the machine, or of its GPUs, where that is known."""
    from ddpm_lab.measure import hardware, largest_batch  # noqa: PLC0415
    from ddpm_lab.questions.bottleneck import check_memory  # noqa: PLC0415

    config = dataclasses.replace(campaign.experiment.profiles[0][2], purpose="timing")
    key, where, available = campaign.machine_key, "the machine", float(largest_batch.available_bytes())
    if config.device == "cuda":
        cards = [gpu.memory_bytes for gpu in hardware.gpus()]
        held = math.inf if None in cards else float(min(filter(None, cards), default=math.inf))
        where, available = f"memory of {config.world_size} GPUs together", held * config.world_size
    mine = ("baseline", "candidate")
    known, _ = campaign.ledger.read(lambda heads: [h for h in heads if h.machine.key == key and h.role in mine])
    check_memory(config, known, available_bytes=available, where=where)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What is measured, from the file and the options, which go first."""
    found = read_settings(expanded(options.config), "--config") if options.config else {}
    for name in ("train", "data_sha256"):  # how long a run is, and what its images were
        found.pop(name, None)
    if found.get("nodes") == 1:
        del found["nodes"]
    found |= given(options, *(name for name in _PRESENT if name in options))
    if options.batch_size is not None:
        found["global_batch_size"] = options.batch_size
    if options.data is not None:
        found["data"] = options.data
    for place, _ in PARTS:
        if place in found:  # alone, since what the others say is settled later; an exchange needs two ranks
            found[place] = getattr(configuration({"world_size": 2, place: found[place]}, "--config"), place)
    return found
