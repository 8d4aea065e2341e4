"""The time budget as one picture: a step as a bar, cut into its phases."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases
from ddpm_lab.explain.budget import Budget, Line

RESIDUAL = "in no phase"
_COLOURS = {bd.IO: fs.PALETTE[1], bd.TRANSFER: fs.PALETTE[2], bd.COMPUTE: fs.PALETTE[0], bd.OTHER: fs.FAINT}
_LEFT, _RIGHT, _EDGE = 0.3, 0.45, 0.14  # inches beside the bars; labels may reach into the margin by the last
_WIDTH = fs.WIDTH - _LEFT - _RIGHT
_FOOT, _STRIP, _BAR, _LABELS = 0.06, 0.24, 0.62, 0.56  # inches under the bar, of each strip, the bar, labels above it
_SHOWN = 0.0005
"""Smaller phases are named in the note."""


@dataclass(frozen=True, slots=True)
class _Bar:
    heading: str
    line: Line
    beside: tuple[tuple[str, str, float], ...] = ()  # what, its class, seconds beside computing


def figure(found: Budget, context: str) -> Figure:
    """One bar for training as it runs, one for the rank that waits most, one with each phase waited for."""
    bars = _bars(found)
    longest = 1e3 * max(bar.line.step_seconds for bar in bars)
    sheet, axes = fs.sheet(
        bd.headline(found),
        f"{context} \N{MIDDLE DOT} {phrases.plural(found.steps, 'step')} for each bar",
        [_LABELS + _BAR + _STRIP * len(bar.beside) + _FOOT for bar in bars],
        headings=[bar.heading for bar in bars],
        left=_LEFT,
        right=_RIGHT,
        bottom=0.84,
        gap=0.12,
        note=_note(found, bars),
    )
    for ax, bar in zip(axes, bars, strict=True):
        _draw(ax, bar, longest)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))
    axes[-1].set_xlabel("milliseconds per step, wall time")
    shown = {bd.class_of(name) for bar in bars for name in bar.line.phases}
    handles = [Patch(facecolor=colour, lw=0, label=kind) for kind, colour in _COLOURS.items() if kind in shown]
    handles.append(Patch(facecolor="white", edgecolor=fs.SOFT, hatch="////", lw=0.8, label=RESIDUAL))
    axes[-1].legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -0.52 / (axes[-1].get_position().height * sheet.get_size_inches()[1])),
        borderaxespad=0,
        borderpad=0,
        ncols=len(handles),
        frameon=False,
        fontsize=fs.SMALL_POINTS,
        handlelength=1.2,
    )
    return sheet


def _note(found: Budget, bars: list[_Bar]) -> str:
    text = f"Compute share {bd.percent(found.running.share(bd.COMPUTE))}: the part of the wall time that is spent in "
    text += "forward, backward, optimizer and weight averaging (EMA). "
    if any(bar.beside for bar in bars):
        text += "A thin bar ran beside the phases above it. "
    if not found.on_device and not found.others:
        text += "On one CPU rank there is nothing to wait for: the two bars differ by noise. "
    if small := [name for name in found.running.phases if found.running.share(name) < _SHOWN]:
        text += f"Below 0.1 %: {phrases.joined(small)}. "
    return text + (f"{found.disturbance}." if found.disturbance else "")


def _bars(found: Budget) -> list[_Bar]:
    beside = tuple(
        (
            f"{phrases.seconds(overlapped)} of {'loading' if name == 'data' else name} beside computing",
            bd.class_of(name),
            overlapped,
        )
        for name, (_, overlapped) in found.beside.items()
        if name != bd.WORKERS and overlapped > 0.005 * found.running.step_seconds
    )
    whose = f"Rank {found.rank}, the slowest, as" if found.others else "As"
    bars = [_Bar(f"{whose} training runs: {phrases.seconds(found.running.step_seconds)} a step", found.running, beside)]
    if found.others:
        rank = max(found.others, key=lambda r: found.others[r].phases.get("communication", 0.0))
        most = ", which waits most" if len(found.others) > 1 else ""
        step = phrases.seconds(found.others[rank].step_seconds)
        bars.append(_Bar(f"Rank {rank}{most}, as training runs: {step} a step", found.others[rank]))
    what = "communication" if found.others and not found.on_device else "the device"
    step = phrases.seconds(found.waiting.step_seconds)
    return [*bars, _Bar(f"Waiting for {what} at the end of each phase: {step} a step", found.waiting)]


def _draw(ax: Axes, bar: _Bar, longest: float) -> None:
    """The bar, in milliseconds from left to right and inches from bottom to top."""
    scale = _WIDTH / longest  # inches per millisecond
    low = _STRIP * len(bar.beside) + _FOOT
    ax.set_xlim(0, longest)
    ax.set_ylim(0, low + _BAR + _LABELS)
    ax.set_yticks([])
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    at, narrow, ends = 0.0, [], {}
    for name, seconds in [*bar.line.phases.items(), (RESIDUAL, bar.line.residual_seconds)]:
        wide, share = 1e3 * max(0.0, seconds), seconds / bar.line.step_seconds
        middle, rest = at + wide / 2, name == RESIDUAL
        colour = "white" if rest else _COLOURS[bd.class_of(name)]
        ax.bar(
            at,
            _BAR,
            wide,
            low,
            align="edge",
            facecolor=colour,
            edgecolor=fs.SOFT if rest else "white",
            hatch="////" if rest else None,
            lw=0.8 if wide * scale > 0.04 else 0,
        )
        at += wide
        ends[name] = at
        text = f"{name}\n{bd.percent(share)}"
        if fs.block_width(text) + 0.06 <= wide * scale:
            ink = "white" if bd.class_of(name) == bd.COMPUTE else fs.INK
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5} if rest else None
            ax.text(
                middle, low + _BAR / 2, text, ha="center", va="center", color=ink, fontsize=fs.SMALL_POINTS, bbox=box
            )
        elif rest or share >= _SHOWN:
            narrow.append((scale * middle, text))
    for (own, text), place in zip(narrow, _places(narrow), strict=True):
        ax.plot([own / scale, place / scale], [low + _BAR, low + _BAR + 0.16], color=fs.FAINT, lw=0.8)
        ax.text(place / scale, low + _BAR + 0.18, text, ha="center", va="bottom", fontsize=fs.SMALL_POINTS)
    for i, (text, kind, seconds) in enumerate(bar.beside):
        # Drawn up to the end of the backward pass, beside which most of it runs.
        right = ends.get("backward", at)
        left, y = max(0.0, right - 1e3 * seconds), low - _STRIP * (i + 1) + 0.04
        ax.bar(left, 0.14, right - left, y, align="edge", color=_COLOURS[kind], lw=0)
        room = fs.width(text) + 0.1
        x, side, box = (left + right) / 2, "center", {"facecolor": "white", "edgecolor": "none", "pad": 1}
        if room <= _WIDTH - right * scale:
            x, side, box = right + 0.06 / scale, "left", None
        elif room <= left * scale:
            x, side, box = left - 0.06 / scale, "right", None
        ax.text(x, y + 0.07, text, ha=side, va="center_baseline", fontsize=fs.SMALL_POINTS, bbox=box)


def _places(labels: list[tuple[float, str]]) -> list[float]:
    """Middles in inches for labels in a row, each as near to its own as its neighbours and the edges allow."""
    half = [fs.block_width(text) / 2 + 0.06 for _, text in labels]
    places: list[float] = []
    edge = -_EDGE
    for (middle, _), wide in zip(labels, half, strict=True):
        places.append(max(middle, edge + wide))
        edge = places[-1] + wide
    edge = _WIDTH + _RIGHT - 0.1
    for i in reversed(range(len(places))):
        places[i] = min(places[i], edge - half[i])
        edge = places[i] - half[i]
    return places
