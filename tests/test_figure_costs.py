"""The cost split: bars hold the stages that were recorded, one after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import records as make
from matplotlib.patches import Rectangle

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import figure_costs, figure_style
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

COMPILED = RunConfig(compile="whole")
EAGER = {"start": 1.0, "build": 2.0, "warmup": 3.0, "steady": 4.0, "teardown": 0.5}
COLD = {"start": 1.0, "build": 2.0, "compile": 30.0, "warmup": 3.0, "teardown": 0.5}


def staged(record: RunRecord) -> RunRecord:
    stages = {**EAGER, "compile": 6.0} if record.role == "candidate" else EAGER
    cache = "warm" if record.role == "candidate" else None
    counted = {"compiled_frames": 1, "graphs": 1, "graph_breaks": 0, "recompiles": 0}
    return dataclasses.replace(record, stages=stages, compile_cache=cache, witness={"ranks": [counted]})


def study(cold: bool = True) -> Study:
    records = make.sets({"compiled": (COMPILED, 1.3)}, baseline_label="eager", experiment="torch_compile", count=2)
    values: dict[str, Any] = {"experiment": "torch_compile", "baseline_id": RunConfig().run_id, "label": "compiled"}
    alone = [dataclasses.replace(r, stages=COLD) for r in make.cold(COMPILED, [30.0], **values)]
    return make.study([staged(r) for r in records] + alone * cold)


def bars(of: Study) -> dict[float, list[tuple[float, float]]]:
    """Left end and length of the pieces of each bar."""
    with figure_style.style():
        figure = figure_costs.cost_split(of)
    assert figure is not None
    (ax,) = figure.axes
    pieces = [p for p in ax.patches if isinstance(p, Rectangle)]
    found: dict[float, list[tuple[float, float]]] = {}
    for p in pieces:
        found.setdefault(round(p.get_y(), 3), []).append((p.get_x(), p.get_width()))
    return dict(sorted(found.items()))


def test_each_bar_is_the_stages_of_its_groups_end_to_end() -> None:
    eager, warm, cold = bars(study()).values()
    assert [width for _, width in eager] == pytest.approx([1, 2, 3, 4, 0.5])
    assert [width for _, width in warm] == pytest.approx([1, 2, 6, 3, 4, 0.5])
    assert [width for _, width in cold] == pytest.approx([1, 2, 30, 3, 0.5])
    for pieces in (eager, warm, cold):
        ends = [left + width for left, width in pieces]
        assert [left for left, _ in pieces] == pytest.approx([0.0, *ends[:-1]])
    assert len(bars(study(cold=False))) == 2


def test_the_words_say_seconds_groups_and_what_was_compiled() -> None:
    with figure_style.style():
        figure = figure_costs.cost_split(study())
    assert figure is not None
    (ax,) = figure.axes
    texts = [t.get_text() for t in (*ax.texts, *figure.texts)]
    assert {"compile 30.0 s", "compile 6.00 s", "start-up 1.00 s", "36.5 s", "10.5 s"} <= set(texts)
    labels = [" ".join(t.get_text().split()) for t in ax.get_yticklabels()]
    assert labels == ["eager (4 groups)", "compiled, warm cache (2 groups)", "compiled, cold cache (1 group)"]
    assert any("1 compiled frame, 1 graph, 0 graph breaks and 0 recompiles" in " ".join(t.split()) for t in texts)


def test_medians_and_only_what_went_well() -> None:
    records = [
        dataclasses.replace(r, stages={"start": v}) for r, v in zip(study().records, (1.0, 2.0, 9.0), strict=False)
    ]
    assert figure_costs.stage_seconds(records) == {"start": 2.0}
    failed = [dataclasses.replace(r, status="crashed") if r.role == "cold" else r for r in study().records]
    assert len(bars(make.study(failed))) == 2
    amp = make.study(make.sets({"bf16": (RunConfig(precision="bf16"), 1.5)}))
    assert figure_costs.cost_split(amp) is None
