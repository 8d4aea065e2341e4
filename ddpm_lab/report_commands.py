"""Commands whose results are made to be shared, from their options to an exit code: benchmark, demo, summary, diff."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import NETWORKS, RunConfig
from ddpm_lab.files import LEDGER, expanded, ledgers, output_folder, writing
from ddpm_lab.ledger import read_all
from ddpm_lab.options import add, given
from ddpm_lab.run_folder import SETTINGS
from ddpm_lab.settings_file import configuration, read_settings

if TYPE_CHECKING:
    from ddpm_lab.explain.differences import Run
    from ddpm_lab.explain.frames import Study

DEMO: dict[str, Any] = {"batch_size": 8, "batch_sizes": [16], "minutes": 0.85, "preset": "smoke"}


def add_options(subparsers: Any) -> None:
    """Add the commands to the command line."""
    benchmark = subparsers.add_parser("benchmark", help="one GPU against several: report, figures, tables, JSON, CSV")
    benchmark.add_argument(
        "--batch-size", "--batch_size", type=int, default=32, help="images a step of each GPU or rank (default: 32)"
    )
    benchmark.add_argument(
        *("--batch-sizes", "--batch_sizes"),
        nargs="+",
        metavar="N",
        help="batches that GPUs or ranks share (default: those of 16 32 64 128 that they can share)",
    )
    benchmark.add_argument(
        *("--num-workers", "--num_workers"),
        type=int,
        help="loader workers of each GPU or rank, which decode files (default: images packed beforehand, no workers)",
    )
    benchmark.add_argument(
        *("--model", "--network"), choices=NETWORKS, dest="network", help="default: seed on a GPU, tiny on a CPU"
    )
    add(
        benchmark,
        "mode",
        help="one GPU or rank; insist on several beside it; or several unless `ddpm-lab strategy` says single "
        "(default: several where there are any)",
    )
    benchmark.add_argument("--runs", type=int, default=6, help="sets, each of fresh processes (default: 6)")
    benchmark.add_argument(
        *("--skip-single", "--skip_single", "--skip-single-gpu", "--skip_single_gpu"),
        action="store_true",
        help="several alone, and so no speed-up",
    )
    benchmark.add_argument(
        *("--skip-multi", "--skip_multi", "--skip-multi-gpu", "--skip_multi_gpu"),
        action="store_true",
        help="one alone, as --mode single",
    )
    add(benchmark, "data", help="images: a folder, an archive, or synthetic (default)")
    add(benchmark, "device", "minutes")
    add(benchmark, "ledger", help="measure nothing: write the folder from these")
    add(benchmark, "machine", help="with --ledger: whose records")
    _results(benchmark)
    benchmark.set_defaults(command=benchmark_command)

    demo = subparsers.add_parser("demo", help="a benchmark of a minute, to see what it gives")
    _results(demo)
    demo.set_defaults(command=demo_command)

    summary = subparsers.add_parser("summary", help="runs as a table, with speed-ups: records, run folders, job logs")
    summary.add_argument(
        *("sources",),
        nargs="*",
        metavar="SOURCE",
        help="ledgers (.jsonl), folders of `train`, output files of jobs (default: your own ledger)",
    )
    add(summary, "machine", help="whose records of a ledger: a name, a part of it, or a key")
    summary.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    summary.add_argument("--markdown", metavar="FILE", help="write table and speed-ups as Markdown")
    add(summary, "json")
    summary.set_defaults(command=summary_command)

    diff = subparsers.add_parser("diff", help="which settings of two runs differ, and whether only those that should")
    for name in ("a", "b"):
        diff.add_argument(
            name,
            metavar=name.upper(),
            help="a run id, a set and label (SET:LABEL), a folder of `train`, or a TOML file of settings",
        )
    diff.add_argument(
        "--only", metavar="NAMES", help="settings that may differ, with commas between: exit 1 if more do"
    )
    add(diff, "ledger", help="records to look in (default: your own ledger)")
    add(diff, "json")
    diff.set_defaults(command=diff_command)


def _results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--output-dir", "--output_dir"), help="folder of the results; the same one goes on (default: a new one here)"
    )
    add(parser, "json", help="print benchmark_results.json and nothing else")


# --- benchmark -------------------------------------------------------------------------------------------------------


def demo_command(options: argparse.Namespace) -> int:
    """A benchmark that fits into a minute: the smallest network, short sets."""
    return _benchmark(options, {"network": "tiny", **DEMO})


def benchmark_command(options: argparse.Namespace) -> int:
    """Measure what is missing and write the folder; 1 where nothing was measured or several GPUs cannot be."""
    asked = {
        "loader_workers": options.num_workers,
        "sets": options.runs,
        "batch_sizes": _numbers(options.batch_sizes),
        **given(options, "batch_size", "network", "mode", "device", "minutes", "data", "skip_single", "skip_multi"),
    }
    if options.machine and not options.ledger:
        raise ConfigError("--machine is for --ledger: without it this machine is measured")
    return _benchmark(options, asked, options.ledger)


def _numbers(words: Sequence[str] | None) -> list[int] | None:
    if words is None:
        return None
    found = [word for text in words for word in text.replace(",", " ").split()]
    if not found or not all(word.isdecimal() for word in found):
        raise ConfigError(f"--batch-sizes is {' '.join(words)!r}: give whole numbers, such as 16 32 64")
    return [int(word) for word in found]


def _benchmark(options: argparse.Namespace, asked: dict[str, Any], ledger: Sequence[str] | None = None) -> int:
    from ddpm_lab import benchmark, experiments  # noqa: PLC0415 - commands load what they need

    folder = expanded(options.output_dir or f"benchmark_results_{datetime.now():%Y%m%d_%H%M%S}").absolute()
    if ledger:
        study = experiments.run("multi_gpu", ledger=ledger, machine=options.machine)
        return _write(study, folder, ", ".join(ledger), as_json=options.json)
    planned = benchmark.plan(benchmark.request(**asked), folder)
    budgets = [one.campaign.target.seconds for one in planned]
    seconds = sum(min(one.campaign.forecast(), most or math.inf) for one, most in zip(planned, budgets, strict=True))
    again = f"the same command with --output-dir {shlex.quote(str(folder))} goes on"
    print(f"results go to {folder}; about {max(1, round(seconds / 60))} min; stopped, {again}", file=sys.stderr)
    try:
        measured = benchmark.measure(planned)
    except KeyboardInterrupt as ended:
        print(f"\nddpm-lab: stopped; every complete set is kept, and {again}", file=sys.stderr)
        return 128 + getattr(ended, "number", signal.SIGINT)
    try:
        study = experiments.study_of(measured)
    except ModuleNotFoundError as missing:
        print(f"measured; {missing.name} is not installed here: take {measured.ledger} to a machine with it, and there")
        print("ddpm-lab benchmark --ledger ledger.jsonl writes the report, the figures and the tables")
        return 0 if measured.completed else 1
    return _write(study, folder, str(LEDGER), as_json=options.json)


def _write(study: Study, folder: Path, ledger: str, *, as_json: bool) -> int:
    """Write the folder and print the summary and the banner; 1 where there is nothing to tell."""
    from ddpm_lab.explain import benchmark_files, pairs, summary  # noqa: PLC0415
    from ddpm_lab.explain.study_summary import of_study  # noqa: PLC0415

    found = pairs.pairs(study)
    measured = any(row.sets for pair in found for row in pair.sides)
    if not study.records:
        print(f"ddpm-lab: {ledger} holds no records of one GPU or rank beside several", file=sys.stderr)
        return 1
    with writing(folder):
        written = benchmark_files.write(study, folder, ledger)
    if as_json:
        print((folder / f"{benchmark_files.RESULTS}.json").read_text(), end="")
        return 0 if measured else 1
    runs, gains = of_study(study, ledger)
    summary.show(runs, [gains])
    print("", "=" * 60, *pairs.banner(study), f"Results saved to: {folder}", "=" * 60, sep="\n")
    print(*(f"  {path.name}" for path in written), sep="\n")
    return 0 if measured else 1


# --- summary ---------------------------------------------------------------------------------------------------------


def summary_command(options: argparse.Namespace) -> int:
    """Print the table and the speed-ups of runs, wherever they are told of; 1 where none is."""
    from ddpm_lab.explain import summary  # noqa: PLC0415
    from ddpm_lab.slurm import read_log  # noqa: PLC0415

    told: list[summary.Row] = []
    apart: list[summary.Row] = []
    found: list[summary.SpeedUps] = []
    for path in map(Path, options.sources or [str(output_folder(None) / LEDGER)]):
        source = expanded(path)
        if source.suffix == ".jsonl":
            from ddpm_lab.experiments import run  # noqa: PLC0415
            from ddpm_lab.explain.study_summary import of_study  # noqa: PLC0415

            runs, gains = of_study(run("multi_gpu", ledger=source, machine=options.machine), str(path))
            told, found = [*told, *runs], [*found, gains]
        else:
            apart += [_run_of(source)] if source.is_dir() else read_log(source)
    if apart:
        found.append(summary.speed_ups(apart))
    rows = [*told, *apart]
    summary.show(rows, found, csv=options.csv, to_markdown=options.markdown, as_json=options.json)
    if not any(row.found for row in rows):
        print("ddpm-lab: nothing tells of a run with one GPU or rank, or several", file=sys.stderr)
        return 1
    return 0


def _run_of(folder: Path) -> Any:
    """The run in a folder of ``train``."""
    from ddpm_lab import summary_lines  # noqa: PLC0415
    from ddpm_lab.explain.summary import Row  # noqa: PLC0415

    told = summary_lines.of_training(_settings(folder, "SOURCE")[0], folder, None)
    return Row(log=str(folder), summary=dataclasses.replace(told, job_id=None))  # which job it was, nobody has noted


# --- diff ------------------------------------------------------------------------------------------------------------


def diff_command(options: argparse.Namespace) -> int:
    """Print what differs; 1 if more does than --only allows."""
    from ddpm_lab.explain import differences, grids  # noqa: PLC0415

    one, other = (_run(named, place, options.ledger) for named, place in ((options.a, "A"), (options.b, "B")))
    only = None if options.only is None else [word.strip() for word in options.only.split(",") if word.strip()]
    found = differences.differences(one, other)
    wrong = differences.unexpected(found, only)
    said = differences.sentence(found, only)
    if options.json:
        rows = [{"setting": d.setting, "a": d.values[0], "b": d.values[1], "kind": d.kind} for d in found]
        names = [d.setting for d in wrong]
        print(json.dumps({"differences": rows, "unexpected": names, "sentence": said}, indent=1))
    else:
        if found:
            grids.show(differences.grid(found, one, other))
        print(said)
    return int(bool(wrong) and only is not None)


def _run(named: str, place: str, asked: Sequence[str] | None) -> Run:
    """The run that is named on the command line."""
    from ddpm_lab.explain.differences import LENGTH, Run, of_record  # noqa: PLC0415

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
    where = ", ".join(map(str, files))
    labels = dict.fromkeys(r.label for r in records if r.set_id == name)
    if labels:
        raise ConfigError(f"{place} is {named!r}: the set has {', '.join(labels)}; give {name}:LABEL with one of them")
    raise ConfigError(
        f"{place} is {named!r}, which is no run id or set in {where}, no folder and no .toml file: give one of these"
    )


def _settings(path: Path, place: str) -> tuple[RunConfig, Any]:
    """The settings in a file, or of a run's folder, and how many steps it trains (None: it does not say)."""
    file = path / SETTINGS if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ConfigError(f"{place}: {path} holds no {SETTINGS}: give a folder of ddpm-lab train")
    values = read_settings(file, place)
    length = values.pop("train", None)
    return configuration(values, f"{place} ({file})"), length.get("steps") if isinstance(length, dict) else None
