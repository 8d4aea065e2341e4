"""What is said and drawn of batch sizes: the largest that fits, why no more, and the speed of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import records as make
from matplotlib.figure import Figure
from matplotlib.text import Text

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.batch_size import CAVEAT, sizes
from ddpm_lab.record import RunRecord

BASE = RunConfig(device="cuda", global_batch_size=128)
FAMILY = "tiny, 1 GPU, fp32"
OOM = "1,216 images are out of memory"


def of(batch: int, base: RunConfig = BASE) -> RunConfig:
    return dataclasses.replace(base, global_batch_size=batch)


def searched(limit: str = "memory", reason: str = OOM, fits: int = 1152, base: RunConfig = BASE) -> list[RunRecord]:
    """A search as the measuring half leaves it: 4 MiB an image, and 1 GiB besides."""
    found = []
    values: dict[str, Any] = {"experiment": "batch_size", "family": FAMILY, "set_id": "", "baseline_id": ""}
    tried = (128, 256, 512, 1024, 2048, 1536, 1280, 1152, 1216)
    for batch in [n for n in tried if limit == "memory" or n <= fits]:
        rank = dataclasses.replace(make.rank_record(0), peak_reserved_bytes=(1024 + 4 * batch) << 20)
        ok = batch <= fits
        found.append(
            make.record(
                of(batch, base),
                role="search",
                label=f"batch {batch}",
                status="ok" if ok else "oom",
                reason=None if ok else "no room",
                ranks=(rank,) if ok else (),
                **values,
            )
        )
    status = "ok" if fits else "oom"
    end = make.record(of(fits or 128, base), role="largest", label=limit, status=status, reason=reason, **values)
    return [*found, end]


def measured(**values: Any) -> list[RunRecord]:
    """A size twice as large takes 1.5 times as many images a second."""
    larger = {f"batch {n}": (of(n), 1.5 ** (i + 1)) for i, n in enumerate((256, 512, 1024))}
    return make.sets(
        larger, baseline=BASE, baseline_label="batch 128", experiment="batch_size", family=FAMILY, **values
    )


def study(*records: RunRecord) -> Study:
    return make.study(make.on(make.GPUS, records), "batch_size")


BOTH = study(*searched(), *measured())


def shown_in(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text() for t in figure.findobj(Text) if isinstance(t, Text)).split())


def test_the_claim_holds_speed_and_the_largest_batch() -> None:
    found = answer(BOTH).finding
    assert (found.status, found.verdict) == ("answered", "faster")
    assert found.ratio == pytest.approx(1.5, rel=0.02), "the primary comparison"
    assert "1,152 images" in found.claim
    assert CAVEAT in found.claim


@pytest.mark.parametrize(
    ("limit", "fits", "words"),
    [
        ("memory", 1, "largest batch that fits is 1 image"),
        ("cap", 512, "batch of 512 images fits, where the search ended"),
        ("failure", 512, "batch of 512 images fits, where the search ended"),
        ("memory", 0, "no batch fits"),
    ],
)
def test_a_limit_that_is_not_memory_is_not_called_the_largest_that_fits(limit: str, fits: int, words: str) -> None:
    alone = study(*searched(limit, "why", fits))
    assert words in answer(alone).finding.claim.lower()
    assert words in shown_in(answer(alone).figure()).lower()


def test_the_last_search_counts_and_other_work_does_not() -> None:
    bf16 = dataclasses.replace(BASE, precision="bf16")
    other = [dataclasses.replace(r, family="tiny, 1 GPU, bf16") for r in searched(fits=512, reason="no", base=bf16)]
    (found,) = sizes(study(*searched("time", "short", 512), *searched(), *other, *measured()))
    assert (found.largest, found.family) == (1152, FAMILY)
    assert [r.batch for r in found.rows] == [128, 256, 512, 1024]
    several = sizes(study(*searched(), *other))
    assert [(s.family, s.largest) for s in several] == [(FAMILY, 1152), ("tiny, 1 GPU, bf16", 512)]


def test_the_points_are_where_the_numbers_are() -> None:
    figure = answer(BOTH).figure()
    speed, memory = figure.axes
    drawn = {tuple(map(float, line.get_xdata())): line for ax in (speed,) for line in ax.lines}  # type: ignore[arg-type]
    rates = np.asarray(drawn[128.0, 256.0, 512.0, 1024.0].get_ydata(), dtype=float)
    assert rates[1:] / rates[:-1] == pytest.approx([1.5] * 3, rel=0.03)
    rows = [c for c in comparisons(BOTH) if c.role == "candidate"]
    upright = [
        np.column_stack(line.get_data()).tolist() for line in speed.lines if len(np.asarray(line.get_xdata())) == 2
    ]
    for c in rows:
        assert [[c.batch, rates[0] * end] for end in c.ratio.ends] in upright
    peaks = next(line for line in memory.lines if len(np.asarray(line.get_xdata())) == 5)
    assert dict(zip(*map(list, peaks.get_data()), strict=True)) == pytest.approx(  # type: ignore[arg-type]
        {n: (1024 + 4 * n) / 1024 for n in (128, 256, 512, 1024, 1152)}
    )
    crosses = [float(x) for line in memory.lines if line.get_marker() == "x" for x in np.asarray(line.get_xdata())]
    assert sorted(crosses) == [1216, 1280, 1536, 2048]
    for ax in (speed, memory):
        assert ax.get_xscale() == "log"
        assert [1152, 1152] in [list(map(float, line.get_xdata())) for line in ax.lines]  # type: ignore[arg-type]
    assert OOM in shown_in(figure)


def test_it_is_among_the_further_figures_of_the_recommendation() -> None:
    ((_, figure, name),) = answer(dataclasses.replace(BOTH, experiment="recommendation")).figures()
    assert (name, "1,152 images" in shown_in(figure)) == ("batch_size", True)
    amp = make.study(make.sets({"bf16": (RunConfig(precision="bf16"), 1.5)}), "recommendation")
    assert answer(amp).figures() == []
    assert [len(answer(study(*rows)).figure().axes) for rows in (measured(), searched())] == [1, 1]
