"""The gradient check: settings that are sound pass, planted defects do not, and checking changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpm_lab.config import CHECK, DiffusionConfig, ExchangeConfig, OptimizerConfig, RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.unet import NETWORKS
from ddpm_lab.gradient_bounds import fault
from ddpm_lab.measure import hardware
from ddpm_lab.measure.alone import WARM_STEPS, compare_gradients
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.sets import Instrument, Member, measure_alone
from ddpm_lab.plan import Plan
from ddpm_lab.training.gradient_check import GradientCheck, compared, gradient_check
from ddpm_lab.training.train import Trainer
from ddpm_lab.workload import RankContext

CONTEXT = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    return synthetic


def warm(trainer: Trainer) -> None:
    """Take so many steps that every layer has a gradient."""
    for batch in itertools.islice(trainer.batches(), WARM_STEPS):
        trainer.step(batch)


def answer_of(config: RunConfig, kind: type[GradientCheck] = GradientCheck) -> dict[str, Any]:
    """What a warm checker finds, as the parent gets it."""
    checker = kind(config, CONTEXT)
    warm(checker)
    answer: dict[str, Any] = json.loads(json.dumps(checker.compare(steps=2), allow_nan=False))
    checker.close()
    return answer


def judged(config: RunConfig, kind: type[GradientCheck] = GradientCheck) -> str:
    return fault(answer_of(config, kind))


def test_checking_changes_nothing_of_what_is_learned(config: RunConfig) -> None:
    """Also with a clipping that bites: it is done elsewhere."""
    config = dataclasses.replace(
        config, accumulation=2, precision="bf16", optimizer=OptimizerConfig(clip_norm=0.05, ema_every=2)
    )
    trainer, checker = Trainer(config, CONTEXT), gradient_check(config, CONTEXT)
    warm(checker)
    answer = checker.compare(steps=2)
    assert answer is not None
    losses = [float(trainer.step(batch)) for batch in itertools.islice(trainer.batches(), WARM_STEPS + 2)]
    assert [step["loss"] for step in answer["steps"]] == losses[WARM_STEPS:]
    assert [step["step"] for step in answer["steps"]] == [WARM_STEPS, WARM_STEPS + 1]
    for mine, other in ((checker.weights, trainer.weights), (checker.averages, trainer.averages)):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert checker.witness() == {**trainer.witness(), "images": 8 * WARM_STEPS}, "compared steps are not the rank's"


SOUND: list[dict[str, Any]] = [
    {"channels_last": False},
    {"accumulation": 2},
    {"accumulation": 8, "loader": "resident"},
    {"kernels": "fused"},
    {"precision": "bf16"},
    {"precision": "bf16", "accumulation": 2, "kernels": "fused"},
    {"diffusion": DiffusionConfig(loss="l2", objective="v", min_snr_gamma=5.0)},
]


@pytest.mark.parametrize("settings", SOUND)
def test_sound_settings_are_as_expected(config: RunConfig, settings: dict[str, Any]) -> None:
    answer = answer_of(dataclasses.replace(config, **settings))
    assert fault(answer) == ""
    assert all(step["layers"] == 70 for step in answer["steps"]), "a layer without a gradient is not checked"


@pytest.mark.slow
def test_other_implementations_are_as_expected(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = dataclasses.replace(NETWORKS["seed"], width=16, multipliers=(1, 2), heads=2, head_width=16)
    monkeypatch.setitem(NETWORKS, "seed", narrow)
    config = dataclasses.replace(config, network="seed")
    assert judged(dataclasses.replace(config, implementation="plain", channels_last=False)) == ""
    assert judged(dataclasses.replace(config, kernels="fused", precision="bf16")) == ""


# Dynamo looks at the gradient of what flows from block to block.


def planted(
    before: Callable[[GradientCheck], object] = lambda _: None, after: Callable[[Tensor, int], Tensor] = lambda x, _: x
) -> type[GradientCheck]:
    """A checker that does ``before`` each loss, and changes it, given the number of micro-batches, by ``after``."""

    class Planted(GradientCheck):
        def loss(self, batch: Batch, part: slice) -> Tensor:
            before(self)
            return after(super().loss(batch, part), self.config.accumulation)

    return Planted


UNDIVIDED = planted(after=lambda loss, parts: loss * parts - (loss * (parts - 1)).detach())
FROZEN = planted(before=lambda checker: checker.parameters[20].requires_grad_(False))
INFINITE = planted(after=lambda loss, _: loss * float("inf"))
DEFECTS = {
    "the last micro-batch alone": planted(before=lambda checker: checker.optimizer.zero_grad()),
    "not divided by the micro-batches": UNDIVIDED,
    "a tenth too much": planted(after=lambda loss, _: loss * 1.1),
    "a layer without a gradient": FROZEN,
    "infinite": INFINITE,
}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_planted_defects_are_found(config: RunConfig, precision: str) -> None:
    config = dataclasses.replace(config, accumulation=2, precision=precision)
    assert [name for name, kind in DEFECTS.items() if not judged(config, kind)] == []


class HalfPrecision:
    """A gradient scaler over gradients that pass through fp16, where what is below 6e-8 is zero."""

    def __init__(self, scale: float) -> None:
        self.factor = scale

    def get_scale(self) -> float:
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad.half().float() / self.factor

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        """The scale stays."""


@pytest.mark.parametrize(("scale", "sound"), [(1024.0, True), (1e-3, False), (1e-12, False)])
def test_a_scale_so_small_that_gradients_underflow_is_found(config: RunConfig, scale: float, sound: bool) -> None:
    class Scaled(GradientCheck):
        def __init__(self, config: RunConfig, context: RankContext) -> None:
            super().__init__(config, context)
            self.scaler = HalfPrecision(scale)  # type: ignore[assignment]

    answer = {**answer_of(config, Scaled), "precision": "fp16"}
    assert (fault(answer) == "") == sound
    if scale == 1e-12:
        assert answer["worst"]["gradient_error"] == 1
        assert answer["worst"]["cosine"] == 0


def test_steps_that_the_scaler_skips_are_counted_and_not_judged(config: RunConfig) -> None:
    """Torch's own scaler begins so high that the first gradients overflow, and finds its scale."""

    class Overflowing(GradientCheck):
        def __init__(self, config: RunConfig, context: RankContext) -> None:
            super().__init__(config, context)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30)

    checker = Overflowing(config, CONTEXT)
    for parameter in checker.parameters:
        nn.init.normal_(parameter, std=1.0)
    answer = checker.compare(steps=6)
    assert answer is not None
    skipped = [step["skipped"] for step in answer["steps"]]
    assert 0 < sum(skipped) < 6
    assert answer["worst"]["skipped"] == sum(skipped)
    assert answer["worst"]["nonfinite"] == 0
    for step in answer["steps"]:
        assert (step["gradient_error"] is None) == step["skipped"]
    assert fault({**answer, "precision": "fp16"}) == ""


