"""The command that measures experiments: what its options mean for each of them, and which of them it does not take."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError, choice, percent, whole_numbers, whole_options
from ddpm_lab.config import START_METHODS
from ddpm_lab.explain.bands import Bands, bands
from ddpm_lab.options import COMMON, RESOLUTION, add, given, track, tracker_chosen
from ddpm_lab.plan import SCALINGS

if TYPE_CHECKING:
    from ddpm_lab.explain.strategy import Strategy

_LISTS = ("parts", "trainers", "candidates")
_OWNED = {
    **dict.fromkeys(("parts", "trainers"), "peers"),
    **dict.fromkeys(("candidates", "inception", "fid_images"), "quality"),
    **dict.fromkeys(("scaling", "lost_scaling"), "multi_gpu"),
}
"""Options that one experiment alone takes."""
WIDTH = 100
"""Columns of what an answer rests on, on a terminal."""
_NAMES = {"way_out": "to answer it", "figure": "figure"}


def add_options(subparsers: Any) -> None:
    """Add the command to the command line."""
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
    add(parser, "mode", help="one rank only; at least two; or what `ddpm-lab strategy` says of the network and batch")
    parser.add_argument(
        "--scaling", choices=SCALINGS, help="multi_gpu: strong, weak or both (default: both; smoke: strong)"
    )
    add(parser, "bands", "device", "batch-size")
    parser.add_argument(
        "--world-sizes", metavar="N,N,...", help="numbers of ranks, such as 1,2,4 (default: the experiment's choice)"
    )
    parser.add_argument(
        "--parts", help="peers: some of peers,fp32,sampling,limits,levers (default: the first four; full: all)"
    )
    parser.add_argument(
        "--lost-scaling",
        action="store_true",
        default=None,
        help="multi_gpu: also where the rest of the ideal speed-up of the most ranks went (default: in full)",
    )
    parser.add_argument("--trainers", help="peers: names of other trainers, with commas between (default: all)")
    parser.add_argument("--candidates", help="quality: settings to try, with commas between (default: the preset's)")
    parser.add_argument(
        "--seeds",
        type=int,
        help="train each configuration for quality from so many seeds, beside its speed; not for profile and workers "
        "(default: none; 8 in full; 2, 5 or 8 for the experiment quality)",
    )
    parser.add_argument("--images", type=int, help="images that each of these runs trains on (default: the preset's)")
    parser.add_argument("--inception", metavar="FILE", help="quality: weights of torch-fidelity's Inception, for a FID")
    parser.add_argument(
        "--fid-images",
        type=int,
        metavar="N",
        help="quality: images of a FID (default: 64, 2,500 or 10,000, where there are as many to train on)",
    )
    add(parser, "image-size", "sets")
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
    parser.add_argument("--start-method", choices=START_METHODS, default="forkserver", help="how ranks are started")
    add(parser, "tracker", "json")
    parser.set_defaults(command=run_command)


def _weighed(options: argparse.Namespace) -> Strategy | None:
    """What --mode auto rests on; it settles the network, so that what is weighed is what is measured."""
    if options.mode != "auto":
        return None
    if options.workload is not None:
        raise ConfigError(f"--mode auto weighs the lab's own networks: with {options.workload} use single or multi")
    from ddpm_lab.strategy import strategy  # noqa: PLC0415

    found = strategy(**given(options, "network", "batch_size", "device", "output_dir"))
    options.network = found.network
    print(f"--mode auto: {found.sentence()}", file=sys.stderr)
    return found


def run_command(options: argparse.Namespace) -> int:
    """Measure what is missing for experiments."""
    from ddpm_lab import experiments, planning  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.explain.grids import show  # noqa: PLC0415
    from ddpm_lab.questions import QUESTIONS  # noqa: PLC0415

    tracker = tracker_chosen(options.tracker)
    table = bands(options.bands, "--bands")
    for name in options.experiments:
        choice("experiment", name, QUESTIONS)
    weighed = _weighed(options)
    grids = {name: _grid(name, options, weighed) for name in options.experiments}
    settings = given(options, "preset", "sets", "output_dir", "start_method", "data", "held_out", "skip_bad", "network")
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
    _print_summaries(measured)
    if tracker:
        for one in measured:
            track(tracker, one)
    return 0 if all(one.completed for one in measured) else 1


def _print_summaries(measured: Sequence[Any]) -> None:
    """The lines that the log of a job is searched for, a block for each configuration that trained."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    from ddpm_lab import summary_lines  # noqa: PLC0415
    from ddpm_lab.experiments import records_of  # noqa: PLC0415

    for one in measured:
        configurations = [c for c in one.experiment.configurations if c.data]
        images = {c.data_sha256: summary_lines.train_count(c) for c in configurations}
        for title, summary in summary_lines.of_records(records_of(one), images).items():
            print(f"-- {title}", *summary_lines.lines(summary), sep="\n", file=sys.stderr)


