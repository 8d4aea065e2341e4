"""Commands without a module of their own, from their options to an exit code; they load what they need."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.cli.options import given, tell
from ddpm_lab.files import expanded, ledgers, output_folder


def check(options: argparse.Namespace) -> int:
    """Say what this machine has, or how finely it measures."""
    if options.instrument:
        return _instrument(options)
    from ddpm_lab.cli.checkup import checkup  # noqa: PLC0415 - commands load what they need

    items = checkup(output_folder(options.output_dir))
    runnable = all(item.present for item in items if item.needed)
    lines = []
    for item in items:
        mark = "ok     " if item.present else "MISSING" if item.needed else "absent "
        lines.append(f"{mark}  {item.name}: {item.detail}" + ("" if item.present else f"; {item.adds}"))
    lines.append("The lab can run here." if runnable else "The lab cannot run here: see what is MISSING above.")
    tell(options, {"can_run": runnable, "items": [dataclasses.asdict(i) for i in items]}, lines)
    return 0 if runnable else 1


def _instrument(options: argparse.Namespace) -> int:
    """Check the instrument, twice if it fails once."""
    from ddpm_lab.questions import calibrate as calibration  # noqa: PLC0415

    output = output_folder(options.output_dir)
    for attempt in (1, 2):
        records = calibration.calibrate(minutes=options.minutes, device=options.device, output_dir=output)
        found = calibration.calibration(records)
        if found is None or found.passed or found.sets < calibration.LEAST_SETS:
            break
        if attempt == 1:
            print(f"{found.verdict()}: the check is repeated once", file=sys.stderr)
    if found is None:
        print("ddpm-lab: no set of the calibration was completed", file=sys.stderr)
        return 1
    figure = calibration.save_figure(found, output)
    tell(options, {**found.as_dict(), "figure": str(figure)}, [*calibration.lines(found), f"figure: {figure}"])
    return 0 if found.passed else 1


def prepare(options: argparse.Namespace) -> int:
    """Decode images once."""
    from ddpm_lab.data.packed import prepare  # noqa: PLC0415

    manifest = prepare(
        options.source,
        expanded(options.dest),
        progress=lambda line: print(line, file=sys.stderr),
        **given(options, "image_size", "held_out", "skip_bad"),
    )
    if options.json:
        print(manifest.to_json(), end="")
    else:
        print(f"{options.dest}: {manifest.describe()}")
        for line in manifest.skipped:
            print(f"left out: {line}")
    return 0


MANY_HOSTS = ("run", "train", "sample")
"""Commands that start ranks as they are told how many."""


def rank(options: argparse.Namespace, main: Callable[[Sequence[str]], int]) -> int:
    """Lead the processes that torchrun has started through a command, or serve the one that does."""
    from ddpm_lab.measure import cluster  # noqa: PLC0415

    choice("the command after rank", next(iter(options.words), None), MANY_HOSTS)
    if {"-h", "--help"} & set(options.words):
        return main(options.words)
    if misplaced := next((word for word in options.words if word.partition("=")[0] == "--interface"), None):
        raise ConfigError(
            f"{misplaced} is an option of rank, not of {options.words[0]}: give it before the command, "
            f"as in rank --interface lo {options.words[0]}"
        )
    process = cluster.Process.read(os.environ)
    process.use(options.interface)
    if process.rank:
        return cluster.serve(process)
    with cluster.leading(process):
        return main(options.words)


def report(options: argparse.Namespace) -> int:
    """Execute the notebooks."""
    from ddpm_lab.reports.report import report  # noqa: PLC0415

    parameters = {name: _literal(value) for name, value in options.parameter or ()}
    if options.skip_bad:
        parameters["skip_bad"] = True
    settings = given(options, "preset", "data", "held_out", "network", "workload", "minutes", "output_dir")
    return report(notebooks=options.notebook, parameters=parameters, **settings).exit_code


_PYTHON = {"True": True, "False": False, "None": None}


def _literal(text: str) -> Any:
    """A parameter's value as JSON where it is JSON, or as Python writes such a value, else as it was typed."""
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def figures(options: argparse.Namespace) -> int:
    """Rebuild, publish or check figures."""
    from ddpm_lab.reports import published  # noqa: PLC0415

    output = output_folder(options.output_dir)
    if options.check:
        problems = published.check(output)
        for problem in problems:
            print(f"ddpm-lab: {problem}", file=sys.stderr)
        if not problems:
            print("every published figure matches the published records")
        return 1 if problems else 0
    files = ledgers(options.ledger, output)
    if options.publish:
        found = published.publish(files, options.machine, output)
    else:
        found = published.rebuild(files, options.machine, output, options.bands)
    rows = [{"figure": str(path), **dataclasses.asdict(finding), "claim": finding.claim} for path, finding in found]
    tell(options, rows, (f"{finding.experiment}: {finding.claim}\n  {path}" for path, finding in found))
    return 0
