"""Commands whose results are made to be shared, from their options to an exit code: benchmark and summary."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError, missing_to_explain
from ddpm_lab.cli.options import add, given
from ddpm_lab.config import RunConfig
from ddpm_lab.files import LEDGER, PREPARED, expanded, ledgers, output_folder, writing
from ddpm_lab.ledger import read_all
from ddpm_lab.settings_file import configuration, read_settings
from ddpm_lab.training.run_folder import SETTINGS

if TYPE_CHECKING:
    from ddpm_lab.questions.planned import Planned
    from ddpm_lab.reports.summary import Run

BATCH_SIZES = (16, 32, 64, 128)
"""Batches that the devices share, unless others are given; the first one is that of each device too (weak scaling)."""


def add_options(subparsers: Any) -> None:
    """Add the commands to the command line."""
    benchmark = subparsers.add_parser("benchmark", help="one GPU against several: report, figures, tables, JSON, CSV")
    add(benchmark, "network", help="default: seed on a GPU, tiny on a CPU")
    benchmark.add_argument(
        "--batch-sizes", type=_numbers, metavar="N,N", help="images of a step (default: those of 16,32,64,128 that fit)"
    )
    benchmark.add_argument("--loader-workers", type=int, help="of each rank, to decode files (default: packed images)")
    benchmark.add_argument(
        "--ranks",
        choices=("single", "multi", "auto"),
        help="one GPU or rank alone, several alone, or several beside one only where `ddpm-lab strategy` does not say "
        "single (default: one beside several)",
    )
    add(benchmark, "preset", "minutes", "sets", "data", "held-out", "device", "seed")
    add(benchmark, "ledger", help="measure nothing: write the folder from these records")
    add(benchmark, "machine", help="with --ledger: whose records")
    add(benchmark, "output-dir", help="folder of the results; the same one goes on (default: a new one here)")
    add(benchmark, "json", help="print benchmark_results.json and nothing else")
    benchmark.set_defaults(command=benchmark_command)

    summary = subparsers.add_parser("summary", help="runs as a table with speed-ups; of two runs, what differs")
    summary.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="ledgers (.jsonl), folders of `train`, logs of jobs (default: your own ledger); or two runs: folders, "
        "TOML files, run ids, SET:LABEL",
    )
    summary.add_argument("--only", metavar="NAMES", help="settings of two runs that may differ: exit 1 if others do")
    add(summary, "ledger", help="records that hold the run ids (default: your own ledger)")
    add(summary, "machine", help="whose records of a ledger: a name, a part of it, or a key")
    summary.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    summary.add_argument("--markdown", metavar="FILE", help="write table and speed-ups as Markdown")
    add(summary, "json")
    summary.set_defaults(command=summary_command)


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers, such as 16,32") from None


# --- benchmark -------------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace, folder: Path) -> list[Planned]:
    """What is to be measured, checked before the first of it starts.

    Raises ConfigError, or NoRanksError where several devices are asked for and there is one.
    """
    from ddpm_lab.questions.planning import plan_question  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.questions.strategy import USUAL, NoRanksError, most_ranks, several_ranks, strategy  # noqa: PLC0415
    from ddpm_lab.training.setting import usual_device  # noqa: PLC0415

    device = usual_device(options.device)
    network = options.network or USUAL[device][0]
    most, have = most_ranks(device)
    if options.ranks == "multi" and most < 2:
        raise NoRanksError(f"--ranks multi needs two ranks, and {have}: use --ranks single")
    ranks = 1 if options.ranks == "single" or most < 2 else several_ranks(device)
    fit = [b for b in BATCH_SIZES if b % ranks == 0] or [32 * ranks]
    usual = fit[:1] if options.preset == "smoke" else fit
    batches = options.batch_sizes or usual
    alone = []
    if options.ranks == "auto" and ranks > 1:
        answers = [strategy(network=network, batch_size=batch, device=device) for batch in batches]
        print(*(f"--ranks auto: {answer.sentence()}" for answer in answers), sep="\n", file=sys.stderr)
        alone = [batch for batch, answer in zip(batches, answers, strict=True) if answer.answer == "single"]
    sizes = {"single": [1], "multi": [ranks]}.get(options.ranks, sorted({1, ranks}))
    parts = (([b for b in batches if b not in alone], sizes), (alone, [1]))
    settings = given(options, "preset", "sets", "data", "held_out", "seed", "loader_workers")
    return [
        plan_question(
            "multi_gpu",
            **settings,
            global_batch_sizes=sorted(mine),
            world_sizes=world_sizes,
            alone=options.ranks == "multi",
            lost_scaling=False,
            minutes=options.minutes and options.minutes * len(mine) / len(batches),
            network=network,
            device=device,
            output_dir=folder,
            cache=output_folder(None) / PREPARED,  # one for all folders of results
        )
        for mine, world_sizes in parts
        if mine
    ]


def benchmark_command(options: argparse.Namespace) -> int:
    """Measure what is missing and write the folder; 1 where nothing was measured or several GPUs cannot be."""
    from ddpm_lab.measure import hardware  # noqa: PLC0415
    from ddpm_lab.questions import experiments  # noqa: PLC0415

    if options.machine and not options.ledger:
        raise ConfigError("--machine is for --ledger: without it this machine is measured")
    folder = expanded(options.output_dir or f"benchmark_results_{datetime.now():%Y%m%d_%H%M%S}").absolute()
    source, machine = options.ledger or folder / LEDGER, options.machine
    if not options.ledger:
        planned = plan(options, folder)
        minutes = options.minutes or max(1, round(sum(one.campaign.forecast() for one in planned) / 60))
        again = f"the same command with --output-dir {shlex.quote(str(folder))} goes on"
        print(f"results go to {folder}; about {minutes:g} min; stopped, {again}", file=sys.stderr)
        for one in planned:
            one.measure()
        machine = hardware.machine().key
    if missing := missing_to_explain():
        print(f"measured; {missing} is not installed here: take {source} to a machine with it, and there")
        print("ddpm-lab benchmark --ledger ledger.jsonl writes the report, the figures and the tables")
        return 0
    from ddpm_lab.explain import grids  # noqa: PLC0415
    from ddpm_lab.questions.answers import answer  # noqa: PLC0415
    from ddpm_lab.reports import benchmark  # noqa: PLC0415

    study = experiments.run("multi_gpu", ledger=source, machine=machine).study
    found = benchmark.rows(study)
    if not found:
        print(f"ddpm-lab: {source} holds no records of one GPU or rank beside several", file=sys.stderr)
        return 1
    with writing(folder):
        written = benchmark.write(study, folder)
    if options.json:
        print((folder / f"{benchmark.RESULTS}.json").read_text(), end="")
    else:
        grids.show(benchmark.comparison(study))
        print("", answer(study).finding.claim, *written, sep="\n")
    return 0 if any(row.sets for row in found) else 1


# --- summary ---------------------------------------------------------------------------------------------------------


def summary_command(options: argparse.Namespace) -> int:
    """Print the table and the speed-ups of runs, or how two of them differ.

    1 where there is no run, or where more differs than ``--only`` allows.
    """
    sources = [expanded(source) for source in options.sources or [str(output_folder(None) / LEDGER)]]
    if options.only is not None or (len(sources) == 2 and all(_is_run(source) for source in sources)):
        return _difference(options)
    from ddpm_lab.reports import summary  # noqa: PLC0415

    paired: list[summary.Row] = []
    apart: list[summary.Row] = []
    found: list[summary.SpeedUps] = []
    for source in sources:
        if source.suffix == ".jsonl":
            from ddpm_lab.questions.experiments import run  # noqa: PLC0415
            from ddpm_lab.reports.benchmark import summary_of  # noqa: PLC0415

            runs, gains = summary_of(run("multi_gpu", ledger=source, machine=options.machine).study, str(source))
            paired, found = [*paired, *runs], [*found, gains]
        else:
            apart += _rows(source)
    if apart:
        found.append(summary.speed_ups(apart))
    rows = [*paired, *apart]
    summary.show(rows, found, csv=options.csv, markdown=options.markdown, as_json=options.json)
    if not any(row.found for row in rows):
        print("ddpm-lab: there is no run of one GPU or rank, or several", file=sys.stderr)
        return 1
    return 0


def _is_run(source: Path) -> bool:
    """Whether a source names one run, and neither a ledger nor a log."""
    return source.is_dir() or source.suffix == ".toml" or not (source.exists() or source.suffix)


def _rows(source: Path) -> list[Any]:
    """The runs in a log, or the one in a folder of ``train``."""
    from ddpm_lab.reports import slurm, summary_lines  # noqa: PLC0415
    from ddpm_lab.reports.summary import Row  # noqa: PLC0415

    if not source.is_dir():
        return slurm.read_log(source)
    run = summary_lines.of_training(_settings(source, "SOURCE")[0], source, None)
    return [Row(log=str(source), summary=dataclasses.replace(run, job_id=None))]  # of which job nobody has noted


def _difference(options: argparse.Namespace) -> int:
    """Print in which settings two runs differ; of two folders, their table first."""
    from ddpm_lab.reports import summary  # noqa: PLC0415

    if len(options.sources) != 2:
        raise ConfigError(f"--only compares two runs, and {len(options.sources)} are given")
    one, other = (_run(source, place, options.ledger) for source, place in zip(options.sources, "AB", strict=True))
    only = None if options.only is None else [word.strip() for word in options.only.split(",") if word.strip()]
    found = summary.differences(one, other)
    wrong = summary.unexpected(found, only)
    folders = [path for path in map(expanded, options.sources) if path.is_dir()]
    if options.json:
        print(json.dumps({"differences": found, "unexpected": wrong}, indent=1))
    else:
        if len(folders) == 2:
            rows = [row for folder in folders for row in _rows(folder)]
            summary.show(rows, [summary.speed_ups(rows)], csv=options.csv, markdown=options.markdown)
            print()
        print(*summary.difference_lines(one, other, only), sep="\n")
    return int(bool(wrong) and only is not None)


def _run(named: str, place: str, asked: Sequence[str] | None) -> Run:
    """The run that is named on the command line."""
    from ddpm_lab.reports.summary import LENGTH, Run, of_record  # noqa: PLC0415

    path = expanded(named)
    if path.is_dir() or path.suffix == ".toml":
        config, steps = _settings(path, place)
        return Run(name=named, config=config, circumstances={} if steps is None else {LENGTH: steps})
    files = ledgers(asked, output_folder(None))
    name, _, label = named.partition(":")
    records, _ = read_all([f for f in files if asked or f.exists()])
    fits = [r for r in records if (r.set_id == name and r.label == label if label else r.run_id == name)]
    if fits:
        return of_record(named, fits[-1])
    if labels := dict.fromkeys(r.label for r in records if r.set_id == name):
        raise ConfigError(f"{place} is {named!r}: the set has {', '.join(labels)}; give {name}:LABEL with one of them")
    where = ", ".join(map(str, files))
    raise ConfigError(f"{place} is {named!r}: no run id or set in {where}, no folder and no .toml file; give one")


def _settings(path: Path, place: str) -> tuple[RunConfig, Any]:
    """The settings in a file, or of a run's folder, and how many steps it trains (None: it does not say)."""
    file = path / SETTINGS if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ConfigError(f"{place}: {path} holds no {SETTINGS}: give a folder of ddpm-lab train")
    values = read_settings(file, place)
    length = values.pop("train", None)
    return configuration(values, f"{place} ({file})"), length.get("steps") if isinstance(length, dict) else None
