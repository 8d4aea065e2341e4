"""Commands that measure: ``run``, ``compare`` and ``strategy``, from their options to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError, choice, missing_to_explain, percent
from ddpm_lab.cli.options import COMMON, RESOLUTION, Command, Parser, add, given, plain, tell, track, tracker_chosen
from ddpm_lab.explain.bands import DEFAULT, bands
from ddpm_lab.files import expanded, writing

WIDTH = 100
"""Columns of what an answer rests on, on a terminal."""


# --- run -------------------------------------------------------------------------------------------------------------


def _questions() -> dict[str, dict[str, declared.Option]]:
    """The settings of each question, with those of its runs for quality."""
    from ddpm_lab.questions.ask import questions, trained  # noqa: PLC0415
    from ddpm_lab.questions.quality import quality  # noqa: PLC0415

    of_runs = {name: declared.options(quality)[name] for name in ("seeds", "images")}
    return {
        name: {**declared.options(function), **(of_runs if name in trained() else {})}
        for name, function in questions().items()
    }


def _add_options_of_questions(parser: Parser, words: Sequence[str]) -> None:
    """Add the options of the questions among ``words``, or of all; of others a hint says who takes them."""
    from ddpm_lab.questions.ask import every_question  # noqa: PLC0415

    questions = _questions()
    asked = [name for name in questions if name in words]
    about = [f"  {name:14} {every_question()[name].about.title}" for name in questions]
    parser.epilog = "\n".join(["experiments:", *about, "", str(parser.epilog)])
    group = parser.add_argument_group(f"options of {', '.join(asked)}" if asked else "options of the experiments")
    for name in dict.fromkeys(name for of_question in questions.values() for name in of_question):
        takers = [question for question in questions if name in questions[question]]
        found = [questions[question][name] for question in takers if question in (asked or takers)]
        parser.hints[declared.flag(name)] = f": only {', '.join(takers)} take{'s' * (len(takers) == 1)} it"
        if found:
            usual = found[0].default if asked and all(o.default == found[0].default for o in found) else None
            who = "" if asked else f" ({', '.join(takers)})"
            opt = dataclasses.replace(found[0].opt, help=f"{found[0].opt.help}{who}")
            declared.add_options(group, [dataclasses.replace(found[0], default=usual, opt=opt)])
    if not asked or "multi_gpu" in asked:
        add(group, "bands")


def run(options: argparse.Namespace) -> int:
    """Measure one or more experiments; again, more sets where inconclusive."""
    from ddpm_lab.questions import experiments, planning  # noqa: PLC0415

    tracker, questions, said = tracker_chosen(options.tracker), _questions(), vars(options)
    table = bands(said.get("bands", DEFAULT), "--bands")
    for name in options.experiments:
        choice("experiment", name, questions)
    names = list(dict.fromkeys(options.experiments))
    settings = given(options, *COMMON.replace("-", "_").split(), "sets", "device", "image_size", "seed")
    settings |= given(options, "oversubscribe", "cores")
    settings["minutes"] = options.minutes / len(names) if options.minutes else options.minutes
    settings["resolution"] = percent(options.resolution) if options.resolution else None
    # All are checked before the first is measured.
    planned = [planning.plan_question(name, **settings, **given(options, *questions[name])) for name in names]
    measured = [experiments.undecided(one).measure() for one in planned]
    answers = [_answer(one, table) for one in measured]
    if options.json:
        print(json.dumps(answers, indent=1))
    else:
        for answer in answers:
            _show(answer)
        print(f"records: {answers[-1]['ledger']}")
    sys.stdout.flush()
    if "SLURM_JOB_ID" in os.environ:
        _tell_runs(measured)
    track(tracker, *measured)
    return 0 if all(one.completed for one in measured) else 1


def _answer(measured: Any, table: Any) -> dict[str, Any]:
    """The finding of what was measured, or, on a node without scipy, where its records lie."""
    values = {"experiment": measured.experiment.name, "measured_sets": measured.measured_sets}
    values["ledger"] = str(measured.ledger)
    if missing := missing_to_explain():
        advice = f"measured; {missing} is not installed here, so take the ledger elsewhere: ddpm-lab figures"
        return {**values, "finding": f"{advice} --ledger {measured.ledger.name}"}
    from ddpm_lab.explain.charts.style import save  # noqa: PLC0415
    from ddpm_lab.questions import lost_scaling  # noqa: PLC0415
    from ddpm_lab.questions.ask import answer  # noqa: PLC0415
    from ddpm_lab.questions.experiments import study_of  # noqa: PLC0415

    shown = answer(study := dataclasses.replace(study_of(measured), bands=table))
    found = shown.finding
    values |= {"headline": found.headline, "finding": found.claim, "verdict": found.verdict, "status": found.status}
    figure = measured.output_dir / "image_output" / f"{shown.file}.png"
    save(shown.figure(), figure)
    values |= {"way_out": found.way_out, "figure": str(figure)}
    lost = [
        {"family": split.family, "sentence": lost_scaling.sentence(split), "parts": lost_scaling.table([split])}
        for split in lost_scaling.splits(study)
    ]
    return values | ({"lost_scaling": lost} if lost else {})


def _show(answer: dict[str, Any]) -> None:
    from ddpm_lab.explain.table import show  # noqa: PLC0415

    short = answer.get("headline", answer["finding"])
    print(f"{answer['experiment']}: {short}")
    rest = answer["finding"].removeprefix(short).removeprefix(". ")
    print(*textwrap.wrap(rest, WIDTH, initial_indent="  ", subsequent_indent="  "), sep="\n", end="\n" * bool(rest))
    for title, name in (("to answer it", "way_out"), ("figure", "figure")):
        if answer.get(name):
            print(f"{title}: {answer[name]}")
    for split in answer.get("lost_scaling", ()):
        print(f"where the lost scaling went, {split['family']}: {split['sentence']}")
        show(split["parts"])


def _tell_runs(measured: Sequence[Any]) -> None:
    """Tell the log of a job of each configuration that trained."""
    from ddpm_lab.questions.experiments import records_of  # noqa: PLC0415
    from ddpm_lab.reports import summary  # noqa: PLC0415
    from ddpm_lab.training import run_folder  # noqa: PLC0415

    runs = []
    for one in measured:
        images = {c.data_sha256: run_folder.train_count(c) for c in one.experiment.configurations if c.data}
        runs += summary.of_records(records_of(one), images)
    summary.tell(runs)


# --- compare ---------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    """Compare the speed of two training steps, or of one in two revisions."""
    from ddpm_lab.questions import comparison, gate  # noqa: PLC0415
    from ddpm_lab.questions.planning import MOST_SETS  # noqa: PLC0415

    tracker = tracker_chosen(options.tracker)
    threshold = percent(options.threshold, "--threshold") if options.threshold else 0.0 if options.gate else None
    wanted = percent(options.resolution, "--resolution") if options.resolution else threshold or comparison.RESOLUTION
    _check_sides(options, gated=threshold is not None)
    how = given(options, "minutes", "device", "output_dir")
    how |= {"resolution": wanted, "sets": MOST_SETS if options.sets is None else options.sets}
    if options.against is None:
        measured: Any = comparison.measure(options.baseline, options.candidate, **how)
    else:
        threshold = wanted if threshold is None else threshold
        measured = gate.measure(options.baseline, options.against, always=options.always, **how)
        if isinstance(measured, gate.Unchanged):
            return _unchanged(measured.sentence, options)
    found = comparison.answer(measured)
    values, lines, code, page = found.as_dict(), [str(found)], int(not found.complete), ""
    if threshold is not None:
        judged = gate.outcome(found.answer, threshold)
        code = judged.exit_code(strict=options.strict)
        said = {"status": judged.status, "sentence": judged.sentence, "threshold": threshold, "exit_code": code}
        values, lines = {**values, "gate": said}, [*lines, judged.sentence]
        page = gate.summary(found.answer, judged, threshold)
    tell(options, values, lines)
    sys.stdout.flush()
    _summarise(options, page)
    track(tracker, measured)
    return code


def _check_sides(options: argparse.Namespace, *, gated: bool) -> None:
    """Raise ConfigError where the options do not go together."""
    against, candidate = options.against, options.candidate
    if against is None and not candidate:
        raise ConfigError("compare needs two sides: name A and B, or one and --against a revision; see --help")
    if against is not None and candidate:
        raise ConfigError(f"--against {against} takes one step, the same on both sides: leave out {candidate}")
    if options.always and against is None:
        raise ConfigError("--always is for identical code of a revision: it needs --against")
    if not gated and against is None and (options.strict or options.summary):
        raise ConfigError("--strict and --summary are about a decision: give --against, --gate or --threshold too")


def _unchanged(sentence: str, options: argparse.Namespace) -> int:
    from ddpm_lab.questions.gate import EXIT_CODES, IDENTICAL  # noqa: PLC0415

    text, code = f"{IDENTICAL}: {sentence}", EXIT_CODES[IDENTICAL]
    tell(options, {"verdict": IDENTICAL, "gate": {"status": IDENTICAL, "sentence": text, "exit_code": code}}, [text])
    _summarise(options, f"### {IDENTICAL}\n\n{sentence}.\n")
    return code


def _summarise(options: argparse.Namespace, text: str) -> None:
    """Append Markdown to a file: the one that is named, or that of the GitHub job that this runs in."""
    if (path := options.summary or os.environ.get("GITHUB_STEP_SUMMARY")) and text:
        with writing(expanded(path), option="--summary"), expanded(path).open("a") as file:
            file.write(text)


# --- strategy --------------------------------------------------------------------------------------------------------


def strategy(options: argparse.Namespace) -> int:
    """Say whether one rank or several should train, and why."""
    from ddpm_lab.questions import strategy as question  # noqa: PLC0415

    found = question.strategy(**given(options, "network", "parameters", "batch_size", "device", "output_dir"))
    carried = {"--device": options.device, "--output-dir": options.output_dir}
    words = " ".join(f"{name} {shlex.quote(value)}" for name, value in carried.items() if value)
    tell(options, plain(dataclasses.asdict(found)), [found.text(words)])
    return 0


COMMANDS = (
    Command(
        run,
        "run amp --preset smoke --data path/to/images",
        f"experiments {COMMON} device image-size sets cores resolution seed oversubscribe tracker json",
        more=_add_options_of_questions,
    ),
    Command(
        compare,
        "compare mine:before mine:after --resolution 2%",
        "baseline candidate against always resolution minutes sets device output-dir tracker gate "
        "threshold strict summary json",
        {
            "resolution": f"{RESOLUTION}: measure until then (default: the threshold, or 3%)",
            "sets": "the most sets to measure (default: 100)",
        },
    ),
    Command(
        strategy,
        "strategy --network seed --batch-size 64",
        "network|parameters batch-size device output-dir json",
        {"batch-size": "images of a step over all ranks (default: 128 on a GPU, 32 on a CPU)"},
    ),
)
