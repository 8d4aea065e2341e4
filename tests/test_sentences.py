"""Headlines and ways out: short, about the primary comparison, and with the command that would give an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, phrases, sentences
from ddpm_lab.explain.comparisons import Comparison, comparisons

BASE = RunConfig(global_batch_size=8)


def rows(found: list[Any]) -> list[Comparison]:
    return [c for c in comparisons(make.study(found)) if c.role == "candidate"]


def row(ratio: float, baseline: RunConfig = BASE, label: str = "bf16", **values: Any) -> Comparison:
    """The comparison of bf16 with fp32, with a planted ratio."""
    bf16 = replace(baseline, precision="bf16")
    return rows(make.sets({label: (bf16, ratio)}, baseline=baseline, **values))[0]


@pytest.mark.parametrize(
    ("ratio", "headline"),
    [
        (0.74, "bf16 is 26 % slower than fp32"),
        (2.3, "bf16 is 2.3 times as fast as fp32"),
        (1.0, "bf16 is as fast as fp32, within 3 %"),
    ],
)
def test_a_headline_says_how_much_faster_or_slower(ratio: float, headline: str) -> None:
    assert sentences.headline(row(ratio, set_noise=0.0, turn_noise=1e-4)) == headline
    one = row(ratio, replace(BASE, threads=1), set_noise=0.0, turn_noise=1e-4)
    assert sentences.headline(one) == f"{headline} on 1 core"


def test_without_an_answer_a_headline_gives_both_ends_or_the_sets() -> None:
    wide = row(1.0, set_noise=0.04)
    low, high = (phrases.difference(end) for end in wide.ratio.ends)
    assert f"{low} to {high} than fp32" in sentences.headline(wide)
    assert "(3)" in sentences.headline(row(1.6, count=3))
    assert "resolves" in sentences.evidence(wide)
    assert "resolves" not in sentences.evidence(row(1.5)), "what was found may be smaller"


@pytest.mark.parametrize(
    ("experiment", "label", "base"),
    [
        ("multi_gpu", "8 GPUs on 2 hosts", "1 GPU"),
        ("workers", "4 workers, 2 of them idle", "0 workers"),
        ("torch_compile", "compiled", "eager"),
        ("exchange", "bf16 hook", "plain all-reduce"),
        ("batch_size", "batch 512", "batch 8"),
    ],
)
@pytest.mark.parametrize("values", [{}, {"ratio": 1.0}, {"ratio": 1.0, "set_noise": 0.1}, {"count": 1}])
def test_a_headline_has_at_most_fifteen_words(experiment: str, label: str, base: str, values: dict[str, Any]) -> None:
    told = {"ratio": 1.5, "set_noise": 0.002, **values}
    found = row(label=label, baseline_label=base, experiment=experiment, **told)
    short = sentences.headline(found).replace(label, "label").replace(base, "base")
    assert len([word for word in short.split() if word != "%"]) <= 17
    assert short[-1] != "."


def test_the_answer_is_about_the_primary_comparison_with_all_cores_where_there_is_one() -> None:
    compiled = replace(BASE, compile="whole")
    bf16 = replace(BASE, precision="bf16")
    both = make.sets({"bf16": (bf16, 1.1), "compiled": (compiled, 3.0)}, baseline=BASE, primary="bf16")
    assert sentences.lead(rows(both)).label == "bf16", "however fast others are"
    one = replace(BASE, threads=1)
    some = make.sets({"bf16": (replace(bf16, threads=1), 0.7)}, baseline=one, family="1 of 2 cores")
    for ratio, noise, threads in ((1.3, 0.005, 0), (1.0, 0.1, 1)):
        every = make.sets({"bf16": (bf16, ratio)}, baseline=BASE, family="2 cores", set_noise=noise, seed=1)
        assert sentences.lead(rows([*some, *every])).config.threads == threads


def test_a_way_out_is_the_command_that_would_answer() -> None:
    assert sentences.way_out(row(1.6)) == "", "there is an answer"
    assert sentences.way_out(row(1.6, count=2)) == "ddpm-lab run amp"
    assert sentences.way_out(row(1.0, set_noise=0.03)).startswith("ddpm-lab run amp --resolution 3% (about ")
    assert "over two hours" in sentences.way_out(row(1.0, set_noise=0.4, stages={"steady": 60.0}))
    reached = replace(row(1.0, set_noise=0.002), verdict=decisions.INCONCLUSIVE)
    assert sentences.way_out(reached) == "ddpm-lab run amp", "a resolution that is reached asks for nothing"
    sides = row(1.6, label="my side", baseline_label="main", experiment="compare", count=2)
    assert sentences.way_out(sides) == "ddpm-lab compare main 'my side'"
    large = row(1.6, replace(BASE, network="seed"), count=2)
    assert sentences.way_out(large, own_images=True) == "ddpm-lab run amp --network seed --data DATA"
    sized = row(1.6, RunConfig(image_size=64, global_batch_size=32), count=2)
    assert sentences.way_out(sized) == "ddpm-lab run amp --image-size 64 --batch-size 32"
    every = comparisons(make.study(make.sets({}, set_noise=0.1)))
    assert [sentences.way_out(c) for c in every] == ["", ""], "a baseline needs none"
