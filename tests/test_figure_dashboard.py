"""The pictures that a benchmark is shared with: nothing cut, nothing left out, the numbers where they belong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from paired_records import alone, family, nothing_ran, paired
from records import study
from test_figures import check_texts

from ddpm_lab.explain import figure_dashboard, figure_style
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.pairs import pairs

REASON = "the process ended with signal 9 while it was building the network; the kernel log may say more"
STUDIES = {
    "gpus": paired({16: 0.8, 32: 1.05, 64: 1.6, 128: 4.2}, {32: 6.45}),
    "ranks": paired({16: 1.1}, {8: 1.2}, device="cpu", ranks=2),
    "many": paired({2**k: 1 + k / 8 for k in range(3, 12)}, {32: 6.45, 64: 7.1, 128: 7.6}),
    "one set": paired({16: 1.1}, {8: 1.2}, count=1),
    "two noisy sets": paired(
        {16: 1.35}, {8: 1.2, 16: 1.5}, count=2, set_noise=0.9, turn_noise=0.3, device="cpu", ranks=2
    ),
    "three noisy sets": paired({16: 1.35}, {8: 9.0}, count=3, set_noise=0.9, device="cpu", ranks=2),
    "slow": paired({512: 1.9}, {512: 7.5}, step_seconds=40.0, set_noise=0.1),
    "failed": study([*family(64, 1.6), *family(128, 1.0, failed=("crashed", REASON))]),
    "all failed": nothing_ran(REASON),
    "one alone": alone(single=True),
    "several alone": alone(single=False),
    "nothing": replace(alone(single=True), records=()),
}


def words(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in figure.findobj(Text) if isinstance(t, Text))


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("draw", [figure_dashboard.dashboard, figure_dashboard.summary_table])
def test_no_text_is_cut_or_lies_on_another(name: str, draw: object) -> None:
    figure = draw(STUDIES[name])  # type: ignore[operator]
    check_texts(figure)
    assert "\N{HORIZONTAL ELLIPSIS}" not in words(figure)


def test_bars_are_as_high_as_the_numbers() -> None:
    answer = STUDIES["gpus"]
    found = pairs(answer)
    time, rate, gain, memory = figure_dashboard.dashboard(answer).axes
    rows = [row for pair in found for row in (pair.single, pair.multi) if row]
    bars = [[h for p in ax.patches if isinstance(p, Rectangle) and (h := p.get_height()) > 0] for ax in (time, rate)]
    assert bars[0] == pytest.approx([r.projected_seconds for r in rows])
    assert bars[1] == pytest.approx([r.images_per_second for r in rows])
    points = [float(np.asarray(line.get_ydata())[0]) for line in gain.lines if line.get_marker() == "o"]
    assert points == pytest.approx([p.compared.ratio.value for p in found if p.compared])
    ideals = [float(np.asarray(line.get_ydata())[0]) for line in gain.lines if line.get_linestyle() == "--"]
    assert ideals == [8] * len(found)
    assert next(t.get_text() for t in memory.get_xticklabels()).replace("\xa0", " ").split() == ["batch", "32", "each"]


def test_the_table_holds_every_configuration_with_its_evidence() -> None:
    said = words(figure_dashboard.summary_table(STUDIES["gpus"]))
    for pair in pairs(STUDIES["gpus"]):
        assert pair.compared
        assert f"{pair.compared.ratio.value:.2f}x" in said
    assert all(part in said for part in ("8 GPUs", "good", "6 sets", "2026-01-03", "Geometric mean", "not measured"))
    failed = words(figure_dashboard.summary_table(STUDIES["failed"]))
    assert REASON in failed


@pytest.mark.parametrize("name", ["one set", "two noisy sets", "three noisy sets", "gpus"])
def test_bars_stay_readable_however_wide_the_intervals(name: str) -> None:
    figure = figure_dashboard.dashboard(STUDIES[name])
    for ax in figure.axes[:2]:
        tallest = max(p.get_height() for p in ax.patches if isinstance(p, Rectangle))
        assert tallest > 0.35 * ax.get_ylim()[1]
        assert not ax.lines, "an absolute speed has no interval"
    arrows = [line for ax in figure.axes for line in ax.lines if line.get_marker() == "^"]
    assert bool(arrows) == (name == "three noisy sets")
    title = next(t.get_text() for t in figure.texts)
    assert (" to " in title) == (name == "gpus"), title


def test_the_note_says_which_sets_do_not_count() -> None:
    quiet = STUDIES["three noisy sets"]
    first = quiet.records[0].set_id
    records = tuple(
        replace(r, windows=tuple(replace(w, others_cores=1.5) for w in r.windows)) if r.set_id == first else r
        for r in quiet.records
    )
    for draw in (figure_dashboard.dashboard, figure_dashboard.summary_table):
        assert "disturbed by other processes and does not count" in words(draw(replace(quiet, records=records)))
        assert "disturbed by other processes" not in words(draw(quiet))


def test_the_ranks_of_a_cpu_are_called_so() -> None:
    for draw in (figure_dashboard.dashboard, figure_dashboard.summary_table):
        said = words(draw(STUDIES["ranks"])).replace("2 cores, no GPU", "")
        assert "2 CPU ranks" in said
        assert "GPU" not in said


def test_the_same_records_give_the_same_bytes() -> None:
    first, second = (figure_style.png(figure_dashboard.dashboard(_fresh())) for _ in range(2))
    assert first == second


def _fresh() -> Study:
    return paired({16: 1.1}, {8: 1.2}, device="cpu", ranks=2)
