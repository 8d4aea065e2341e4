"""Executed notebooks as HTML pages, and the index over them: one file each, no script, no request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddpm_lab import __version__

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
TITLE = "Which settings train {} fastest on this machine?"
ANSWERED, SMOKE = "answered", "smoke"
NOT_RUN, DONE, FAILED, STOPPED = "not run", "done", "failed", "stopped"
METADATA = "ddpm_lab"
"""Where an executed notebook keeps what the index reads back: in its own metadata and in those of its finding."""
ERROR_MARKER = "papermill-error-cell-tag"  # the tag of the cells that papermill adds to a notebook that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the index says about one notebook.

    ``state`` is one of not run, done, failed, stopped; ``finding`` holds the values that ``show.finding`` attached to
    its output (empty where there is none); ``image`` is the answer's figure, a PNG in base64. ``here`` is the name of
    the machine that the index is about.
    """

    name: str
    title: str
    state: str = NOT_RUN
    error: str = ""
    finding: Mapping[str, Any] = field(default_factory=dict)
    image: str = ""
    alt: str = ""
    preset: str = ""
    earlier: bool = False
    here: str = ""

    @property
    def elsewhere(self) -> bool:
        """Whether its answer is about another machine, or came with the checkout."""
        hardware = self.finding.get("hardware")
        return bool(self.finding.get("published") or (self.here and hardware and hardware != self.here))

    @property
    def status(self) -> str:
        """What the chip says: failed, stopped, not run, inconclusive, ..., or answered."""
        if self.state != DONE:
            return self.state
        if self.elsewhere:
            hardware = self.finding.get("hardware")
            return "published" if hardware and hardware == self.here else "another machine"
        if self.preset == SMOKE and self.finding.get("status") == ANSWERED:
            return "smoke: only tried"
        return str(self.finding.get("status", "no answer"))

    @property
    def kind(self) -> str:
        """How the chip is coloured: answered, unresolved, failed, or idle."""
        if self.state in (FAILED, STOPPED):
            return "failed"
        if self.state == NOT_RUN:
            return "idle"
        return ANSWERED if self.status == ANSWERED else "unresolved"

    @property
    def headline(self) -> str:
        """The computed sentence that answers the question, short enough for a title."""
        return str(self.finding.get("headline", ""))

    @property
    def facts(self) -> list[str]:
        """On what the answer rests, in short pieces."""
        pieces = [
            self.finding.get("evidence"),
            self.finding.get("hardware"),
            "published records, not measured here" if self.finding.get("published") else None,
            " to ".join(spoken_date(day) for day in str(self.finding.get("date", "")).split(" to ")),
            self.finding.get("quality"),
            f"preset {self.preset}" if self.preset and self.earlier else None,
        ]
        return [str(piece) for piece in pieces if piece]

    @property
    def link(self) -> str:
        """File name of the page beside the index; empty if the notebook has not run."""
        return "" if self.state == NOT_RUN else f"{self.name}.html"

    @property
    def link_text(self) -> str:
        """What the page holds."""
        return "Figure, table and evidence" if self.state == DONE else "What was done until then, and the error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the index that is no notebook: sentences, of which the first is the claim, and a PNG in base64."""

    sentences: tuple[str, ...]
    image: str
    alt: str


def answers(pages: Sequence[Page]) -> list[tuple[str, list[str]]]:
    """What a report comes to, of this machine alone: what to use, what is slower or the same, and what is open.

    An open question comes with the command that would answer it.
    """
    mine = [p for p in pages if p.state == DONE and p.finding and not p.elsewhere]
    last = [p for p in mine if p.finding.get("experiment") == RECOMMENDATION]
    others = [p for p in mine if p not in last and p.finding.get("experiment") not in _NO_SETTING]
    settled = [p.headline for p in others if p.kind == ANSWERED and p.finding.get("verdict") != FASTER]
    told = [*(p for p in last if p.kind != ANSWERED), *(p for p in others if p.kind != ANSWERED)]
    ways: dict[str, list[str]] = {}
    for page in told:
        ways.setdefault(page.headline, []).append(str(page.finding.get("way_out") or ""))
    open_ = [f"{headline}{': ' * any(found)}{' or '.join(filter(None, found))}" for headline, found in ways.items()]
    use = [p.headline.removeprefix("Use ") for p in last if p.kind == ANSWERED]
    lines = (("Use", use), ("No gain", settled), ("Open", open_))
    return [(name, found) for name, found in lines if found]


RECOMMENDATION, FASTER = "recommendation", "faster"
_NO_SETTING = ("profile", "claims", "peers", "quality")
"""Questions whose answers are about no setting of a training."""


def spoken_date(iso: str) -> str:
    """An ISO 8601 date and time as people read it, in the zone it was written in; anything else unchanged."""
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return moment.strftime("%-d %B %Y" if len(iso) == len("2026-01-31") else "%-d %B %Y, %H:%M")


