"""S003's comparison report: one device against several for each batch, with what each number rests on, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddpm_lab.explain import findings, phrases, scaling, sentences
from ddpm_lab.explain.bands import S000, documents
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.decisions import LEAST_SETS
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import Grid, literal, markdown
from ddpm_lab.explain.pairs import (
    EPOCH,
    RECOMMENDATIONS,
    Pair,
    beyond,
    in_words,
    layout,
    means,
    pairs,
    quality,
    rating,
    recommendation,
    speed_up,
    unit,
    where,
)

_MORE = ("95 % interval", "Sets", "Quality")
ARITHMETIC = "S003's mean speed-up is arithmetic and favours large ratios: of 2x and 0.5x it makes 1.25x, ours 1x."


def title(study: Study) -> str:
    """Such as "1 GPU against 8 GPUs: seed"."""
    single, several = layout(pairs(study))
    networks = phrases.joined(list(dict.fromkeys(r.config.network for r in study.records)))
    return f"{single} against {several}: {networks}"


def report(study: Study, figure: str = "") -> str:
    """The whole report; ``figure`` is the file name of a picture beside it."""
    found = pairs(study)
    strong, weak = ([p for p in found if p.kind == kind] for kind in ("strong", "weak"))
    parts = [f"# {title(study)}", literal(where(study)), f"**Conclusion.** {literal(conclusion(found))}"]
    if strong:
        told = [mean.sentence() for mean in means(strong)]
        told += [ARITHMETIC] if told else []
        parts += ["## The same batch, shared", markdown(_strong(strong)), " ".join(told), _thresholds(found)]
    if weak:
        parts += ["## The same batch on each", markdown(_weak(weak)), _bands(found)]
    if figure:
        parts.append(f"![{title(study)}]({figure})")
    answer = findings.finding(replace(study, bands=S000))
    parts += ["## What the numbers rest on", literal(answer.claim), *_rests_on(study)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _rests_on(study: Study) -> list[str]:
    rows = scaling.rows(study)
    twins = [r for r in rows if r.role == "twin" and r.sets]
    floor = [f"{r.family}: {phrases.interval(r)}" for r in twins if phrases.interval(r)]
    lines = [
        "Every speed-up is paired: in each set both sides run in fresh processes and take turns. The interval is "
        f"Student's t over sets. A verdict needs {LEAST_SETS} sets; the question's primary comparison is tested on its "
        "own, the others are corrected for their number (Holm)."
    ]
    if floor:
        lines.append(f"One {unit(pairs(study))} against itself: {'; '.join(floor)}.")
    if sentences.quality(rows) == "quality not measured":
        lines.append("Quality is not measured: `--seeds 8` with `ddpm-lab run multi_gpu` does so.")
    lines += [said] if (said := beyond(study)) else []
    return [*lines, documents(S000.whose, RECOMMENDATIONS.whose)]


def conclusion(found: Sequence[Pair]) -> str:
    """What the shared batches come to, by S003's words; of batches on each device where nothing was shared."""
    strong = [p for p in found if p.kind == "strong"]
    if not any(p.compared for p in found):
        return f"Nothing was compared: {recommendation(found[0])}." if found else "Nothing was measured."
    told: dict[str, list[str]] = {}
    for pair in strong:
        told.setdefault(recommendation(pair).partition(" (")[0], []).append(str(pair.batch))
    words = [f"{name} at batch {phrases.joined(batches)}" for name, batches in told.items()]
    text = f"With the batch shared: {'; '.join(words)}." if words else ""
    weak = [p for p in found if p.kind == "weak" and p.compared]
    each = [f"{speed_up(p.multi)} at batch {p.batch} each, {phrases.outcome(p.multi)}" for p in weak if p.multi]
    return " ".join(part for part in (text, f"With a batch of its own: {'; '.join(each)}." if each else "") if part)


def _strong(found: Sequence[Pair]) -> Grid:
    head = ["Batch Size", *_sides(found), "Speedup", "Recommendation", *_MORE]
    rows = []
    for pair in found:
        steps = _both(pair, found, "step_seconds", " a step")
        rows.append([pair.batch, *steps, _speed_up(pair), recommendation(pair), *_rest(pair)])
    return [head, *rows]


def _weak(found: Sequence[Pair]) -> Grid:
    epochs = [f"{side}, epoch" for side in _sides(found)]
    head = [f"Batch Size per {unit(found)}", "In all", *epochs, "Speedup", "Efficiency", *_MORE]
    rows = []
    for pair in found:
        row = pair.compared
        efficiency = phrases.DASH if row is None else f"{scaling.efficiency(row)} ({rating(row, S000)})"
        total = pair.multi.batch if pair.multi else pair.batch
        epochs = _both(pair, found, "projected_seconds", "")
        rows.append([pair.batch, total, *epochs, _speed_up(pair), efficiency, *_rest(pair)])
    return [head, *rows]


def _both(pair: Pair, found: Sequence[Pair], name: str, of: str) -> list[str]:
    """Both sides of a pair; where pairs are of several numbers of devices, each says its own."""
    several = len({scaling.layout(p.multi.config) for p in found if p.multi}) > 1
    return [_cell(pair.single, name, of, layout=False), _cell(pair.multi, name, of, layout=several)]


def _sides(found: Sequence[Pair]) -> tuple[str, str]:
    return ("Single GPU", "Multi GPU") if unit(found) == "GPU" else ("Single CPU rank", "Several CPU ranks")


def _cell(row: Comparison | None, name: str, of: str, *, layout: bool) -> str:
    """Seconds of a step, or of an epoch, of one side; ``layout`` adds on what it ran."""
    if row is None:
        return "not asked for"
    if not row.sets:
        return phrases.without_speed(row)
    return f"{phrases.seconds(getattr(row, name))}{of}" + f" ({scaling.layout(row.config)})" * layout


def _speed_up(pair: Pair) -> str:
    return phrases.DASH if pair.compared is None else speed_up(pair.compared)


def _rest(pair: Pair) -> list[str]:
    row = pair.compared
    if row is None:
        return [phrases.DASH, str(max((r.sets for r in pair.sides), default=0)), quality(pair)]
    return [phrases.interval(row) or "no interval", str(row.sets), quality(pair)]


def _thresholds(found: Sequence[Pair]) -> str:
    names = [in_words(name, found) for name, _ in RECOMMENDATIONS.table]
    (_, high), (_, low), _ = RECOMMENDATIONS.table
    return (
        f"Recommendation, by S003's table: {names[0]} from {high:g}x, {names[1]} from {low:g}x, {names[2]} below, and "
        "only where the speed-up is resolved: it is faster or slower beyond what the sets leave open."
    )


def _bands(found: Sequence[Pair]) -> str:
    return (
        f"Each {unit(found)} keeps its batch, so several take larger steps and fewer of them: speeds compare equal "
        f"numbers of images, and the trainings are not the same. {EPOCH} Efficiency by S000's bands: {S000.sentence()}."
    )