def _answer(measured: Any, table: Bands) -> dict[str, Any]:
    """The finding of what was measured, or, on a node without pandas, where its records lie."""
    values = {
        "experiment": measured.experiment.name,
        "measured_sets": measured.measured_sets,
        "ledger": str(measured.ledger),
    }
    try:
        from ddpm_lab.explain import figures, findings, lost_scaling_table, show  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        advice = f"measured; {missing.name} is not installed here, so take the ledger elsewhere: ddpm-lab figures"
        return {**values, "finding": f"{advice} --ledger {measured.ledger.name}"}
    from ddpm_lab.experiments import study_of  # noqa: PLC0415

    study = dataclasses.replace(study_of(measured), bands=table)
    found = findings.finding(study)
    values |= {"headline": found.headline, "finding": found.claim, "verdict": found.verdict, "status": found.status}
    values["way_out"] = found.way_out
    figure = measured.output_dir / "image_output" / f"{show.NAMES[study.experiment]}.png"
    figures.save(figures.figure(study), figure)
    values["figure"] = str(figure)
    lost = lost_scaling_table.as_values(study)
    others = lost_scaling_table.unsplit(study)
    return values | ({"lost_scaling": lost} if lost else {}) | ({"lost_scaling_unsplit": others} if others else {})


def _grid(name: str, options: argparse.Namespace, weighed: Strategy | None) -> dict[str, Any]:
    """What --mode and --batch-size mean for an experiment; ``weighed`` is what --mode auto rests on."""
    from ddpm_lab.setting import usual_device  # noqa: PLC0415
    from ddpm_lab.strategy import most_ranks, several_ranks  # noqa: PLC0415

    found: dict[str, Any] = {}
    found |= {name: value for name in ("seeds", "images") if (value := getattr(options, name)) is not None}
    for option, owner in _OWNED.items():
        if (given := getattr(options, option)) is not None:
            if name != owner:
                flag = option.replace("_", "-")
                raise ConfigError(f"--{flag}: the experiment {name} has none; only {owner} takes it")
            found[option] = [word.strip() for word in given.split(",")] if option in _LISTS else given
    if options.world_sizes is not None:
        return found | _batch(name, options) | _world_sizes(name, options)
    if options.mode and name in ("peers", "quality", "claims"):
        raise ConfigError(f"--mode: the experiment {name} chooses its ranks itself; leave it out")
    found |= _batch(name, options)
    if options.mode == "multi" and name == "workers":
        raise ConfigError(
            "--mode multi: the experiment workers trains with one rank; leave it out or use --mode single"
        )
    if options.mode and name != "workers":
        device = usual_device(options.device)
        most = most_ranks(device)[0]
        if weighed is not None and name == "multi_gpu":
            found["global_batch_sizes"] = [weighed.batch]
            if weighed.answer != "single" and most > 1:
                return found  # one rank and several
        multi = options.mode == "multi" or (weighed is not None and weighed.answer == "multi" and most > 1)
        if not multi and name in ("exchange", "all_reduce"):
            said = "" if weighed is None else f" ({weighed.answer} for {weighed.network}, batch {weighed.batch})"
            raise ConfigError(
                f"--mode {options.mode}{said}: one rank exchanges nothing, which leaves {name} nothing to measure; "
                "use --mode multi or leave it out"
            )
        ranks = several_ranks(device, oversubscribe=options.oversubscribe) if multi else 1
        found |= {"world_size": ranks} if name in ("profile", "batch_size") else {"world_sizes": [ranks]}
    return found


def _batch(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if options.batch_size is None:
        return {}
    if name in ("batch_size", "all_reduce"):
        why = "varies it" if name == "batch_size" else "has no images"
        raise ConfigError(f"--batch-size: the experiment {name} {why}; leave it out")
    whole_options(vars(options), batch_size=1)
    return (
        {"global_batch_sizes": [options.batch_size]}
        if name == "multi_gpu"
        else {"global_batch_size": options.batch_size}
    )


def _world_sizes(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from ddpm_lab.questions import QUESTIONS  # noqa: PLC0415

    able = [q for q, function in QUESTIONS.items() if "world_sizes" in inspect.signature(function).parameters]
    if name not in able:
        raise ConfigError(f"--world-sizes: the experiment {name} has none; only {', '.join(able)} take them")
    if options.mode:
        raise ConfigError(f"--world-sizes and --mode {options.mode} both say how many ranks: leave one of them out")
    return {"world_sizes": whole_numbers("--world-sizes", options.world_sizes)}