def test_gradients_against_known_ones() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[0.0], [0.5]]), "c": torch.tensor([1e-9])}
    same = compared(list(reference.values()), reference)
    assert (same["gradient_error"], same["norm_ratio"], same["layers"], same["nonfinite"]) == (0.0, 1.0, 2, 0)
    assert same["cosine"] == pytest.approx(1)
    none = compared([torch.zeros_like(g) for g in reference.values()], reference)
    assert (none["gradient_error"], none["norm_ratio"], none["cosine"]) == (1.0, 0.0, 0.0)
    wrong = compared([reference["a"], -reference["b"].reshape(2), torch.tensor([7e-9])], reference)
    assert wrong["worst_layer"] == {"name": "b", "error": 2.0, "cosine": -1.0}
    assert wrong["gradient_error"] == pytest.approx(1 / 25.25**0.5)


@pytest.fixture
def instrument(tmp_path: Path) -> Instrument:
    return Instrument(
        code=code_version(), cache=tmp_path / "cache", usable_cores=hardware.usable_cores(), data_name="synthetic"
    )


def checked(config: RunConfig, instrument: Instrument) -> dict[str, Any]:
    """The answer in the record of a real check."""
    member = Member("check", "check", dataclasses.replace(config, purpose="check", workload=CHECK))
    record = measure_alone(
        instrument, experiment="quality", family="checks", plan=Plan(), member=member, work=compare_gradients
    )
    assert record.quality is not None, record.reason
    answer: dict[str, Any] = record.quality["gradients"]
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_are_as_expected_and_without_exchange_they_are_not(
    config: RunConfig, instrument: Instrument, accumulation: int
) -> None:
    """Each rank computes its half, and rank 0 the whole."""
    config = dataclasses.replace(config, world_size=2, accumulation=accumulation, oversubscribe=True)
    together = checked(config, instrument)
    assert together["worst"]["ranks_error"] == 0
    assert fault(together) == ""
    alone = checked(dataclasses.replace(config, exchange=ExchangeConfig(enabled=False)), instrument)
    assert alone["worst"]["gradient_error"] > 0.1
    assert "the gradients of two ranks differ" in fault(alone)


@pytest.mark.slow
def test_gradients_exchanged_in_two_bytes_are_rounded_as_their_format_explains(
    config: RunConfig, instrument: Instrument
) -> None:
    config = dataclasses.replace(config, world_size=2, oversubscribe=True)
    bf16, fp16 = (
        checked(dataclasses.replace(config, exchange=ExchangeConfig(hook=hook)), instrument)
        for hook in ("bf16", "fp16")
    )
    assert fault(bf16) == ""
    assert fault({**bf16, "hook": "none"}), "nothing was rounded"
    assert fp16["worst"]["gradient_error"] < bf16["worst"]["gradient_error"] / 3
    assert bf16["worst"]["ranks_error"] == fp16["worst"]["ranks_error"] == 0
    assert bf16["worst"]["loss_error"] < 1e-6
