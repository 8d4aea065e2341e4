"""The command line: ``ddpm-lab`` or ``python -m ddpm_lab``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddpm_lab import __version__
from ddpm_lab.config import DEVICES, NETWORKS, PRESETS, START_METHODS, ConfigError, LabError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 1 a question that could not be answered, 2 wrong input, 130 an interrupt."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        result: int = options.command(options)
    except LabError as error:
        print(f"ddpm-lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nddpm-lab: stopped; every complete set is in the ledger, the same command goes on", file=sys.stderr)
        return 130
    return result


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, like everything else here; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ddpm-lab: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddpm-lab", description="Which settings train a diffusion model fastest here, and do they cost quality?"
    )
    parser.add_argument("--version", action="version", version=f"ddpm-lab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="what this machine has, what is missing, and what that would add")
    check.add_argument("--output-dir", help="folder that results would go to (default: this checkout)")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(command=_check)

    prepare = commands.add_parser("prepare", help="decode images once into a folder that experiments use")
    prepare.add_argument(
        "source", help="a folder of PNG or JPEG images, train.7z, cifar-10-python.tar.gz, or synthetic"
    )
    prepare.add_argument("dest", help="folder to make")
    _data_options(prepare)
    prepare.add_argument("--image-size", type=int, default=32, help="side of the images in pixels (default: 32)")
    prepare.add_argument("--json", action="store_true", help="print JSON")
    prepare.set_defaults(command=_prepare)

    run = commands.add_parser("run", help="measure what is missing for one or more experiments")
    run.add_argument(
        "experiments", nargs="+", metavar="EXPERIMENT", help="profile, multi_gpu, amp, workers or torch_compile"
    )
    _common_options(run)
    _data_options(run)
    run.add_argument("--mode", choices=("single", "multi"), help="one rank only, or at least two")
    run.add_argument("--device", choices=DEVICES, help="default: the GPU where there is one")
    run.add_argument("--batch-size", type=int, help="global batch size")
    run.add_argument("--image-size", type=int, default=32, help="side of the images in pixels (default: 32)")
    run.add_argument("--sets", type=int, help="sets per comparison (default: the preset's)")
    run.add_argument("--seed", type=int, default=0, help="seed of weights, data order and noise (default: 0)")
    run.add_argument(
        "--oversubscribe", action="store_true", help="allow more CPU ranks than cores; speed is not claimed"
    )
    run.add_argument("--start-method", choices=START_METHODS, default="forkserver", help="how ranks are started")
    run.add_argument("--json", action="store_true", help="print JSON")
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help="execute the notebooks and write their pages")
    _common_options(report)
    _data_options(report)
    report.add_argument("--notebook", action="append", metavar="NAME", help="only this notebook (may be repeated)")
    report.add_argument(
        "-p", "--parameter", action="append", nargs=2, metavar=("NAME", "VALUE"), help="a notebook parameter"
    )
    report.set_defaults(command=_report)

    figures = commands.add_parser("figures", help="rebuild figures and findings from records; needs no torch")
    figures.add_argument("--ledger", nargs="+", metavar="FILE", help="records to read (default: your own ledger)")
    figures.add_argument("--machine", metavar="NAME", help="whose records: a name, a part of it, or a key")
    figures.add_argument("--output-dir", help="folder that receives image_output/ (default: this checkout)")
    figures.add_argument("--json", action="store_true", help="print findings as JSON")
    mode = figures.add_mutually_exclusive_group()
    mode.add_argument("--publish", action="store_true", help="write these records and figures to the published folders")
    mode.add_argument("--check", action="store_true", help="compare the published figures with the published records")
    figures.set_defaults(command=_figures)
    return parser


def _common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="quick", help=f"how much is run: {', '.join(PRESETS)} (default: quick)")
    parser.add_argument("--data", default="synthetic", help="images: a folder, an archive, or synthetic (the default)")
    parser.add_argument("--network", help=f"{', '.join(NETWORKS)} (default: the preset's choice for this machine)")
    parser.add_argument("--minutes", type=float, help="time budget")
    parser.add_argument("--output-dir", help="folder that receives all results (default: this checkout)")


def _data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--held-out", metavar="FOLDER", help="images never to train on (default: 5 %% of the data)")
    parser.add_argument("--skip-bad", action="store_true", help="leave damaged images out, and list them")


def _output(options: argparse.Namespace) -> Path:
    from ddpm_lab.experiments import output_folder  # noqa: PLC0415 - commands load what they need

    return output_folder(options.output_dir)


def _check(options: argparse.Namespace) -> int:
    from ddpm_lab.checkup import checkup  # noqa: PLC0415

    items = checkup(_output(options))
    runnable = all(item.present for item in items if item.needed)
    if options.json:
        print(json.dumps({"can_run": runnable, "items": [dataclasses.asdict(i) for i in items]}, indent=1))
    else:
        for item in items:
            mark = "ok     " if item.present else "MISSING" if item.needed else "absent "
            print(f"{mark}  {item.name}: {item.detail}" + ("" if item.present else f"; {item.adds}"))
        print("The lab can run here." if runnable else "The lab cannot run here: see what is MISSING above.")
    return 0 if runnable else 1


def _prepare(options: argparse.Namespace) -> int:
    from ddpm_lab.data.packed import prepare  # noqa: PLC0415

    manifest = prepare(
        options.source,
        Path(options.dest).expanduser(),
        image_size=options.image_size,
        held_out=options.held_out,
        skip_bad=options.skip_bad,
        progress=lambda line: print(line, file=sys.stderr),
    )
    if options.json:
        print(manifest.to_json(), end="")
    else:
        print(f"{options.dest}: {manifest.describe()}")
        for line in manifest.skipped:
            print(f"left out: {line}")
    return 0


def _grid(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What --mode and --batch-size mean for an experiment."""
    from ddpm_lab.measure import hardware  # noqa: PLC0415

    grid: dict[str, Any] = {}
    if options.batch_size is not None:
        grid |= (
            {"global_batch_sizes": [options.batch_size]}
            if name == "multi_gpu"
            else {"global_batch_size": options.batch_size}
        )
    if options.mode == "multi" and name == "workers":
        raise ConfigError(
            "--mode multi: the experiment workers trains with one rank; leave it out or use --mode single"
        )
    if options.mode and name != "workers":
        gpus = len(hardware.gpus())
        cuda = (options.device or ("cuda" if gpus else "cpu")) == "cuda"
        most = gpus if cuda else hardware.usable_cores()
        if options.mode == "multi" and most < 2 and not (options.oversubscribe and not cuda):
            have = f"{most} GPU" if cuda else f"{most} usable core"
            raise NoRanksError(f"--mode multi needs two ranks, and this machine has {have}: use --mode single")
        ranks = 1 if options.mode == "single" else most if cuda else 2
        grid |= {"world_size": ranks} if name == "profile" else {"world_sizes": [ranks]}
    return grid


