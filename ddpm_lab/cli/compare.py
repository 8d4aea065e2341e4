"""The command compare: two training steps, or one and a revision; with a threshold, a gate."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ddpm_lab.checks import ConfigError, percent
from ddpm_lab.cli.options import RESOLUTION, add, given, tell, track, tracker_chosen
from ddpm_lab.files import expanded


def add_options(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "compare", help="which of two training steps is faster, or is one slower than in another revision?"
    )
    parser.add_argument(
        "baseline",
        metavar="A",
        nargs="?",
        help="module:function, or a TOML file of settings: the side that is 1; with --against the step of both sides "
        "(default: the lab's own trainer)",
    )
    parser.add_argument("candidate", metavar="B", nargs="?", help="module:function, or a TOML file of settings")
    parser.add_argument(
        "--against", metavar="REVISION", help="measure A as it is in this repository against a branch, tag or commit"
    )
    parser.add_argument("--always", action="store_true", help="with --against: measure identical code too")
    add(parser, "resolution", help=f"{RESOLUTION}: measure until then (default: the threshold, or 3%%)")
    add(parser, "minutes")
    add(parser, "sets", help="the most sets to measure (default: 100)")
    add(parser, "device", "output-dir", "tracker")
    parser.add_argument("--gate", action="store_true", help="exit 1 if B is slower, not only if it fails: a gate")
    parser.add_argument(
        "--threshold",
        metavar="SHARE",
        help="a gate that fails only what is surely slower by more, such as 3%% (default with --against: --resolution)",
    )
    parser.add_argument("--strict", action="store_true", help="with a gate: exit 4 where the answer is inconclusive")
    parser.add_argument(
        "--summary", metavar="FILE", help="append the decision as Markdown (default: $GITHUB_STEP_SUMMARY, if any)"
    )
    add(parser, "json")
    parser.set_defaults(command=compare)


def compare(options: argparse.Namespace) -> int:
    """Measure two training steps against each other, or one against a revision; with a threshold, decide."""
    from ddpm_lab.questions import comparison, gate  # noqa: PLC0415
    from ddpm_lab.questions.planning import MOST_SETS  # noqa: PLC0415

    tracker = tracker_chosen(options.tracker)
    threshold = percent(options.threshold, "--threshold") if options.threshold else 0.0 if options.gate else None
    resolution = (
        percent(options.resolution, "--resolution") if options.resolution else threshold or comparison.RESOLUTION
    )
    _check_sides(options, gated=threshold is not None)
    how = given(options, "minutes", "device", "output_dir")
    how |= {"resolution": resolution, "sets": options.sets or MOST_SETS}
    if options.against is None:
        measured: Any = comparison.measure(options.baseline, options.candidate, **how)
    else:
        threshold = resolution if threshold is None else threshold
        measured = gate.measure(options.baseline, options.against, always=options.always, **how)
        if isinstance(measured, gate.Unchanged):
            return _unchanged(measured.sentence, options)
    found = comparison.answer(measured)
    if threshold is None:
        print(json.dumps(found.as_dict(), indent=1) if options.json else found, flush=True)
        if tracker:
            track(tracker, measured)
        return int(not found.complete)
    judged = gate.outcome(found.answer, threshold)
    code = judged.exit_code(strict=options.strict)
    said = {"status": judged.status, "sentence": judged.sentence, "threshold": threshold, "exit_code": code}
    text = json.dumps({**found.as_dict(), "gate": said}, indent=1) if options.json else f"{found}\n{judged.sentence}"
    print(text, flush=True)
    _summarise(options, gate.summary(found.answer, judged, threshold))
    if tracker:
        track(tracker, measured)
    return code


def _check_sides(options: argparse.Namespace, *, gated: bool) -> None:
    """Raise ConfigError where the options do not go together."""
    if options.against is None and not options.candidate:
        raise ConfigError("compare needs two sides: name A and B, or one and --against a revision; see --help")
    if options.against is not None and options.candidate:
        raise ConfigError(
            f"--against {options.against} takes one step, the same on both sides: leave out {options.candidate}"
        )
    if options.always and options.against is None:
        raise ConfigError("--always is for identical code of a revision: it needs --against")
    if not gated and options.against is None and (options.strict or options.summary):
        raise ConfigError("--strict and --summary are about a decision: give --against, --gate or --threshold too")


def _unchanged(sentence: str, options: argparse.Namespace) -> int:
    from ddpm_lab.questions.gate import EXIT_CODES, IDENTICAL  # noqa: PLC0415

    text = f"{IDENTICAL}: {sentence}"
    said = {"status": IDENTICAL, "sentence": text, "exit_code": EXIT_CODES[IDENTICAL]}
    tell(options, {"verdict": IDENTICAL, "gate": said}, [text])
    _summarise(options, f"### {IDENTICAL}\n\n{sentence}.\n")
    return EXIT_CODES[IDENTICAL]


def _summarise(options: argparse.Namespace, text: str) -> None:
    """Append Markdown to a file: the one that is named, or that of the GitHub job that this runs in."""
    path = options.summary or os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        try:
            with expanded(path).open("a") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"--summary: cannot write {path}: {error.strerror}; name another file") from error
