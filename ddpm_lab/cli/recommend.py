"""Commands that say what to change next: ``recommend`` and ``bottleneck``, from their options to an exit code."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError
from ddpm_lab.cli.options import Command, Parser, asked, given, plain, reads, tell
from ddpm_lab.config import PARTS, RunConfig
from ddpm_lab.explain import table
from ddpm_lab.explain.charts.style import save
from ddpm_lab.explain.frames import Study, read_study
from ddpm_lab.files import expanded, ledgers, output_folder
from ddpm_lab.measure import hardware, largest_batch
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.questions import bottleneck as question
from ddpm_lab.questions import experiments, planning
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.recommend import recommend as search
from ddpm_lab.questions.recommendation import FILE
from ddpm_lab.settings_file import configuration, read_settings

MINUTES = {"quick": 10.0, "full": 60.0}
"""Of a search, where no budget is given."""
_PRESENT = ("network", "device", "precision", "loader", "loader_workers", "compile", "world_size", "seed", "image_size")
"""Settings of ``RunConfig`` that are options of ``bottleneck``."""


# --- recommend --------------------------------------------------------------------------------------------------------


def _add_options_of_a_search(parser: Parser, _: Sequence[str]) -> None:
    found = declared.options(search)
    declared.add_options(parser, [found[name] for name in ("any_batch", "seeds", "images")])


def recommend(options: argparse.Namespace) -> int:
    no_search = reads(options, "workload", "train_images")
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"minutes is {options.minutes!r}: give a number above 0")
    settings: dict[str, Any] = {"minutes": None if no_search else MINUTES.get(options.preset)} | asked(options)
    settings |= given(options, "any_batch", "seeds", "images", "train_images", "ledger", "machine")
    only: dict[str, list[str]] = {}
    for text in options.only or ():
        name, _, values = text.partition("=")
        if not values:
            raise ConfigError(f"--only is {text!r}: give a setting and its values, such as precision=fp32,bf16")
        only[name.strip()] = [value.strip() for value in values.split(",")]
    try:
        found = experiments.recommendation(global_batch_size=options.batch_size, only=only, **settings)
    except ModuleNotFoundError as missing:
        print(f"measured; {missing.name} is not installed here: take the ledger elsewhere, ddpm-lab recommend --ledger")
        return 0
    study, said = found.study, found.finding
    path = study.output_dir / FILE
    names = ("headline", "verdict", "status", "claim", "way_out", "sets", "ratio", "low", "high", "quality")
    values = plain({name: getattr(said, name) for name in names}) | {"settings": None if no_search else str(path)}
    lines = [table.plain(found.table()), said.claim, *([f"to answer it: {said.way_out}"] if said.way_out else [])]
    if not no_search and not options.json:
        image = study.output_dir / "image_output" / f"{found.file}.png"
        save(found.figure(), image)
        lines.append(f"figure: {image}")
        if options.workload is None:  # a file is for ddpm-lab train
            lines.append(f"settings: {path}" if path.exists() else "no search was made")
    tell(options, values, lines)
    return 0 if study.records else 1


# --- bottleneck -------------------------------------------------------------------------------------------------------


def _add_present_settings(parser: Parser, _: Sequence[str]) -> None:
    group, found = parser.add_argument_group("present settings, over those of --config"), declared.options(RunConfig)
    usual = {name: replace(found[name], default=None) for name in ("network", "device")}
    declared.add_options(group, [(found | usual)[name] for name in _PRESENT])


def bottleneck(options: argparse.Namespace) -> int:
    output = output_folder(options.output_dir)
    if reads(options):
        study = read_study(ledgers(options.ledger, output), RECOMMENDATION, output, machine=options.machine)
    else:
        study = _measured(options, output)
    lines, about = question.summary(study), question.subject(study)
    if about is None:
        print(*lines, sep="\n")
        return 1
    pictures, changed = [], tuple(r for r in study.records if r.experiment == "bottleneck" and r.role != "profile")
    for name, records in {"profile": (about.profile,), "bottleneck": changed}.items():
        if records:
            part = answer(replace(study, experiment=name, records=records))
            picture = output / "reports" / f"{question.REPORT}_{name}.png"
            save(part.figure(), picture)
            pictures.append((part.finding.headline, picture.name))
    report = question.write(study, output / "reports", pictures)
    advice = [{**plain(asdict(a)), "impact": a.impact, "expected": a.expected} for a in question.advice(study)]
    values = {"summary": lines, "advice": advice, "report": str(report)}
    tell(options, values, [*lines, f"report: {report}", f"page: {report.with_suffix('.html')}"])
    return 0


def _measured(options: argparse.Namespace, output: Path) -> Study:
    """Every record of this machine that can say something, after measuring what the question lacks."""
    changes = [name.strip() for name in options.changes.split(",")] if options.changes else None
    planned = planning.plan_question("bottleneck", only=changes, **asked(options) | _settings(options))
    config = planned.campaign.experiment.profiles[0][2]
    if config.device == "cuda":
        smallest = min((gpu.memory_bytes or math.inf for gpu in hardware.gpus()), default=math.inf)
        question.check_memory(config, config.world_size * smallest, f"memory of {config.world_size} GPUs together")
    else:
        question.check_memory(config, largest_batch.available_bytes(), "the machine")
    campaign = planned.campaign
    if (seconds := campaign.target.seconds) is not None:
        planned = planned.renewed(question.fitting(campaign.experiment, seconds, campaign.held))
    measured = planned.measure()
    mine = experiments.study_of(measured)
    every = read_study([measured.ledger], RECOMMENDATION, output, machine=measured.cohort[0])
    others = tuple(r for r in every.records if r.experiment != mine.experiment)
    return replace(every, records=(*others, *mine.records), measured_sets=measured.measured_sets)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What is measured, from the file and the options, which go first."""
    found = read_settings(expanded(options.config), "--config") if options.config else {}
    for name in ("train", "data_sha256"):  # how long a run is, and what its images were
        found.pop(name, None)
    if found.get("nodes") == 1:
        del found["nodes"]
    found |= given(options, *_PRESENT)
    found |= {} if options.batch_size is None else {"global_batch_size": options.batch_size}
    found |= {} if options.data is None else {"data": options.data}
    for place, _ in PARTS:
        if place in found:  # alone, since what the others say is settled later; an exchange needs two ranks
            found[place] = getattr(configuration({"world_size": 2, place: found[place]}, "--config"), place)
    return found


