"""Commands that measure: ``run``, ``compare`` and ``recommend``, from their options to an exit code."""

import argparse
import math
import os
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError, choice, missing_to_explain, percent
from ddpm_lab.cli.options import COMMON, Command, Parser, add, asked, given, refuse_others, tell, tracker_chosen
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import table
from ddpm_lab.explain.bands import DEFAULT, Bands, bands
from ddpm_lab.explain.charts import save
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import Study, study
from ddpm_lab.files import LEDGER, check_room, expanded, output_folder, writing
from ddpm_lab.ledger import distinct
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.process import private_folder
from ddpm_lab.output import say
from ddpm_lab.plan import RECOMMENDATION, RESOLUTION
from ddpm_lab.questions import bottleneck, comparison, experiments, gate, lost_scaling, multi_gpu, planning, scripts
from ddpm_lab.questions.ask import answer, every_question, questions, trained
from ddpm_lab.questions.quality import quality
from ddpm_lab.reports import summary
from ddpm_lab.training import tracking

MINUTES = {"quick": 10.0, "full": 60.0}
"""Of a search, where no budget is given."""
WIDTH = 100  # columns of what an answer rests on, on a terminal
TRACKED = ("images_per_second", "step_seconds", "peak_memory_bytes", "peak_rss_bytes", "sets", "disturbed_sets")
"""Numbers of a comparison that a tracker gets beside its ratio; the first two only sets that count have."""
STRATEGY = "strategy"
"""A question whose answer weighs what multi_gpu measured, so that it measures nothing itself."""


# --- run -------------------------------------------------------------------------------------------------------------


def _settings() -> dict[str, dict[str, declared.Option]]:
    """The settings of each question, with those of its runs for quality, and of a bottleneck with those of a step."""
    of_runs = {name: declared.options(quality)[name] for name in ("seeds", "images")}
    found = {
        name: declared.options(function) | (of_runs if name in trained() else {})
        for name, function in questions().items()
    }
    # What a step is like at present is told by options, beside those of every bottleneck.
    step = declared.options(RunConfig)
    present = {name: step[name] for name in ("precision", "loader", "loader_workers", "compile")}
    batch = found["amp"]["global_batch_size"]
    return found | {"bottleneck": present | found["bottleneck"], STRATEGY: {batch.name: batch}}


def _add_options_of_questions(parser: Parser, words: Sequence[str]) -> None:
    """Add the options of the questions among ``words``, or of all, with the names of those that take them."""
    settings = _settings()
    shown = [name for name in settings if name in words] or [*settings]
    titles = {name: entry.about.title for name, entry in every_question().items()}
    titles[STRATEGY] = "Should one rank or several train a network at a batch?"
    about = [f"  {name:14} {titles[name]}" for name in settings]
    parser.epilog = "\n".join(["experiments:", *about, "", str(parser.epilog)])
    group = parser.add_argument_group(f"options of {', '.join(shown)}")
    for name in dict.fromkeys(name for question in shown for name in settings[question]):
        takers = [question for question in shown if name in settings[question]]
        option = settings[takers[0]][name]
        text = option.opt.help + f" ({', '.join(takers)})" * (len(shown) > 1)
        usual = option.default if len(takers) == 1 else None
        declared.add_options(group, [replace(option, default=usual, opt=replace(option.opt, help=text))])
    for name, taker in (("bands", "multi_gpu"), ("parameters", STRATEGY)):
        if taker in shown:
            add(group, name)


def run(options: argparse.Namespace) -> int:
    tracker, able, names = tracker_chosen(options.tracker), _settings(), [*dict.fromkeys(options.experiments)]
    named = bands(vars(options).get("bands", DEFAULT), "--bands")  # refused at once
    for name in names:
        choice("experiment", name, able)
    if STRATEGY in names:
        return strategy(options, names)
    common = asked(options) | given(options, "cores")
    common |= {"minutes": options.minutes / len(names)} if options.minutes else {}
    # All are checked before the first is measured.
    asked_of = {name: common | given(options, *able[name]) for name in names}
    planned = [
        _plan_bottleneck(how) if name == "bottleneck" else planning.plan_question(name, **how)
        for name, how in asked_of.items()
    ]
    measured = [experiments.undecided(one).measure() for one in planned]
    answers = [_answer(one, named) for one in measured]
    if options.json:
        tell(options, answers, ())
    else:
        for found in answers:
            _show(found)
        say(*(f"records: {one.ledger.path}" for one in measured[-1:]))
    # The log of a job tells of each configuration that trained.
    summary.tell(run for one in measured for run in summary.of_records(experiments.records_of(one)))
    _track(tracker, measured)
    return 0 if all(one.held.any for one in measured) and all(found["finding"] for found in answers) else 1


