"""Figures and findings from records alone: a user's own, and the published ones that stand in the checkout."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from ddpm_lab.explain import frames
from ddpm_lab.explain.bands import DEFAULT
from ddpm_lab.explain.bands import bands as bands_called
from ddpm_lab.explain.charts.style import png
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import RECOMMENDATION, Study, study
from ddpm_lab.explain.quality import NOT_MEASURED
from ddpm_lab.files import CHECKOUT, replace
from ddpm_lab.ledger import PUBLISHED, Head, Ledger, published_trials, read_all
from ddpm_lab.plan import SEARCH
from ddpm_lab.questions.ask import answer, every_question
from ddpm_lab.record import LedgerError, RunRecord
from ddpm_lab.reports.anonymous import anonymous

SHOWN = {*every_question(), SEARCH}
"""Experiments whose records some figure shows: the questions, and the search behind the recommendation."""
FIGURES = Path("image_output", "published")
RECORDS = PUBLISHED
BEGIN = "<!-- answers: written by ddpm-lab figures --publish -->"
END = "<!-- end of answers -->"


def rebuild(
    ledgers: Sequence[Path], machine: str | None, output: Path, bands: object = DEFAULT
) -> list[tuple[Path, Finding]]:
    """Draw every figure that the records of one machine allow into ``image_output/``; return them with findings.

    ``bands`` name parallel efficiencies. Raises ConfigError where they are no table (see ``explain.bands``), and
    LedgerError where a file is missing or holds nothing to draw, or several machines are in the files and none is
    named.
    """
    table = bands_called(bands)
    records, damaged = read_all(ledgers, lambda heads: _shown(heads, machine))
    if not records:
        raise LedgerError(
            f"{', '.join(map(str, ledgers))} holds no records of a question with figures: what `compare` and other "
            "commands measured they draw themselves, when given again"
        )
    print(*(f"note: {line}\n" for line in damaged), sep="", end="")
    studies = [dataclasses.replace(s, bands=table) for s in _studies(records, output, machine, CHECKOUT)]
    return _draw(studies, output / "image_output")


def publish(ledgers: Sequence[Path], machine: str | None, output: Path) -> list[tuple[Path, Finding]]:
    """Replace the published records and figures of one machine by these: what the README and ``check`` use.

    Only fields that ``anonymous`` lists are published, and only records of the lab's own questions.
    """

    def select(heads: Sequence[Head]) -> list[Head]:
        shown = set(_shown(heads, machine))
        # Trials of earlier code speak of the same mathematics, and go on doing so where no figure shows them.
        data = {(h.machine.key, h.cohort[2]) for h in shown}
        trials = {h for h in heads if h.role == "quality" and h.experiment in SHOWN}
        return [h for h in heads if h in shown or (h in trials and (h.machine.key, h.cohort[2]) in data)]

    chosen = anonymous(read_all(ledgers, select)[0])
    if not chosen:
        raise LedgerError(f"there is nothing to publish in {', '.join(map(str, ledgers))}: measure first")
    slug = re.sub(r"[^a-z0-9]+", "-", chosen[-1].machine.name.lower()).strip("-")
    target = output / RECORDS / f"{slug}.jsonl"
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    Ledger(partial).append(chosen)
    partial.replace(target)
    for old in (output / FIGURES / slug).glob("*.png"):
        old.unlink()
    drawn = _draw(_studies(Ledger(target).read()[0], output), output / FIGURES / slug)
    if (text := _readme(output)) is not None:
        replace(output / "README.md", text)
    return drawn


def _readme(output: Path) -> str | None:
    """The README with the published answers of one machine; None where it has no place for them.

    It is the machine with most answers, one with a GPU if there is one, and of equals the one measured last.
    """
    readme = output / "README.md"
    text = readme.read_text() if readme.is_file() else ""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        return None
    machines = []
    for ledger in (output / RECORDS).glob("*.jsonl"):
        if records := Ledger(ledger).read()[0]:  # ``check`` names a file without any
            studies = {s.experiment: s for s in _studies(records, output)}
            found = [answer(s).finding for s in studies.values()]
            answered = [each for each in found if each.status != NOT_MEASURED]
            rank = (bool(records[-1].machine.gpus), len(answered), max(r.date for r in records))
            machines.append((rank, ledger.stem, studies, answered or found))
    if not machines:
        return f"{before}{BEGIN}\nNo measurements are published yet.\n{END}{after}"
    _, slug, shown, told = max(machines, key=lambda each: each[0])
    first = next((each for each in told if each.experiment == RECOMMENDATION), told[0])
    folder, measured = (FIGURES / slug).as_posix(), shown[first.experiment]
    figures = {name: f"{folder}/{entry.about.file}.png" for name, entry in every_question().items()}
    lines = [f"![{first.headline}]({figures[first.experiment]})", ""]
    lines += [f"{measured.hardware}, {measured.date} ([every figure]({folder})):", ""]
    lines += ["| question | answer | ratio, 95 % interval | quality |", "| --- | --- | --- | --- |"]
    for one in told:
        cells = (one.headline, one.speed, one.quality.removeprefix("quality "))
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| [{one.question}]({figures[one.experiment]}) | {row} |")
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def check(output: Path) -> list[str]:
    """Compare each published figure with what the published records give; returns a sentence for each problem."""
    problems: list[str] = []
    again = "run ddpm-lab figures --publish"
    ledgers = sorted((output / RECORDS).glob("*.jsonl"))
    if not ledgers:
        return [f"there are no published records in {output / RECORDS}"]
    for ledger in ledgers:
        folder = output / FIGURES / ledger.stem
        records, damaged = Ledger(ledger).read()
        problems += map(str, damaged)
        if not records:
            problems.append(f"{ledger} holds no records: delete it, or publish that machine's records again")
            continue
        expected = {path: png for s in _studies(records, output) for path, png in _pictures(s, folder)}
        for path in sorted({*expected, *folder.glob("*.png")}):
            if path not in expected:
                problems.append(f"{path} is not made by any record of {ledger.name}: delete it")
            elif not path.exists():
                problems.append(f"{path} is missing: {again}")
            elif not same_picture(path.read_bytes(), expected[path]):
                problems.append(f"{path} differs from what {ledger.name} gives: {again}")
    if (text := _readme(output)) is not None and (output / "README.md").read_text() != text:
        problems.append(f"{output / 'README.md'} does not say what the published records do: {again}")
    return problems


def same_picture(one: bytes, other: bytes) -> bool:
    """Equal bytes, or the same picture drawn with other rounding in its anti-aliasing.

    Blurred over 1.5 pixels, another digit in small grey text differs by at least 45 of 255 levels, and an edge that
    was smoothed otherwise, or moved by half a pixel, by at most 21.
    """
    if one == other:
        return True
    pictures = [Image.open(io.BytesIO(b)).convert("RGB").filter(ImageFilter.GaussianBlur(1.5)) for b in (one, other)]
    first, second = (np.asarray(picture, dtype=np.int16) for picture in pictures)
    return first.shape == second.shape and int(np.abs(first - second).max()) <= 30


def _shown(heads: Sequence[Head], machine: str | None) -> list[Head]:
    """Heads of the records that some figure shows, in their order."""
    wanted = {h for h in frames.chosen(heads, RECOMMENDATION, machine=machine) if h.experiment in SHOWN}
    return [h for h in heads if h in wanted]


def _studies(
    records: Sequence[RunRecord], output: Path, machine: str | None = None, published: Path | None = None
) -> list[Study]:
    """What the records of each question show, beside the trials published in ``published`` (default: ``output``)."""
    asked, trials = {RECOMMENDATION, *(r.experiment for r in records)}, published_trials(published or output)
    studies = [study(records, name, machine=machine, output_dir=output) for name in every_question() if name in asked]
    return [dataclasses.replace(s, published_trials=trials) for s in studies]


def _pictures(study: Study, folder: Path) -> list[tuple[Path, bytes]]:
    shown = answer(study)
    drawn = [("", shown.figure()), *((f"_{name}", extra) for _, extra, name in shown.figures())]
    return [(folder / f"{shown.file}{name}.png", png(figure)) for name, figure in drawn]


def _draw(studies: Sequence[Study], folder: Path) -> list[tuple[Path, Finding]]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for each in studies:
        pictures = _pictures(each, folder)
        for path, picture in pictures:
            replace(path, picture)
        found.append((pictures[0][0], answer(each).finding))
    return found
