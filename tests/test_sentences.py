"""Headlines and ways out: short, about the primary comparison, and with the command that would give an answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, phrases, sentences
from ddpm_lab.explain.comparisons import Comparison, comparisons

BASE = RunConfig(global_batch_size=8)
BF16 = dataclasses.replace(BASE, precision="bf16")


def row(ratio: float, **values: Any) -> Comparison:
    """The comparison of bf16 with fp32, with a planted ratio."""
    found = comparisons(make.study(make.sets({"bf16": (BF16, ratio)}, baseline=BASE, **values)))
    return next(c for c in found if c.role == "candidate")


def test_a_headline_says_how_much_faster_or_slower() -> None:
    exact = {"set_noise": 0.0, "turn_noise": 1e-4}
    assert sentences.headline(row(0.74, **exact)) == "bf16 is 26 % slower than fp32"
    assert sentences.headline(row(1.5, **exact)) == "bf16 is 50 % faster than fp32"
    assert sentences.headline(row(2.3, **exact)) == "bf16 is 2.3 times as fast as fp32"
    assert sentences.headline(row(1.0, **exact)) == "bf16 is as fast as fp32, within 3 %"


def test_what_was_found_is_not_below_what_can_be_resolved() -> None:
    assert "resolves" in sentences.evidence(row(1.0, set_noise=0.04))
    assert "resolves" not in sentences.evidence(row(1.5))


def test_without_an_answer_a_headline_gives_both_ends_or_the_sets() -> None:
    wide = row(1.0, set_noise=0.04)
    assert wide.verdict == decisions.INCONCLUSIVE
    low, high = (phrases.difference(end) for end in wide.ratio.ends)
    assert f"may be anything from {low} to {high} than fp32" in sentences.headline(wide)
    assert "slower" in low
    assert "(3)" in sentences.headline(row(1.6, count=3))


def test_a_headline_says_with_how_many_cores_where_not_with_all() -> None:
    base = RunConfig(threads=1)
    some = make.sets({"bf16": (RunConfig(threads=1, precision="bf16"), 0.5)}, baseline=base)
    (found,) = (c for c in comparisons(make.study(some)) if c.role == "candidate")
    assert sentences.headline(found).endswith("than fp32 on 1 core")


@pytest.mark.parametrize(
    ("experiment", "labels"),
    [
        ("multi_gpu", ("8 GPUs on 2 hosts", "1 GPU")),
        ("workers", ("4 workers, 2 of them idle", "0 workers")),
        ("torch_compile", ("compiled", "eager")),
        ("exchange", ("bf16 hook", "plain all-reduce")),
        ("batch_size", ("batch 512", "batch 8")),
    ],
)
@pytest.mark.parametrize(
    "values", [{"ratio": 1.5}, {"ratio": 0.5}, {"ratio": 1.0}, {"ratio": 1.0, "set_noise": 0.1}, {"count": 1}]
)
def test_a_headline_is_short(experiment: str, labels: tuple[str, str], values: dict[str, Any]) -> None:
    label, base = labels
    told = {"set_noise": 0.002, **values}
    ratio = told.pop("ratio", 1.5)
    records = make.sets({label: (BF16, ratio)}, baseline_label=base, experiment=experiment, **told)
    (found,) = (c for c in comparisons(make.study(records)) if c.role == "candidate")
    short = sentences.headline(found).replace(label, "label").replace(base, "base")
    assert len([word for word in short.split() if word != "%"]) <= 20
    assert short[-1] != "."


def test_the_answer_is_about_the_primary_comparison() -> None:
    found = make.sets({"bf16": (BF16, 1.1), "compiled": (RunConfig(compile="whole"), 3.0)}, primary="bf16")
    rows = [c for c in comparisons(make.study(found)) if c.role == "candidate"]
    assert sentences.lead(rows).label == "bf16", "however fast others are"


def test_an_answer_with_all_cores_leads_where_there_is_one() -> None:
    one = RunConfig(threads=1)
    some = make.sets({"bf16": (RunConfig(threads=1, precision="bf16"), 0.7)}, baseline=one, family="1 of 2 cores")
    for ratio, noise, threads in ((1.3, 0.005, 0), (1.0, 0.1, 1)):
        every = make.sets({"bf16": (BF16, ratio)}, family="2 cores", set_noise=noise, seed=1)
        rows = [c for c in comparisons(make.study([*some, *every])) if c.role == "candidate"]
        assert sentences.lead(rows).config.threads == threads


def test_a_way_out_is_the_command_that_would_answer() -> None:
    assert sentences.way_out(row(1.6)) == "", "there is an answer"
    assert sentences.way_out(row(1.6, count=2)) == "ddpm-lab run amp"
    assert sentences.way_out(row(1.0, set_noise=0.03)).startswith("ddpm-lab run amp --resolution 3% (about ")
    assert "over two hours" in sentences.way_out(row(1.0, set_noise=0.4, stages={"steady": 60.0}))
    sides = make.sets({"my side": (BF16, 1.6)}, experiment="compare", baseline=BASE, baseline_label="main", count=2)
    (compared,) = (c for c in comparisons(make.study(sides)) if c.role == "candidate")
    assert sentences.way_out(compared) == "ddpm-lab compare main 'my side'"
    base = dataclasses.replace(BASE, network="seed")
    seed = make.sets({"bf16": (dataclasses.replace(base, precision="bf16"), 1.6)}, baseline=base, count=2)
    (large,) = (c for c in comparisons(make.study(seed)) if c.role == "candidate")
    assert sentences.way_out(large) == "ddpm-lab run amp --network seed"
    assert sentences.way_out(large, own_images=True) == "ddpm-lab run amp --network seed --data DATA"
    base = RunConfig(image_size=64, global_batch_size=32)
    sized = make.sets({"bf16": (dataclasses.replace(base, precision="bf16"), 1.6)}, baseline=base, count=2)
    (other,) = (c for c in comparisons(make.study(sized)) if c.role == "candidate")
    assert sentences.way_out(other) == "ddpm-lab run amp --image-size 64 --batch-size 32"
    reached = dataclasses.replace(row(1.0, set_noise=0.002), verdict=decisions.INCONCLUSIVE)
    assert sentences.way_out(reached) == "ddpm-lab run amp", "a resolution that is reached asks for nothing"


def test_a_baseline_needs_no_way_out() -> None:
    found = comparisons(make.study(make.sets({"bf16": (BF16, 1.0)}, set_noise=0.1)))
    assert [sentences.way_out(c) for c in found if c.role != "candidate"] == ["", ""]