def _answer(measured: Campaign, named: Bands) -> dict[str, Any]:
    """The finding of what was measured, with its figure drawn, or, without scipy, where its records lie."""
    values: dict[str, Any] = {"experiment": measured.experiment.name, "measured_sets": measured.measured_sets}
    values["ledger"] = str(measured.ledger.path)
    if missing := missing_to_explain():
        advice = f"measured; {missing} is not installed here, so take the ledger elsewhere: ddpm-lab figures"
        return {**values, "finding": f"{advice} --ledger {measured.ledger.path.name}"}
    if measured.experiment.name == "bottleneck":
        return values | bottleneck_report(bottleneck_study(measured))
    shown = answer(replace(experiments.study_of(measured), bands=named))
    found, figure = shown.finding, shown.study.output_dir / "image_output" / f"{shown.file}.png"
    save(shown.figure(), figure)
    values |= {"headline": found.headline, "finding": found.claim, "verdict": found.verdict, "status": found.status}
    values |= {"way_out": found.way_out, "figure": str(figure)}
    lost = [
        {"family": split.family, "headline": lost_scaling.headline([split]), "parts": lost_scaling.table([split])}
        for split in lost_scaling.splits(shown.study)
    ]
    return values | ({"lost_scaling": lost} if lost else {})


def _show(found: dict[str, Any]) -> None:
    short = found.get("headline", found["finding"])
    say(f"{found['experiment']}: {short}")
    for line in found["finding"].removeprefix(short).removeprefix(". ").split("\n"):
        say(*textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="  "))
    for title, name in (("to answer it", "way_out"), ("figure", "figure"), ("report", "report"), ("page", "page")):
        if found.get(name):
            say(f"{title}: {found[name]}")
    for split in found.get("lost_scaling", ()):
        say(f"{split['family']}: {split['headline']}")
        table.show(split["parts"])


def _track(tracker: str | None, measured: Sequence[Campaign]) -> None:
    """Tell a tracker, if there is one, what was measured, when nothing is measured any more; never raises."""
    for one in measured if tracker else ():
        try:
            log_study(str(tracker), experiments.study_of(one))
        except Exception as error:  # whatever fails here takes nothing from what was measured
            reason = f"{type(error).__name__}: {error}"
            say(f"tracker: {one.experiment.name} is not, or not wholly, logged ({reason})", error=True)


def log_study(kind: str, study: Study) -> None:
    """Log the comparisons, answer and figure of a study, if it has records; the same ones are the same experiment."""
    if not study.records:
        return
    rows = [row for row in comparisons(study) if row.role != "note"]  # which has no configuration of its own
    if len({row.family for row in rows}) > 1:
        rows = [replace(row, label=f"{row.family}/{row.label}") for row in rows]
    shown, last = answer(study), study.records[-1]
    sets = "\n".join(sorted({f"{r.experiment} {r.set_id}" for r in study.records}))
    key, archives = sha256(sets.encode()).hexdigest()[:32], (study.output_dir / LEDGER).parent / "comet"
    with private_folder() as place:
        save(shown.figure(), picture := Path(place, f"{study.experiment}.png"))
        to = tracking.Tracker(kind, archives, key, name=study.experiment, say=partial(say, error=True))
        base = tracking.settings(next((r.config for r in rows if r.role == "baseline"), last.config))
        own = {f"{r.label}/{k}": v for r in rows for k, v in tracking.settings(r.config).items() if base[k] != v}
        to.call("log_parameters", base | own)
        said = {"question": shown.finding.question, "answer": shown.finding.headline}
        to.call("log_others", tracking.environment(last.environment) | said)
        for r in rows:
            values = {"ratio": r.ratio.value, "low": r.ratio.low, "high": r.ratio.high}
            values |= {name: float(getattr(r, name)) for name in (TRACKED if r.sets else TRACKED[2:])}
            to.metrics({f"{r.label}/{name}": value for name, value in values.items()})
            words = ("role", "status", "verdict", "quality")
            to.call("log_others", {f"{r.label}/{name}": getattr(r, name) for name in words})
        to.call("log_image", str(picture), name=study.experiment)
        to.close()


