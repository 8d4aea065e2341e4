"""Figures and findings from records alone: a user's own, and the published ones that stand in the checkout."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageFilter

from ddpm_lab.anonymous import anonymous
from ddpm_lab.explain import figures, findings, frames, lost_scaling_table
from ddpm_lab.explain.bands import DEFAULT
from ddpm_lab.explain.bands import bands as bands_called
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import RECOMMENDATION, Study, study
from ddpm_lab.explain.quality import NOT_MEASURED
from ddpm_lab.explain.show import NAMES
from ddpm_lab.files import replace
from ddpm_lab.ledger import PUBLISHED, Head, Ledger, published_trials, read_all
from ddpm_lab.plan import SEARCH
from ddpm_lab.record import LedgerError, RunRecord

SHOWN = {*NAMES, SEARCH}
"""Experiments whose records some figure shows: the questions, and the search behind the recommendation."""
FIGURES = Path("image_output", "published")
RECORDS = PUBLISHED
README = "README.md"
BEGIN = "<!-- answers: written by ddpm-lab figures --publish -->"
END = "<!-- end of answers -->"
BAR = "\\|"
"""A bar that ends no cell of a Markdown table."""
_LEVELS = 30


def rebuild(
    ledgers: Sequence[Path], machine: str | None, output: Path, bands: object = DEFAULT
) -> list[tuple[Path, Finding]]:
    """Draw every figure that the records of one machine allow into ``image_output/``; return them with findings.

    ``bands`` name parallel efficiencies. Raises ConfigError where they are no table (see ``explain.bands``), and
    LedgerError where a file is missing or holds nothing to draw, or several machines are in the files and none is
    named.
    """
    kinds: set[str] = set()
    table = bands_called(bands)

    def shown(heads: Sequence[Head]) -> list[Head]:
        kinds.update(h.experiment for h in heads)
        return _shown(heads, machine)

    records, damaged = read_all(ledgers, shown)
    files = ", ".join(map(str, ledgers))
    if not records and kinds:
        raise LedgerError(
            f"{files} holds records of {' and '.join(sorted(kinds))} alone, which draw their own figures: give the "
            "same command again, and it answers from the ledger"
        )
    if not records and damaged:
        raise LedgerError(f"no line of {files} is a record of this lab: give a .jsonl file that it wrote")
    for line in damaged:
        print(f"note: {line}")
    known: dict[str, Any] = {"bands": table, "published_trials": published_trials()}
    studies = [dataclasses.replace(s, **known) for s in _studies(records, machine, output)]
    return _draw(studies, output / "image_output")


def publish(ledgers: Sequence[Path], machine: str | None, output: Path) -> list[tuple[Path, Finding]]:
    """Replace the published records and figures of one machine by these: what the README and ``check`` use.

    Host names, paths, data folders, tracebacks and the like are the user's own business and are left out, and so are
    records of anything but the lab's own questions.
    """
    records, _ = read_all(ledgers, lambda heads: _shown(heads, machine))
    questions = [r for r in records if r.experiment in SHOWN]
    studies = _studies(questions, machine, output)
    chosen = list({id(r): r for s in studies for r in (*s.records, *s.trials, *s.looks)}.values())
    if not chosen:
        raise LedgerError(f"there is nothing to publish in {', '.join(map(str, ledgers))}: measure first")
    # Trials of earlier code speak of the same mathematics, and go on doing so where no figure shows them.
    shown = {(r.environment.machine.key, r.cohort[2]) for r in chosen if r.experiment in SHOWN}
    trials = read_all(ledgers, lambda heads: [h for h in heads if h.role == "quality" and h.experiment in SHOWN])[0]
    trials = [r for r in trials if (r.environment.machine.key, r.cohort[2]) in shown]
    known = {(r.run_id, r.code_version, r.date) for r in chosen}
    chosen = [r for r in trials if (r.run_id, r.code_version, r.date) not in known] + chosen
    slug = _slug(chosen[-1])
    target = output / RECORDS / f"{slug}.jsonl"
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    Ledger(partial).append(anonymous(chosen))
    partial.replace(target)
    folder = output / FIGURES / slug
    for old in folder.glob("*.png"):
        old.unlink()
    drawn = _draw(_studies(Ledger(target).read()[0], None, output), folder)
    for path, text in _pages(output).items():
        path.write_text(text)
    return drawn


def _pages(output: Path) -> dict[Path, str]:
    """What is written from the published records: the README's answers, and a page of evidence beside the figures.

    Machines with GPUs come first, of both kinds the one with most answers, and of equals the one measured last. What
    was not measured on a machine has no line of its own.
    """
    pages, blocks = {}, []
    for ledger in sorted((output / RECORDS).glob("*.jsonl")):
        records = Ledger(ledger).read()[0]
        if not records:  # ``check`` names such a file
            continue
        folder = FIGURES / ledger.stem
        studies = {s.experiment: s for s in _studies(records, None, output)}
        pages[output / folder / README] = _evidence(list(studies.values()), output / folder)
        found = {name: findings.finding(s) for name, s in studies.items()}
        answered = [name for name in studies if found[name].status != NOT_MEASURED]
        told = answered or list(studies)
        shown = studies[RECOMMENDATION if RECOMMENDATION in told else told[0]]
        where = f"{shown.hardware}, {shown.date}"
        lines = [
            f"![{found[shown.experiment].headline}]({(folder / f'{NAMES[shown.experiment]}.png').as_posix()})",
            *("", f"{where} ([every figure, and the evidence]({(folder / README).as_posix()})):", ""),
            *("| question | answer | ratio, 95 % interval | quality |", "| --- | --- | --- | --- |"),
        ]
        for name in told:
            answer = found[name]
            linked = f"[{answer.question}]({(folder / f'{NAMES[name]}.png').as_posix()})"
            cells = (linked, answer.headline, answer.evidence(), answer.quality.removeprefix("quality "))
            lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
        latest = max(datetime.fromisoformat(r.date) for r in records)
        no_gpu = not records[-1].environment.machine.gpus
        blocks.append((no_gpu, -len(answered), -latest.timestamp(), "\n".join(lines)))
    readme = output / README
    text = readme.read_text() if readme.is_file() else ""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if after:
        answers = "\n\n".join(block for *_, block in sorted(blocks)) or "No measurements are published yet."
        pages[readme] = f"{before}{BEGIN}\n{answers}\n{END}{after}"
    return pages


def _evidence(studies: Sequence[Study], folder: Path) -> str:
    """A page with what is said of each answer and its figures, for the folder that holds them."""
    lines = [f"# {studies[0].hardware}", "", "Written by `ddpm-lab figures --publish` from the published records.", ""]
    for answer in studies:
        found, stem = findings.finding(answer), NAMES[answer.experiment]
        lines += [f"## {found.question}", "", found.claim.replace("|", BAR), ""]
        lines += [f"![{found.headline}]({stem}.png)", ""]
        for name, caption in figures.captions(answer.experiment).items():
            if (folder / f"{stem}_{name}.png").exists():  # without data there is none
                told = f"{caption} {lost_scaling_table.sentences(answer)}" if name == "lost_scaling" else caption
                lines += [told, "", f"![{caption}]({stem}_{name}.png)", ""]
    return "\n".join(lines)


def check(output: Path) -> list[str]:
    """Whether each published figure is what the published records give: by bytes, or, drawn elsewhere, by pixels.

    Returns a sentence for each that is not.
    """
    problems = []
    compared = differing = 0
    ledgers = sorted((output / RECORDS).glob("*.jsonl"))
    if not ledgers:
        problems.append(f"there are no published records in {output / RECORDS}")
    for ledger in ledgers:
        folder = output / FIGURES / ledger.stem
        records, damaged = Ledger(ledger).read()
        problems += map(str, damaged)
        if not records:
            problems.append(f"{ledger} holds no records: delete it, or publish that machine's records again")
            continue
        expected = {
            path.name: picture for s in _studies(records, None, output) for path, picture in _pictures(s, folder)
        }
        compared += len(expected)
        for name in sorted({*expected, *(p.name for p in folder.glob("*.png"))}):
            if name not in expected:
                problems.append(f"{folder / name} is not made by any record of {ledger.name}: delete it")
            elif not (folder / name).exists():
                problems.append(f"{folder / name} is missing: run ddpm-lab figures --publish")
            elif not same_picture((folder / name).read_bytes(), expected[name]):
                differing += 1
                problems.append(
                    f"{folder / name} differs from what {ledger.name} gives: run ddpm-lab figures --publish"
                )
    if differing == compared > 1:
        problems.append(
            f"every figure differs: Matplotlib {mpl.__version__} here may draw text in another way than the "
            "locked version does; check in the environment of make setup"
        )
    for path, text in (_pages(output) if ledgers else {}).items():
        if not path.is_file() or path.read_text() != text:
            problems.append(f"{path} does not say what the published records do: run ddpm-lab figures --publish")
    return problems


def same_picture(one: bytes, other: bytes) -> bool:
    """Equal bytes, or the same picture drawn with other rounding in its anti-aliasing.

    Both are blurred over 1.5 pixels, which evens out how an edge was smoothed; what then still differs somewhere is
    what is drawn. At 150 dots an inch another digit, even an 8 for a 6 in small grey text, differs by 45 of 255 levels,
    a bar moved by a pixel by more, and an edge smoothed over 0.8 pixels or moved by half a pixel by at most 21.
    """
    if one == other:
        return True
    pictures = [Image.open(io.BytesIO(b)).convert("RGB").filter(ImageFilter.GaussianBlur(1.5)) for b in (one, other)]
    first, second = (np.asarray(picture, dtype=np.int16) for picture in pictures)
    return first.shape == second.shape and int(np.abs(first - second).max()) <= _LEVELS


def _shown(heads: Sequence[Head], machine: str | None) -> list[Head]:
    """Heads of the records that some figure shows, in their order."""
    wanted = {id(h) for h in frames.chosen(heads, RECOMMENDATION, machine=machine) if h.experiment in SHOWN}
    return [h for h in heads if id(h) in wanted]


def _studies(records: Sequence[RunRecord], machine: str | None, output: Path) -> list[Study]:
    names = [name for name in NAMES if name == RECOMMENDATION or any(r.experiment == name for r in records)]
    told, trials = (
        [study(records, name, machine=machine, output_dir=output) for name in names],
        published_trials(output),
    )
    return [dataclasses.replace(s, published_trials=trials) for s in told]


def _pictures(answer: Study, folder: Path) -> list[tuple[Path, bytes]]:
    stem = NAMES[answer.experiment]
    drawn = [(f"{stem}.png", figures.figure(answer))]
    drawn += [(f"{stem}_{name}.png", extra) for _, extra, name in figures.more(answer)]
    return [(folder / name, figures.png(figure)) for name, figure in drawn]


def _draw(studies: Sequence[Study], folder: Path) -> list[tuple[Path, Finding]]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for answer in studies:
        pictures = _pictures(answer, folder)
        for path, picture in pictures:
            replace(path, picture)
        found.append((pictures[0][0], findings.finding(answer)))
    return found


def _slug(record: RunRecord) -> str:
    return re.sub(r"[^a-z0-9]+", "-", record.environment.machine.name.lower()).strip("-")
