"""Commands whose results are made to be shared: ``report``, ``figures``, ``benchmark``, ``summary``, ``collect``."""

import argparse
import ast
import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, missing_to_explain
from ddpm_lab.cli.options import COMMON, Command, asked, given, refuse_others, tell
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import table
from ddpm_lab.files import LEDGER, PREPARED, configuration, expanded, ledgers, output_folder, read_settings
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.output import say
from ddpm_lab.questions import experiments
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.multi_gpu import USUAL, several_ranks, strategy
from ddpm_lab.questions.planning import plan_question
from ddpm_lab.reports import summary as runs
from ddpm_lab.training.run_folder import SETTINGS
from ddpm_lab.training.setting import usual_device

BATCH_SIZES = (16, 32, 64, 128)
"""Batches that the devices share, unless others are given; the first one is that of each device too (weak scaling)."""


# --- report, figures -------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace) -> int:
    from ddpm_lab.reports.report import report as execute  # noqa: PLC0415 - needs papermill

    parameters = dict[str, Any](options.parameter or ())
    for name, value in parameters.items():
        with suppress(ValueError, SyntaxError, TypeError):  # as Python writes what JSON has too, else as it was typed
            parameters[name] = json.loads(json.dumps(ast.literal_eval(value)))
    parameters |= {"skip_bad": True} if options.skip_bad else {}
    settings = given(options, "preset", "data", "held_out", "network", "workload", "minutes", "output_dir")
    command = shlex.join(["ddpm-lab", *options.typed])
    return execute(notebooks=options.notebook, parameters=parameters, command=command, **settings).exit_code


def figures(options: argparse.Namespace) -> int:
    from ddpm_lab.reports import published  # noqa: PLC0415 - needs Matplotlib

    output = output_folder(options.output_dir)
    if options.check:
        refuse_others(options, "check", "output_dir", why="--check reads what is published")
        problems = published.check(output)
        say(*(f"ddpm-lab: {problem}" for problem in problems), error=True)
        if not problems:
            say("every published figure matches the published records")
        return 1 if problems else 0
    files = ledgers(options.ledger, output)
    if options.publish:
        if not (found := published.publish(files, options.machine, output)):
            say("the records are published, and no figure: README.md and docs show none of this machine", error=True)
    else:
        found = published.rebuild(files, options.machine, output)
    rows = [table.values({"figure": str(path), **asdict(finding), "claim": finding.claim}) for path, finding in found]
    tell(options, rows, (f"{finding.experiment}: {finding.claim}\n  {path}" for path, finding in found))
    return 0


# --- benchmark -------------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace, folder: Path) -> list[Campaign]:
    """What is to be measured, checked before the first of it starts.

    Raises ConfigError, or NoRanksError where several devices are asked for and there is one.
    """
    device = usual_device(options.device)
    network = vars(options).get("network", USUAL[device][0])
    ranks = 1 if options.ranks == "single" else several_ranks(device, needed=options.ranks == "multi")
    fit = [b for b in BATCH_SIZES if b % ranks == 0] or [32 * ranks]
    batches = options.batch_sizes or (fit[:1] if options.preset == "smoke" else fit)
    single = []
    if options.ranks == "auto" and ranks > 1:
        answers = [strategy(network=network, batch_size=batch, device=device) for batch in batches]
        say(*(f"--ranks auto: {answer.sentence()}" for answer in answers), error=True)
        single = [batch for batch, answer in zip(batches, answers, strict=True) if answer.answer == "single"]
    sizes = {"single": [1], "multi": [ranks]}.get(options.ranks, sorted({1, ranks}))
    parts = (([b for b in batches if b not in single], sizes), (single, [1]))
    settings = asked(options) | {"network": network, "device": device, "output_dir": folder, "lost_scaling": False}
    settings |= {"cache": output_folder(None) / PREPARED, "alone": options.ranks == "multi"}  # one for all folders
    settings |= given(options, "loader_workers")

    def part(mine: Sequence[int], world_sizes: Sequence[int]) -> Campaign:
        minutes = options.minutes and options.minutes * len(mine) / len(batches)
        how = {"global_batch_sizes": sorted(mine), "world_sizes": world_sizes, "minutes": minutes}
        return plan_question("multi_gpu", **settings | how)

    return [part(mine, world_sizes) for mine, world_sizes in parts if mine]


def benchmark(options: argparse.Namespace) -> int:
    """Exit code 1 where nothing was measured, or several GPUs cannot be."""
    if options.machine and not options.ledger:
        raise ConfigError("--machine is for --ledger: without it this machine is measured")
    folder = expanded(vars(options).get("output_dir", f"benchmark_results_{datetime.now():%Y%m%d_%H%M%S}")).absolute()
    source, planned = options.ledger or folder / LEDGER, list[Campaign]()
    if options.ledger:
        refuse_others(options, "ledger", "machine", "output_dir", why="--ledger reads records")
    else:
        planned = plan(options, folder)
        minutes = options.minutes or max(1, round(sum(one.forecast() for one in planned) / 60))
        again = f"the same command with --output-dir {shlex.quote(str(folder))} goes on"
        say(f"results go to {folder}; about {minutes:g} min; stopped, {again}", error=True)
        for one in planned:
            one.measure()
    if missing := missing_to_explain():
        advice = f"measured; {missing} is not installed here: take {source} to a machine with it, and there"
        say(advice, "ddpm-lab benchmark --ledger ledger.jsonl writes the report, the figures and the tables")
        return 0
    from ddpm_lab.reports import benchmark  # noqa: PLC0415 - needs Matplotlib

    if planned:
        asked = planned[-1].experiment.configurations[0]
        study = benchmark.of_last(experiments.measured_here("multi_gpu", folder, data_sha256=asked.data_sha256), asked)
    else:
        study = benchmark.of_last(experiments.run("multi_gpu", ledger=source, machine=options.machine).study)
    found = benchmark.rows(study)
    if not found:
        where = ", ".join(map(str, source)) if isinstance(source, list) else source
        say(f"ddpm-lab: {where} holds no records of one GPU or rank beside several", error=True)
        return 1
    written = benchmark.write(study, folder)
    table.show(benchmark.comparison(study))
    say("", *answer(study).finding.claim.split("\n"), *written)
    return 0 if any(row.sets for row in found) else 1