def load(path: Path) -> Any:
    """Read a notebook; raises OSError or ValueError if it cannot be read."""
    import nbformat

    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def save(notebook: Any, path: Path) -> None:
    """Write a notebook; raises OSError if it cannot be written."""
    import nbformat

    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


def title(notebook: Any) -> str:
    """The question in the first line of a notebook: its first heading."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return str(line[2:].strip())
    return "A notebook without a title"


def read(notebook: Any, name: str, *, earlier: bool = False, here: str = "") -> Page:
    """What an executed notebook says of itself: its state, its finding, and the figure of its answer."""
    own = notebook.metadata.get(METADATA, {})
    finding: Mapping[str, Any] = {}
    image = alt = ""
    error = str(own.get("error", ""))
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            metadata = output.get("metadata", {})
            if METADATA in metadata:
                finding = metadata[METADATA]
            if not image and "image/png" in output.get("data", {}):
                image = output.data["image/png"].replace("\n", "")
                alt = metadata.get("image/png", {}).get("alt", "")
            if output.output_type == "error" and not error:
                error = f"{output.ename}: {output.evalue}".strip()
    return Page(
        name=name,
        title=title(notebook),
        state=own.get("state", STOPPED),
        error=error,
        finding=finding,
        image=image,
        alt=alt or f"Figure of {name}",
        preset=own.get("preset", ""),
        earlier=earlier,
        here=here,
    )


def write_page(page: Page, notebook: Any, target: Path) -> None:
    """Write one executed notebook as HTML.

    Raises OSError if the file cannot be written.
    """
    import nbformat
    from nbconvert import HTMLExporter

    shown = nbformat.from_dict(notebook)  # type: ignore[no-untyped-call]
    shown.cells = [cell for cell in shown.cells if ERROR_MARKER not in cell.metadata.get("tags", [])]
    for cell in shown.cells:
        # The template prints the question itself, above the answer.
        if cell.cell_type == "markdown" and f"# {page.title}" in cell.source.splitlines():
            cell.source = "\n".join(line for line in cell.source.splitlines() if line != f"# {page.title}")
            break
    exporter = HTMLExporter(  # type: ignore[no-untyped-call]
        template_name="page",
        extra_template_basedirs=[str(TEMPLATES)],
        extra_template_paths=[str(TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    exporter.environment.autoescape = True
    exporter.register_filter("markdown", _html)  # type: ignore[no-untyped-call]
    values = {"page": page, "version": __version__}
    html, _ = exporter.from_notebook_node(shown, resources={"metadata": {"name": page.name}, "lab": values})
    replace_text(target, html)


def write_index(
    pages: Sequence[Page],
    target: Path,
    *,
    subject: str = "a diffusion model",
    facts: Sequence[tuple[str, str]] = (),
    notice: str = "",
    answered: Sequence[tuple[str, Sequence[str]]] = (),
    command: str = "ddpm-lab report",
    ledger: str = "",
    calibration: Section | None = None,
) -> None:
    """Write the index: every question with its answer, figure and status, what was run, and how to run it again.

    ``subject`` is what is trained; ``answered`` is what ``answers`` gives.
    ``facts`` are pairs of a term and a value for the head of the page; ``notice`` says
    what is missing from an incomplete report; ``ledger`` is the path of the ledger relative to the page;
    ``calibration`` says how finely this machine measures, if it was asked. Raises OSError if the file cannot be
    written.
    """
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template("index.html.j2").render(
        title=TITLE.format(subject),
        pages=pages,
        answered=answered,
        facts=facts,
        notice=notice,
        command=command,
        ledger=ledger,
        calibration=calibration,
        version=__version__,
    )
    replace_text(target, html)


def write_markdown(text: str, target: Path) -> None:
    """Write Markdown as a page: its first line is the title, and pictures beside ``target`` are put into the page.

    Raises OSError if the file cannot be written.
    """
    body = str(_html(text, embed_images=True, path=str(target.parent)))
    for tag, wrapped in (("<table>", '<div class="scroll" tabindex="0"><table>'), ("</table>", "</table></div>")):
        body = body.replace(tag, wrapped)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template("markdown.html.j2").render(
        title=text.partition("\n")[0].lstrip("# "), body=Markup(body), version=__version__
    )
    replace_text(target, html)


def _html(text: str, **images: Any) -> Markup:
    """Markdown as HTML: HTML in it is shown as text, and a link goes nowhere but to the web or to a file."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    renderer = IPythonRenderer(exclude_anchor_links=True, escape=True, allow_harmful_protocols=False, **images)
    return Markup(MarkdownWithMath(renderer=renderer).render(text))


def replace_text(target: Path, text: str) -> None:
    """Write a file in one step, so that a reader, or an interrupt, never meets half of it."""
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)  # noqa: PTH105
