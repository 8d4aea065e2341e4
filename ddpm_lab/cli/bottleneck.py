"""The command that says what to change next in a configuration, from its options to a report."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError, percent
from ddpm_lab.cli.options import add, given, plain, tell
from ddpm_lab.config import COMPILE, LOADERS, NETWORKS, PARTS, PRECISIONS
from ddpm_lab.files import expanded, ledgers, output_folder
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.settings_file import configuration, read_settings

if TYPE_CHECKING:
    from ddpm_lab.explain.frames import Study

_PRESENT = ("precision", "loader", "loader_workers", "compile", "world_size", "seed", "image_size", "network", "device")


def add_options(subparsers: Any) -> None:
    """Add the command to the command line. Settings that are not given are absent, so that a file can say them."""
    parser = subparsers.add_parser(
        "bottleneck", help="what takes the time of a step, and which change of a setting makes it faster: a report"
    )
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
    parser.set_defaults(command=bottleneck_command)


def bottleneck_command(options: argparse.Namespace) -> int:
    """Measure what is missing, write the report, and print its summary; 1 where there is nothing to report."""
    from ddpm_lab.explain import subject  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.explain.charts.style import save  # noqa: PLC0415
    from ddpm_lab.questions import bottleneck, experiments  # noqa: PLC0415
    from ddpm_lab.questions.answers import answer  # noqa: PLC0415

    output = output_folder(options.output_dir)
    if options.ledger or options.machine:
        if options.changes or options.config:
            raise ConfigError("--changes and --config are about measuring, and --ledger and --machine measure nothing")
        study = experiments.read_study(ledgers(options.ledger, output), RECOMMENDATION, output, machine=options.machine)
    else:
        study = _measured(options, output)
    lines, about = bottleneck.summary(study), subject.subject(study)
    if about is None:
        print(*lines, sep="\n")
        return 1
    pictures, changed = [], tuple(r for r in study.records if r.experiment == "bottleneck" and r.role != "profile")
    for name, records in {"profile": (about.profile,), "bottleneck": changed}.items():
        if records:
            part = answer(dataclasses.replace(study, experiment=name, records=records))
            picture = output / "reports" / f"{bottleneck.REPORT}_{name}.png"
            save(part.figure(), picture)
            pictures.append((part.finding.headline, picture.name))
    report = bottleneck.write(study, output / "reports", pictures)
    advice = [
        {**plain(dataclasses.asdict(a)), "impact": a.impact, "expected": a.expected} for a in bottleneck.advice(study)
    ]
    values = {"summary": lines, "advice": advice, "report": str(report)}
    tell(options, values, [*lines, f"report: {report}", f"page: {report.with_suffix('.html')}"])
    return 0


def _measured(options: argparse.Namespace, output: Path) -> Study:
    """Every record of this machine that can say something, after measuring what the question lacks."""
    from ddpm_lab.measure import hardware, largest_batch  # noqa: PLC0415
    from ddpm_lab.questions import planning  # noqa: PLC0415
    from ddpm_lab.questions.bottleneck import check_memory  # noqa: PLC0415
    from ddpm_lab.questions.experiments import read_study, study_of  # noqa: PLC0415

    planned = planning.plan_question(
        "bottleneck",
        resolution=percent(options.resolution) if options.resolution else None,
        only=[name.strip() for name in options.changes.split(",")] if options.changes else None,
        **given(options, "preset", "minutes", "sets", "output_dir", "held_out", "skip_bad"),
        **_settings(options),
    )
    config = planned.campaign.experiment.profiles[0][2]
    if config.device == "cuda":
        smallest = min((gpu.memory_bytes or math.inf for gpu in hardware.gpus()), default=math.inf)
        check_memory(config, config.world_size * smallest, f"memory of {config.world_size} GPUs together")
    else:
        check_memory(config, largest_batch.available_bytes(), "the machine")
    measured = planned.measure()
    asked = study_of(measured)
    every = read_study([measured.ledger], RECOMMENDATION, output, machine=measured.cohort[0])
    others = tuple(r for r in every.records if r.experiment != asked.experiment)
    return dataclasses.replace(every, records=(*others, *asked.records), measured_sets=measured.measured_sets)


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
