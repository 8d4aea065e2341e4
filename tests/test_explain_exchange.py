"""What is said of the exchange: its cost from ranks that exchange nothing, which are never the fastest setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import records as make

from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.explain import gains
from ddpm_lab.explain.changes import NO_EXCHANGE
from ddpm_lab.explain.frames import RECOMMENDATION, Study
from ddpm_lab.questions.answers import answer
from ddpm_lab.questions.exchange import BASELINE

BASE = RunConfig(world_size=2)


def with_exchange(**changes: Any) -> RunConfig:
    return dataclasses.replace(BASE, exchange=ExchangeConfig(**changes))


def study(ratio: float, experiment: str = "exchange") -> Study:
    rows = {NO_EXCHANGE: (with_exchange(enabled=False), ratio), "bf16 hook": (with_exchange(hook="bf16"), 1.1)}
    records = make.sets(
        rows,
        baseline=BASE,
        baseline_label=BASELINE,
        experiment="exchange",
        family="tiny, batch 32, 2 ranks",
        primary="bf16 hook",
    )
    return make.study(records, experiment)


def test_the_cost_of_the_exchange_is_what_a_step_takes_less_without() -> None:
    found = answer(study(1.25)).finding
    assert found.ratio == pytest.approx(1.1, rel=0.02), "the answer is about ranks that train one network"
    assert "Without exchange a step of tiny, batch 32, 2 ranks is 20." in found.claim or "is 19." in found.claim
    assert "shorter (" in found.claim
    assert "exposed communication" in found.claim
    assert "not called shorter (ratio 1.00" in answer(study(1.0)).finding.claim


def test_ranks_without_exchange_are_not_recommended() -> None:
    assert [row.label for row in gains.measured(study(1.9, RECOMMENDATION))] == ["bf16 hook"]


def test_fewer_exchanges_are_weighed_in_a_sentence_of_their_own_and_never_lead() -> None:
    twice = dataclasses.replace(BASE, global_batch_size=64, accumulation=2)
    silent = {NO_EXCHANGE: (dataclasses.replace(twice, exchange=ExchangeConfig(enabled=False)), 1.9)}
    values: dict[str, Any] = {"baseline_label": BASELINE, "experiment": "exchange"}
    records = make.sets(
        silent, baseline=twice, family="tiny, batch 64, 2 ranks, one exchange in 2", primary="", **values
    )
    found = answer(make.study([*study(1.25).records, *records], "exchange")).finding
    assert found.ratio == pytest.approx(1.1, rel=0.02)
    assert "Without exchange a step of tiny, batch 64, 2 ranks, one exchange in 2 is 47." in found.claim