# --- summary ---------------------------------------------------------------------------------------------------------


def summary(options: argparse.Namespace) -> int:
    """Exit code 1 where there is no run, or where more differs than ``--only`` allows."""
    sources = [expanded(source) for source in options.sources or [output_folder(None) / LEDGER]]
    if options.only is not None or (len(sources) == 2 and all(s.is_dir() or s.suffix == ".toml" for s in sources)):
        return _difference(options, sources)
    rows, apart = list[runs.Summary](), list[runs.Summary]()
    for source in _once(sources):
        if source.suffix == ".jsonl":
            study = experiments.run("multi_gpu", ledger=source, machine=options.machine).study
            rows += runs.of_study(study, str(source))
        else:
            apart += [_row(source)] if source.is_dir() else runs.read_log(source)
    rows += runs.compared(apart)
    runs.show(rows, csv=options.csv, as_json=options.json)
    if not any(row.found for row in rows):
        say("ddpm-lab: no record of multi_gpu, and no log of train: ddpm-lab run multi_gpu makes some", error=True)
        return 1
    return 0


def _once(files: Sequence[Path]) -> list[Path]:
    """Each file once, also where its path is given in several ways."""
    return [*{file.resolve(): file for file in files}.values()]


def _row(folder: Path) -> runs.Summary:
    """The run in a folder of ``train``; of which job nobody has noted."""
    return replace(runs.of_training(_settings(folder)[0], folder, None), log=str(folder), job_id=None)


def _difference(options: argparse.Namespace, sources: Sequence[Path]) -> int:
    """Print the settings in which two runs differ, after a table if they are folders. Returns the exit status."""
    if len(sources) != 2:
        raise ConfigError(f"--only compares two runs, and {len(sources)} are given")
    tabled = all(source.is_dir() for source in sources) and not options.json
    if options.csv is not None and not tabled:
        raise ConfigError("--csv writes a table of runs, and none is printed here: give two folders, without --json")
    differences = runs.differences(*map(_settings, sources))
    only = [word.strip() for word in (options.only or "").split(",") if word.strip()]
    unexpected = [] if options.only is None else runs.unexpected(differences, only)
    if tabled:
        runs.show(runs.compared([*map(_row, sources)]), csv=options.csv)
        say("")
    lines = runs.difference_lines(options.sources, differences, unexpected)
    tell(options, {"differences": differences, "unexpected": unexpected}, lines)
    return int(bool(unexpected))


def _settings(path: Path) -> tuple[RunConfig, Any]:
    """The settings in a file, or of a run's folder, and how many steps it trains (None: it does not say)."""
    values = read_settings(path / SETTINGS if path.is_dir() else path, str(path))
    length = values.pop("train", None)
    return configuration(values, str(path)), length.get("steps") if isinstance(length, dict) else None


def collect(options: argparse.Namespace) -> int:
    """Exit code 1 if a log tells of no run: its job has failed, or not ended yet."""
    logs = _once([expanded(log) for log in options.logs]) or sorted(Path.cwd().glob(runs.LOGS))
    if not logs:
        raise ConfigError(f"{Path.cwd()} has no {runs.LOGS}: go where the jobs were submitted, or give their logs")
    ledger = output_folder(options.output_dir) / LEDGER
    rows = [row for log in logs for row in runs.read_log(log)]
    added = runs.append_new(logs, ledger)
    runs.show(runs.compared(rows), csv=options.csv, as_json=options.json)
    say(f"{added} new records: {ledger}", error=True)
    return int(not all(row.found for row in rows))


COMMANDS = {
    "report": Command(report, "report --preset smoke --notebook amp", f"{COMMON} notebook parameter"),
    "figures": Command(
        figures,
        "figures --ledger ledger.jsonl",
        "ledger machine output-dir publish check json",
        {
            "ledger": "records to read (default: your own ledger)",
            "output-dir": "folder that receives image_output/ (default: this checkout)",
        },
    ),
    "benchmark": Command(
        benchmark,
        "benchmark --preset smoke --batch-sizes 16,32",
        "network batch-sizes loader_workers ranks oversubscribe preset minutes sets data held-out device seed ledger "
        "machine output-dir",
        {
            "network": "seed on a GPU, tiny on a CPU",
            "ranks": "one rank alone; several alone; or several only where `run strategy` says so (default: both)",
            "output-dir": "folder of the results; the same one goes on (default: a new one here)",
        },
    ),
    "summary": Command(summary, "summary runs/first runs/second --only seed", "sources only machine csv json"),
    "collect": Command(collect, "collect --csv runs.csv", "logs output-dir csv json"),
}