COMMANDS = {
    "recommend": Command(
        recommend,
        "recommend --minutes 10",
        "preset minutes data held-out skip-bad network workload device batch-size sets resolution only train-images "
        "ledger machine output-dir json",
        {
            "minutes": "time budget (default: 10; 60 in full)",
            "batch-size": "images of a step to set out from (default: the preset's)",
            "sets": "sets that measure again what is found (default: the preset's)",
            "resolution": "or until a difference such as 2% would be found",
            "only": {
                "help": "hold a setting to these values, such as precision=bf16 or loader=packed,files-2 (may be "
                "repeated); the first is where the search sets out; settings: precision, memory, compile, ranks, "
                "loader, batch, and on a CPU freed_memory",
                "action": "append",
                "metavar": "NAME=VALUE,...",
            },
            "ledger": "measure nothing, and read these records",
            "machine": "whose records to read: a name, a part of it, a key, or all",
        },
        more=_add_options_of_a_search,
    ),
    "bottleneck": Command(
        bottleneck,
        "bottleneck --batch-size 8",
        "config batch-size data held-out skip-bad preset minutes sets resolution changes ledger machine output-dir "
        "json",
        {
            "config": "TOML file with the present settings, by names of RunConfig",
            "batch-size": "images of a step over all ranks (default: 128 on a GPU, 8 on a CPU)",
            "data": {"default": None},
            "ledger": "report from these records, and measure nothing",
        },
        more=_add_present_settings,
    ),
}
