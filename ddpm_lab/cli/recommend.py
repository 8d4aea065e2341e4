"""What to change next: the command ``recommend``, and what ``run bottleneck`` does beside other questions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError
from ddpm_lab.cli.options import Command, Parser, asked, given, plain, reads, tell
from ddpm_lab.config import PARTS
from ddpm_lab.explain import table
from ddpm_lab.explain.charts import save
from ddpm_lab.explain.selection import Study, read_study
from ddpm_lab.files import check_room, configuration, expanded, output_folder, read_settings
from ddpm_lab.output import say
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.questions import bottleneck as question
from ddpm_lab.questions import experiments, planning
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.recommend import recommend as search
from ddpm_lab.questions.recommendation import FILE

MINUTES = {"quick": 10.0, "full": 60.0}
"""Of a search, where no budget is given."""
PRESENT = ("precision", "loader", "loader_workers", "compile")
"""Settings of ``RunConfig`` that are options of ``run bottleneck``, beside those of every question."""


# --- recommend --------------------------------------------------------------------------------------------------------


def _add_options_of_a_search(parser: Parser, _: Sequence[str]) -> None:
    found = declared.options(search)
    declared.add_options(parser, [found[name] for name in ("seeds", "images")])


def recommend(options: argparse.Namespace) -> int:
    no_search = reads(options, "workload")
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"minutes is {options.minutes!r}: give a number above 0")
    minutes = None if no_search else MINUTES.get(options.preset or "quick")
    settings: dict[str, Any] = {"minutes": minutes} | asked(options)
    settings |= given(options, "seeds", "images", "ledger", "machine")
    only: dict[str, list[str]] = {}
    for text in options.only or ():
        name, _, values = text.partition("=")
        if not values:
            raise ConfigError(f"--only is {text!r}: give a setting and its values, such as precision=fp32,bf16")
        only[name.strip()] = [value.strip() for value in values.split(",")]
    try:
        found = experiments.recommendation(global_batch_size=options.global_batch_size, only=only, **settings)
    except ModuleNotFoundError as missing:
        say(f"measured; {missing.name} is not installed here: take the ledger elsewhere, ddpm-lab recommend --ledger")
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


def bottleneck_report(study: Study) -> dict[str, Any]:
    """What limits a step and what to change, as values; ``reports/`` gets a report, if there is a time budget."""
    output = study.output_dir
    lines, about = question.summary(study), question.subject(study)
    if about is None:
        return {"headline": lines[0], "finding": ""}
    pictures, changed = [], tuple(r for r in study.records if r.experiment == "bottleneck" and r.role != "profile")
    for name, records in {"profile": (about.profile,), "bottleneck": changed}.items():
        if records:
            part = answer(replace(study, experiment=name, records=records))
            picture = output / "reports" / f"{question.REPORT}_{name}.png"
            save(part.figure(), picture)
            pictures.append((part.finding.headline, picture.name))
    report = question.write(study, output / "reports", pictures)
    advice = [{**plain(asdict(a)), "impact": a.impact} for a in question.advice(study)]
    values = {"headline": lines[0], "finding": "\n".join(lines), "advice": advice, "report": str(report)}
    return {**values, "page": str(report.with_suffix(".html"))}


def plan_bottleneck(options: argparse.Namespace, settings: dict[str, Any]) -> planning.Planned:
    """The question of what limits a step, with the settings of a file and those given, ready to be measured."""
    check_room(output_folder(settings.get("output_dir")) / "reports")
    planned = planning.plan_question("bottleneck", **_settings(options) | settings)
    campaign = planned.campaign
    if (seconds := campaign.target.seconds) is not None:
        planned = planned.renewed(question.fitting(campaign.experiment, seconds, campaign.held))
    return planned


def bottleneck_study(measured: planning.Planned) -> Study:
    """Every record of this machine that can say something."""
    mine = experiments.study_of(measured)
    every = read_study([measured.ledger], RECOMMENDATION, measured.output, machine=measured.cohort[0])
    others = tuple(r for r in every.records if r.experiment != mine.experiment)
    return replace(every, records=(*others, *mine.records), measured_sets=measured.measured_sets)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings in the file of ``--config``."""
    found = read_settings(expanded(options.config), "--config") if options.config else {}
    for name in ("train", "data_sha256"):  # how long a run is, and what its images were
        found.pop(name, None)
    if found.get("nodes") == 1:
        del found["nodes"]
    for place, _ in PARTS:
        if place in found:  # alone, since what the others say is settled later; an exchange needs two ranks
            found[place] = getattr(configuration({"world_size": 2, place: found[place]}, "--config"), place)
    return found


COMMANDS = {
    "recommend": Command(
        recommend,
        "recommend --minutes 10",
        "preset minutes data held-out skip-bad network workload device global_batch_size sets resolution only "
        "ledger machine output-dir json",
        {
            "minutes": "time budget (default: 10; 60 in full)",
            "global_batch_size": "the preset's",
            "sets": "sets that measure again what is found (default: the preset's)",
            "resolution": "or until a difference such as 2% would be found",
            "only": {
                "help": "hold a setting to these values, such as precision=bf16 or loader=packed,files-2 (may be "
                "repeated); the first is where the search sets out; settings: precision, memory, compile, ranks, "
                "loader, batch, and on a CPU freed_memory",
                "action": "append",
                "metavar": "NAME=VALUE,...",
            },
            "machine": "whose records to read: a name, a part of it, a key, or all",
        },
        more=_add_options_of_a_search,
    ),
}