class NoRanksError(ConfigError):
    """Several ranks were asked for where there can be only one."""


def _run(options: argparse.Namespace) -> int:
    from ddpm_lab import experiments  # noqa: PLC0415
    from ddpm_lab.config import choice  # noqa: PLC0415
    from ddpm_lab.questions import QUESTIONS  # noqa: PLC0415

    for name in options.experiments:
        choice("experiment", name, QUESTIONS)
    try:
        grids = {name: _grid(name, options) for name in options.experiments}
    except NoRanksError as error:
        print(f"ddpm-lab: {error}", file=sys.stderr)
        return 1
    # All are checked before the first is measured.
    planned = [
        experiments.Planned(
            name,
            options.preset,
            options.minutes / len(grids) if options.minutes else options.minutes,
            options.sets,
            output_dir=options.output_dir,
            start_method=options.start_method,
            data=options.data,
            held_out=options.held_out,
            skip_bad=options.skip_bad,
            network=options.network,
            device=options.device,
            image_size=options.image_size,
            seed=options.seed,
            oversubscribe=options.oversubscribe,
            **grid,
        )
        for name, grid in grids.items()
    ]
    measured = [one.measure() for one in planned]
    results = [_answer(one) for one in measured]
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            print(f"{result['experiment']}: {result['finding']}")
        print(f"records: {results[-1]['ledger']}")
    return 0 if all(one.completed for one in measured) else 1


def _answer(measured: Any) -> dict[str, Any]:
    """The finding of what was measured, or, on a node without pandas, where its records lie."""
    values = {
        "experiment": measured.experiment.name,
        "measured_sets": measured.measured_sets,
        "ledger": str(measured.ledger),
    }
    try:
        from ddpm_lab.explain import findings  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        advice = f"measured; {missing.name} is not installed here, so take the ledger elsewhere: ddpm-lab figures"
        return {**values, "finding": f"{advice} --ledger {measured.ledger.name}"}
    from ddpm_lab.experiments import study_of  # noqa: PLC0415

    found = findings.finding(study_of(measured))
    return {**values, "finding": found.claim, "verdict": found.verdict, "status": found.status}


def _report(options: argparse.Namespace) -> int:
    from ddpm_lab.report import report  # noqa: PLC0415

    parameters = {name: _literal(value) for name, value in options.parameter or ()}
    if options.skip_bad:
        parameters["skip_bad"] = True
    result = report(
        preset=options.preset,
        data=options.data,
        held_out=options.held_out,
        network=options.network,
        minutes=options.minutes,
        output_dir=options.output_dir,
        notebooks=options.notebook,
        parameters=parameters,
    )
    return result.exit_code


def _literal(text: str) -> Any:
    """A parameter's value as JSON where it is JSON, else as it was typed."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _figures(options: argparse.Namespace) -> int:
    from ddpm_lab import published  # noqa: PLC0415
    from ddpm_lab.experiments import LEDGER  # noqa: PLC0415

    output = _output(options)
    if options.check:
        problems = published.check(output)
        for problem in problems:
            print(f"ddpm-lab: {problem}", file=sys.stderr)
        if not problems:
            print("every published figure matches the published records")
        return 1 if problems else 0
    ledgers = [Path(f).expanduser() for f in options.ledger or [output / LEDGER]]
    found = (published.publish if options.publish else published.rebuild)(ledgers, options.machine, output)
    if options.json:
        print(json.dumps([{"figure": str(path), **dataclasses.asdict(f)} for path, f in found], indent=1))
    else:
        for path, finding in found:
            print(f"{finding.experiment}: {finding.claim}\n  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
