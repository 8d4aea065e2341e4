"""The command that measures experiments: what its options mean for each of them, and which of them it does not take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError, choice, missing_to_explain, percent
from ddpm_lab.cli.options import COMMON, RESOLUTION, add, given, track, tracker_chosen
from ddpm_lab.explain.bands import DEFAULT, Bands, bands

WIDTH = 100
"""Columns of what an answer rests on, on a terminal."""
_NAMES = {"way_out": "to answer it", "figure": "figure"}


def add_options(subparsers: Any, words: Sequence[str]) -> None:
    """Add the command to the command line, with the options of the experiments that ``words`` name, or of all."""
    parser = subparsers.add_parser(
        "run",
        help="measure what is missing for one or more experiments; again, more where the answer is inconclusive",
    )
    parser.add_argument(
        "experiments",
        nargs="+",
        metavar="EXPERIMENT",
        help="profile (where the time of a step goes), multi_gpu (one rank against several), amp (number formats), "
        "workers (of the data loader), torch_compile (what compiling gains and costs), batch_size (the largest batch "
        "that fits), exchange (how ranks exchange gradients), all_reduce (how fast their links are), peers (this "
        "trainer beside others, and the limits of the machine), quality (what each setting costs in loss), bottleneck "
        "(what to change next) or claims (published claims, and wrong ways to measure)",
    )
    add(parser, *COMMON)
    add(parser, "device", "image-size", "sets")
    parser.add_argument(
        "--cores",
        type=int,
        metavar="N",
        help="CPU cores to measure with (default: those that other processes leave free)",
    )
    add(parser, "resolution", help=f"{RESOLUTION}: measure until then (default: what the time gives)")
    add(parser, "seed")
    parser.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than cores or GPUs; speed is not claimed"
    )
    add(parser, "tracker", "json")
    if words[:1] == ["run"]:  # the questions are imported for their options alone
        _add_options_of_questions(parser, words[1:])
    parser.set_defaults(command=run_command)


def _add_options_of_questions(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    takers: dict[str, list[str]] = {}
    found: dict[str, declared.Option] = {}
    questions = _questions()
    asked = [word for word in words if word in questions]
    for question in sorted(questions, key=lambda name: name not in asked):  # the help is that of what is asked
        for name, option in questions[question].items():
            alike = found.setdefault(name, option).default == option.default or question not in asked
            found[name] = found[name] if alike and asked else dataclasses.replace(found[name], default=None)
            takers.setdefault(name, []).append(question)
    group = parser.add_argument_group(f"options of {', '.join(asked)}" if asked else "options of the experiments")
    for name, option in found.items():
        help_ = option.opt.help if asked else f"{option.opt.help} ({', '.join(takers[name])})"
        if asked and not set(asked) & set(takers[name]):
            help_ = argparse.SUPPRESS  # known, so that it can be refused in a sentence that says who takes it
        declared.add_options(group, [dataclasses.replace(option, opt=dataclasses.replace(option.opt, help=help_))])
    if not asked or "multi_gpu" in asked:
        add(group, "bands")


def _questions() -> dict[str, dict[str, declared.Option]]:
    """The settings of each question, with those of its runs for quality."""
    from ddpm_lab.plan import WITH_TRIALS  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.questions.ask import QUESTIONS  # noqa: PLC0415
    from ddpm_lab.questions.quality import quality  # noqa: PLC0415

    trained = {name: declared.options(quality)[name] for name in ("seeds", "images")}
    return {
        name: {**declared.options(function), **(trained if name in WITH_TRIALS else {})}
        for name, function in QUESTIONS.items()
    }


def run_command(options: argparse.Namespace) -> int:
    """Measure what is missing for experiments."""
    from ddpm_lab.explain.grids import show  # noqa: PLC0415
    from ddpm_lab.questions import experiments, planning  # noqa: PLC0415

    tracker = tracker_chosen(options.tracker)
    table = bands(getattr(options, "bands", DEFAULT), "--bands")
    grids = _grids(options.experiments, vars(options))
    settings = given(options, "preset", "sets", "output_dir", "data", "held_out", "skip_bad", "network")
    settings |= given(options, "device", "image_size", "seed", "oversubscribe", "workload", "cores")
    settings["minutes"] = options.minutes / len(grids) if options.minutes else options.minutes
    settings["resolution"] = percent(options.resolution) if options.resolution else None
    # All are checked before the first is measured.
    planned = [planning.plan_question(name, **settings, **grid) for name, grid in grids.items()]
    measured = [experiments.undecided(one).measure() for one in planned]
    results = [_answer(one, table) for one in measured]
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            short = result.get("headline", result["finding"])
            print(f"{result['experiment']}: {short}")
            rest = result["finding"].removeprefix(short).removeprefix(". ")
            for line in textwrap.wrap(rest, WIDTH, initial_indent="  ", subsequent_indent="  "):
                print(line)
            for name in ("way_out", "figure"):
                if result.get(name):
                    print(f"{_NAMES[name]}: {result[name]}")
            for split in result.get("lost_scaling", ()):
                print(f"where the lost scaling went, {split['family']}: {split['sentence']}")
                show([list(split["parts"][0]), *(list(row.values()) for row in split["parts"])])
            if others := result.get("lost_scaling_unsplit"):
                print(f"where the lost scaling went, {others}")
        print(f"records: {results[-1]['ledger']}", flush=True)
    sys.stdout.flush()
    if "SLURM_JOB_ID" in os.environ:
        _tell_runs(measured)
    if tracker:
        for one in measured:
            track(tracker, one)
    return 0 if all(one.completed for one in measured) else 1


def _tell_runs(measured: Sequence[Any]) -> None:
    """Tell of each configuration that trained."""
    from ddpm_lab.questions.experiments import records_of  # noqa: PLC0415
    from ddpm_lab.reports import summary_lines  # noqa: PLC0415
    from ddpm_lab.training import run_folder  # noqa: PLC0415

    runs = []
    for one in measured:
        configurations = [c for c in one.experiment.configurations if c.data]
        images = {c.data_sha256: run_folder.train_count(c) for c in configurations}
        runs += summary_lines.of_records(records_of(one), images)
    summary_lines.tell(runs)


def _answer(measured: Any, table: Bands) -> dict[str, Any]:
    """The finding of what was measured, or, on a node without scipy, where its records lie."""
    values = {
        "experiment": measured.experiment.name,
        "measured_sets": measured.measured_sets,
        "ledger": str(measured.ledger),
    }
    if missing := missing_to_explain():
        advice = f"measured; {missing} is not installed here, so take the ledger elsewhere: ddpm-lab figures"
        return {**values, "finding": f"{advice} --ledger {measured.ledger.name}"}
    from ddpm_lab.explain import show  # noqa: PLC0415
    from ddpm_lab.explain.charts.style import save  # noqa: PLC0415
    from ddpm_lab.explain.questions import lost_scaling  # noqa: PLC0415
    from ddpm_lab.questions.answers import answer  # noqa: PLC0415
    from ddpm_lab.questions.experiments import study_of  # noqa: PLC0415

    study = dataclasses.replace(study_of(measured), bands=table)
    shown = answer(study)
    found = shown.finding
    values |= {"headline": found.headline, "finding": found.claim, "verdict": found.verdict, "status": found.status}
    values["way_out"] = found.way_out
    figure = measured.output_dir / "image_output" / f"{show.NAMES[study.experiment]}.png"
    save(shown.figure(), figure)
    values["figure"] = str(figure)
    lost = lost_scaling.as_values(study)
    others = lost_scaling.unsplit(study)
    return values | ({"lost_scaling": lost} if lost else {}) | ({"lost_scaling_unsplit": others} if others else {})


def _grids(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each experiment that were given. Raises ConfigError for one that none of them takes."""
    questions = _questions()
    for name in names:
        choice("experiment", name, questions)
    every = {name for of_question in questions.values() for name in of_question}
    for setting in every & given.keys():
        able = [name for name, of_question in questions.items() if setting in of_question]
        if not set(names) & set(able):
            raise ConfigError(
                f"{declared.flag(setting)}: the experiment {names[0]} has none; only {', '.join(able)} "
                f"take{'s' * (len(able) == 1)} it"
            )
    return {name: {n: given[n] for n in questions[name] if n in given} for name in names}