# --- compare ---------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    tracker, against = tracker_chosen(options.tracker), options.against
    shares = {name: percent(text, f"--{name}") for name, text in given(options, "threshold", "resolution").items()}
    threshold = shares.get("threshold", 0.0 if options.gate else None)
    wanted = shares.get("resolution", threshold or RESOLUTION)
    _check_sides(options, gated=threshold is not None)
    decides = against is not None or threshold is not None
    place = vars(options).get("markdown", os.environ.get("GITHUB_STEP_SUMMARY") or os.devnull)
    if path := expanded(place) if decides else None:
        with writing(path, option="--markdown, or $GITHUB_STEP_SUMMARY"):
            path.open("a").close()
    how = given(options, "minutes", "sets", "cores", "device", "output_dir", "per_step", "optimizer", "as_is")
    how["resolution"] = wanted
    if against is None:
        measured: Any = comparison.measure(options.baseline, options.candidate, **how)
    else:
        threshold = wanted if threshold is None else threshold
        measured = gate.compare_revisions(options.baseline, against, **how)
    values: dict[str, Any]
    if isinstance(measured, gate.Outcome):  # code that is the same
        code, lines, page = 0, [measured.sentence], f"### {measured.status}\n\n{table.literal(measured.sentence)}.\n"
        values = {"verdict": measured.status, "gate": {**asdict(measured), "exit_code": code}}
    else:
        found = comparison.answer(measured)
        values, lines, code, page = found.as_dict(), [str(found)], int(not found.complete), ""
        if threshold is not None:
            judged = gate.outcome(found.answer, threshold)
            code, page = judged.exit_code(strict=bool(options.strict)), gate.summary(found.answer, judged)
            said = {**asdict(judged), "threshold": threshold, "exit_code": code}
            values, lines = {**values, "gate": said}, [*lines, judged.sentence]
    tell(options, values, lines)
    if page and path:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(page)
        except OSError as error:  # the decision stands
            say(f"the decision was not written to {path}: {error.strerror}", error=True)
    _track(tracker, () if isinstance(measured, gate.Outcome) else [measured])
    return code


def _check_sides(options: argparse.Namespace, *, gated: bool) -> None:
    """Raise ConfigError where the options do not go together."""
    against, candidate = options.against, options.candidate
    if against is None and not candidate:
        raise ConfigError("compare needs two sides: name A and B, or one and --against a revision; see --help")
    if against is not None and candidate:
        raise ConfigError(f"--against {against} takes one step, the same on both sides: leave out {candidate}")
    if given(options, "per_step", "optimizer", "as_is") and not scripts.is_command(options.baseline):
        raise ConfigError("--per-step, --optimizer and --as-is are about command lines, such as 'python train.py'")
    if not gated and against is None and (options.strict or "markdown" in options):
        raise ConfigError("--strict and --markdown are about a decision: give --against, --gate or --threshold too")


# --- strategy --------------------------------------------------------------------------------------------------------


def strategy(options: argparse.Namespace, names: Sequence[str]) -> int:
    asks = ("network", "parameters", "global_batch_size", "device", "output_dir")
    if len(names) > 1:
        raise ConfigError(f"{STRATEGY} weighs what multi_gpu measured, and measures nothing: ask it alone")
    refuse_others(options, "experiments", "json", *asks, why=f"{STRATEGY} weighs what multi_gpu measured")
    if options.network and options.parameters:
        raise ConfigError("--network and --parameters both say what is trained: give one of them")
    batch = {} if options.global_batch_size is None else {"batch_size": options.global_batch_size}
    found = multi_gpu.strategy(**given(options, "network", "parameters", "device", "output_dir"), **batch)
    carried = {"--device": options.device, "--output-dir": options.output_dir}
    words = [f"{name} {shlex.quote(value)}" for name, value in carried.items() if value]
    way_out = " ".join([found.way_out(), *words]) if found.way_out() else ""
    lines = [found.sentence(), *([f"to measure it: {way_out}"] if way_out else [])]
    tell(options, [{"experiment": STRATEGY, **table.values(asdict(found))}], lines)
    return 0


# --- recommend --------------------------------------------------------------------------------------------------------


