"""Executed notebooks as HTML pages, and the index over them: one file each, no script, no request."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddpm_lab import __version__
from ddpm_lab.explain.quality import IDENTICAL, NOT_ENOUGH, NOT_MEASURED, NOT_WORSE, WORSE
from ddpm_lab.explain.table import Rendered, code, literal
from ddpm_lab.files import replace

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
_TEMPLATES: dict[str, Any] = {"loader": FileSystemLoader(TEMPLATES), "undefined": StrictUndefined}
ANSWERED = "answered"
NOT_RUN, DONE, FAILED, STOPPED = "not run", "done", "failed", "stopped"
METADATA = "ddpm_lab"
"""Where an executed notebook keeps what the index reads back: in its own metadata and in those of its finding."""
RECOMMENDATION, WORKERS, FASTER = "recommendation", "workers", "faster"
_NO_SETTING = ("profile", "claims", "peers", "quality")
"""Questions whose answers are about no setting of a training."""
_UNJUDGED = (f"quality {NOT_MEASURED}", f"quality {NOT_ENOUGH}")
_JUDGED = (f"quality {NOT_WORSE}", f"quality {IDENTICAL}")


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
    earlier: bool = False
    here: str = ""

    @property
    def published(self) -> bool:
        """Whether its answer came with the checkout, of whatever machine."""
        return bool(self.finding.get("published"))

    @property
    def elsewhere(self) -> bool:
        """Whether its answer is about another machine, or came with the checkout."""
        hardware = self.finding.get("hardware")
        return self.published or bool(self.here and hardware and hardware != self.here)

    @property
    def status(self) -> str:
        """What the chip says: failed, stopped, not run, published, another machine, inconclusive, ..., or answered."""
        if self.state != DONE:
            return self.state
        status = "another machine" if self.elsewhere else str(self.finding.get("status", "no answer"))
        return "published" if self.published else status

    @property
    def kind(self) -> str:
        """How the chip is coloured: answered, unresolved, failed, or idle."""
        if self.state == DONE:
            return ANSWERED if self.status == ANSWERED else "unresolved"
        return "idle" if self.state == NOT_RUN else "failed"

    @property
    def headline(self) -> str:
        return str(self.finding.get("headline", ""))

    @property
    def facts(self) -> list[str]:
        """On what the answer rests, in short pieces."""
        evidence, hardware, date, quality = (self.finding.get(n) for n in ("evidence", "hardware", "date", "quality"))
        how = "published records, not measured here" * self.published
        pieces = (evidence, hardware, how, spoken_date(str(date or "")), quality)
        return [str(piece).removesuffix(".") for piece in pieces if piece]


def answers(pages: Sequence[Page]) -> list[tuple[str, list[str]]]:
    """What a report comes to, of this machine and run alone: what to use, what is slower or the same, and what is open.

    What is faster is told where it costs quality, or where the report has no page that weighs it. An open question
    comes with the command that would answer it; what is faster, and not judged, is one too.
    """
    mine = [p for p in pages if p.state == DONE and p.finding and not (p.elsewhere or p.earlier)]
    last = [p for p in mine if p.finding.get("experiment") == RECOMMENDATION]
    others = [p for p in mine if p.finding.get("experiment") not in (RECOMMENDATION, *_NO_SETTING)]
    shared, ways = Counter(p.headline for p in others), dict[str, list[str]]()
    for page in (*last, *others):
        judged = str(page.finding.get("quality", ""))
        unjudged = page.finding.get("verdict") == FASTER and judged.startswith(_UNJUDGED)
        told_before = page in last or any(text.startswith(page.headline) for text in ways)
        if page.kind != ANSWERED or (unjudged and not told_before):
            way = page.finding.get("way_out") or "no command decides it yet" * unjudged
            text = f"{page.headline}; {judged}" if page.kind == ANSWERED else page.headline
            text = f"{page.title} {text}" if shared[page.headline] > 1 else text  # which alone names no question
            ways.setdefault(text, []).extend([way] * bool(way))
    faster = [p.finding for p in others if p.kind == ANSWERED and p.finding.get("verdict") == FASTER]
    told = [(f.get("experiment"), f"{f.get('headline')}; {q}", q) for f in faster if (q := str(f.get("quality", "")))]
    # Workers of the lab's own trainer are weighed on no page.
    good = [text for name, text, judged in told if judged.startswith(_JUDGED) and (name == WORKERS or not last)]
    lines = {
        "Use": [p.headline.removeprefix("Use ") for p in last if p.kind == ANSWERED],
        "Faster": list(dict.fromkeys(good)),
        "Costs quality": [*dict.fromkeys(t for _, t, judged in told if judged.startswith(f"quality {WORSE}"))],
        "No gain": [p.headline for p in others if p.kind == ANSWERED and p.finding.get("verdict") != FASTER],
        "Open": [f"{headline}: {' or '.join(found)}" if found else headline for headline, found in ways.items()],
    }
    return [(name, found) for name, found in lines.items() if found]


def spoken_date(iso: str) -> str:
    """An ISO 8601 date and time, or two and " to ", as people read it, in its own zone; anything else unchanged."""
    if " to " in iso:
        return " to ".join(map(spoken_date, iso.split(" to ")))
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return moment.strftime("%-d %B %Y" if len(iso) == len("2026-01-31") else "%-d %B %Y, %H:%M")


def title(notebook: Any) -> str:
    """The question in the first line of a notebook: its first heading."""
    lines = (line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((str(line[2:].strip()) for line in lines if line.startswith("# ")), "A notebook without a title")


def read(notebook: Any, name: str, *, earlier: bool = False, here: str = "") -> Page:
    """What an executed notebook says of itself: its state, its finding, and the figure of its answer."""
    own = notebook.metadata.get(METADATA, {})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    findings = [o.metadata[METADATA] for o in outputs if METADATA in o.get("metadata", {})]
    figure = next((o for o in outputs if "image/png" in o.get("data", {})), None)
    return Page(
        name=name,
        title=title(notebook),
        state=own.get("state", STOPPED),
        error=own.get("error", ""),
        finding=findings[-1] if findings else {},
        image=figure.data["image/png"].replace("\n", "") if figure else "",
        alt=(figure and figure.metadata.get("image/png", {}).get("alt")) or f"Figure of {name}",
        earlier=earlier,
        here=here,
    )


def write_page(page: Page, notebook: Any, target: Path) -> None:
    """Write one executed notebook as HTML. Raises OSError if the file cannot be written."""
    cells = [c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    _render("page.html.j2", target, page=page, cells=cells)


def write_index(
    pages: Sequence[Page],
    target: Path,
    *,
    subject: str = "a diffusion model",
    facts: Mapping[str, str] | None = None,
    notice: str = "",
    command: str = "ddpm-lab report",
    ledger: str = "",
) -> None:
    """Write the index: every question with its answer, figure and status, what was run, and how to run it again.

    ``subject`` is what is trained; ``facts`` are terms and values for the head of the page; ``notice`` says what is
    missing from an incomplete report; ``ledger`` is the path of the ledger relative to the page. Raises OSError if the
    file cannot be written.
    """
    title, facts = f"Which settings train {subject} fastest on this machine?", facts or {}
    given = {"notice": notice, "command": command, "ledger": ledger, "facts": facts}
    _render("index.html.j2", target, title=title, pages=pages, answered=answers(pages), **given)


def write_markdown(text: str, target: Path) -> None:
    """Write Markdown as a page: its first line is the title, and pictures beside ``target`` are put into the page."""
    body = str(_html(text, embed_images=True, path=str(target.parent)))
    for tag, wrapped in (("<table>", '<div class="scroll" tabindex="0"><table>'), ("</table>", "</table></div>")):
        body = body.replace(tag, wrapped)
    _render("markdown.html.j2", target, title=text.partition("\n")[0].lstrip("# "), body=Markup(body))


def _render(template: str, target: Path, **values: Any) -> None:
    from nbconvert.filters import Highlight2HTML, ansi2html

    environment = Environment(autoescape=True, **_TEMPLATES)
    environment.filters |= {"markdown": _html, "ansi": ansi2html, "highlighted": Highlight2HTML()}  # type: ignore[no-untyped-call]
    replace(target, environment.get_template(template).render(version=__version__, **values))


def markdown(template: str, **values: Any) -> str:
    """Fill in a template of Markdown: all texts but those that are ``Rendered`` are shown as they are."""
    environment = Environment(trim_blocks=True, finalize=_escaped, **_TEMPLATES)
    environment.filters["code"] = code
    return f"{environment.get_template(template).render(**values).rstrip()}\n"


def _escaped(value: Any) -> Any:
    return literal(value) if isinstance(value, str) and not isinstance(value, Rendered) else value


def _html(text: str, **images: Any) -> Markup:
    """Markdown as HTML: HTML in it is shown as text, and a link goes nowhere but to the web or to a file."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    renderer = IPythonRenderer(exclude_anchor_links=True, escape=True, allow_harmful_protocols=False, **images)
    return Markup(MarkdownWithMath(renderer=renderer).render(text))