def recommend(options: argparse.Namespace) -> int:
    settings = {"minutes": MINUTES.get(options.preset or "quick")} | asked(options)
    settings |= given(options, "seeds", "images", "cores")
    only: dict[str, list[str]] = {}
    for text in options.only or ():
        name, _, values = text.partition("=")
        if not values:
            raise ConfigError(f"--only is {text!r}: give a setting and its values, such as precision=fp32,bf16")
        only[name.strip()] = only.get(name.strip(), []) + [value.strip() for value in values.split(",")]
    try:
        found = experiments.recommendation(global_batch_size=options.global_batch_size, only=only, **settings)
    except ModuleNotFoundError as missing:
        say(f"measured; {missing.name} is not installed here: take the ledger elsewhere, ddpm-lab figures --ledger")
        return 0
    study, said, path = found.study, found.finding, found.settings
    names = ("headline", "verdict", "status", "claim", "way_out", "sets", "ratio", "low", "high", "quality")
    fields = table.values({name: getattr(said, name) for name in names} | {"settings": path and str(path)})
    lines = [table.plain(found.table()), said.claim, *([f"to answer it: {said.way_out}"] if said.way_out else [])]
    if not options.json:
        image = study.output_dir / "image_output" / f"{found.file}.png"
        save(found.figure(), image)
        lines.append(f"figure: {image}")
        if options.workload is None:  # a file is for ddpm-lab train
            none = "none written, for want of an answer or beside those of another training"
            lines.append(f"settings: {path or none}")
            lines += [f"  {path.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}"] if path else []
    tell(options, fields, lines)
    return 0 if study.records else 1


# --- bottleneck -------------------------------------------------------------------------------------------------------


def bottleneck_report(study: Study) -> dict[str, Any]:
    """What limits a step and what to change, as values; ``reports/`` gets a report, if there is a time budget."""
    output = study.output_dir
    lines, about = bottleneck.summary(study), bottleneck.subject(study)
    if about is None:
        return {"headline": lines[0], "finding": ""}
    pictures, changed = [], tuple(r for r in study.records if r.experiment == "bottleneck" and r.role != "profile")
    for name, records in {"profile": (about.profile,), "bottleneck": changed}.items():
        if records:
            part = answer(replace(study, experiment=name, records=records))
            picture = output / "reports" / f"{bottleneck.REPORT}_{name}.png"
            save(part.figure(), picture)
            pictures.append((part.finding.headline, picture.name))
    report = bottleneck.write(study, output / "reports", pictures)
    advice = [table.values(asdict(a)) for a in bottleneck.advice(study)]
    values = {"headline": lines[0], "finding": "\n".join(lines), "advice": advice, "report": str(report)}
    return {**values, "page": str(report.with_suffix(".html"))}


def _plan_bottleneck(settings: dict[str, Any]) -> Campaign:
    """The question of what limits a step, ready to be measured."""
    check_room(output_folder(settings.get("output_dir")) / "reports")
    planned = planning.plan_question("bottleneck", **settings)
    if math.isinf(seconds := planned.target.seconds):
        return planned
    return planned.renewed(bottleneck.fitting(planned.experiment, seconds, planned.held))


def bottleneck_study(measured: Campaign) -> Study:
    """Every record of the lab's own trainer on this machine."""
    mine = experiments.study_of(measured)
    records = experiments.of_training(distinct(measured.ledger.read()[0]), None)
    every = study(records, RECOMMENDATION, machine=measured.cohort[0], output_dir=measured.output)
    others = (r for r in every.records if r.experiment != mine.experiment)
    fields = {name: getattr(mine, name) for name in ("resolution", "published_trials", "unasked")}
    return replace(every, records=(*others, *mine.records), **fields)


COMMANDS = {
    "run": Command(
        run,
        "run amp --preset smoke --data path/to/images",
        f"experiments {COMMON} device image_size sets cores resolution seed oversubscribe tracker json",
        more=_add_options_of_questions,
    ),
    "compare": Command(
        compare,
        "compare mine:before mine:after --resolution 2%",
        "baseline candidate against per-step optimizer as-is resolution minutes sets cores device output-dir "
        "tracker gate threshold strict markdown json",
        {
            "resolution": "smallest difference to be found, such as 2% (default: the threshold, or 3%)",
            "sets": "the most sets to measure (default: 100)",
            "markdown": "append the decision as Markdown (default: $GITHUB_STEP_SUMMARY, if any)",
        },
    ),
    "recommend": Command(
        recommend,
        "recommend --minutes 10",
        "preset minutes data held-out skip-bad network workload device image_size global_batch_size sets cores "
        "resolution only output-dir json",
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
        },
        more=lambda parser, _: declared.add_options(
            parser, [declared.options(experiments.recommend)[name] for name in ("seeds", "images")]
        ),
    ),
}
