"""The gradient check: settings that are sound pass, planted defects do not, and checking changes nothing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import done_alone
from fresh_processes import advance, context
from torch import Tensor, nn

from ddpm_lab.config import CHECK, DiffusionConfig, ExchangeConfig, OptimizerConfig, RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.measure.alone import WARM_STEPS, compare_gradients
from ddpm_lab.record import FLIP_BOUNDS as FLIPS
from ddpm_lab.record import gradient_fault as fault
from ddpm_lab.training.gradient_check import GradientCheck, compared, gradient_check
from ddpm_lab.training.train import Trainer

CONTEXT = context()


def answer_of(config: RunConfig, kind: type[GradientCheck] = GradientCheck) -> dict[str, Any]:
    """What a warm checker finds, as the parent gets it."""
    checker = kind(config, CONTEXT)
    advance(checker, WARM_STEPS)  # so that every layer has a gradient
    answer: dict[str, Any] = json.loads(json.dumps(checker.compare(steps=2), allow_nan=False))
    checker.close()
    return answer


def test_checking_changes_nothing_of_what_is_learned(synthetic: RunConfig) -> None:
    """Also with a clipping that bites: it is done elsewhere."""
    optimizer = OptimizerConfig(clip_norm=0.05, ema_every=2)
    config = dataclasses.replace(synthetic, accumulation=2, precision="bf16", optimizer=optimizer)
    trainer, checker = Trainer(config, CONTEXT), gradient_check(config, CONTEXT)
    advance(checker, WARM_STEPS)
    answer = checker.compare(steps=2)
    assert answer is not None
    losses = advance(trainer, WARM_STEPS + 2)
    assert [(step["step"], step["loss"]) for step in answer["steps"]] == list(enumerate(losses))[WARM_STEPS:]
    assert checker.weights_sha256() == trainer.weights_sha256()
    assert checker.witness() == {**trainer.witness(), "images": 8 * WARM_STEPS}, "compared steps are not the rank's"


SOUND: list[dict[str, Any]] = [
    {"channels_last": False, "accumulation": 8, "loader": "resident"},
    {"precision": "bf16", "accumulation": 2, "kernels": "fused"},
    {"diffusion": DiffusionConfig(loss="l2", objective="v", min_snr_gamma=5.0)},
]


@pytest.mark.parametrize("settings", SOUND)
def test_sound_settings_are_as_expected(synthetic: RunConfig, settings: dict[str, Any]) -> None:
    answer = answer_of(dataclasses.replace(synthetic, **settings))
    assert fault(answer) == ""


def planted(
    before: Callable[[GradientCheck], object] = lambda _: None, after: Callable[[Tensor, int], Tensor] = lambda x, _: x
) -> type[GradientCheck]:
    """A checker that does ``before`` each loss, and changes it, given the number of micro-batches, by ``after``."""

    class Planted(GradientCheck):
        def loss(self, batch: Batch, part: slice) -> Tensor:
            before(self)
            return after(super().loss(batch, part), self.config.accumulation)

    return Planted


def underflowing(checker: GradientCheck) -> None:
    """What passes through fp16 and is below 6e-8 is zero."""
    for parameter in checker.parameters:
        parameter.register_hook(lambda g: (g * 1e-6).half().float() * 1e6)  # type: ignore[no-untyped-call]


DEFECTS = {
    "underflow": planted(before=underflowing),
    "the last micro-batch alone": planted(before=lambda checker: checker.optimizer.zero_grad()),
    "not divided": planted(after=lambda loss, parts: loss * parts - (loss * (parts - 1)).detach()),
    "a layer without a gradient": planted(before=lambda checker: checker.parameters[20].requires_grad_(False)),
}


def test_planted_defects_are_found(synthetic: RunConfig) -> None:
    """In bf16, whose bounds are the wider ones."""
    config = dataclasses.replace(synthetic, accumulation=2, precision="bf16")
    assert [name for name, kind in DEFECTS.items() if not fault(answer_of(config, kind))] == []


def test_steps_that_the_scaler_skips_are_counted_and_not_judged(synthetic: RunConfig) -> None:
    """Torch's own scaler begins so high that the first gradients overflow, and finds its scale."""
    checker = GradientCheck(synthetic, CONTEXT)
    checker.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30)
    for parameter in checker.parameters:
        nn.init.normal_(parameter, std=1.0)
    answer = checker.compare(steps=6)
    assert answer is not None
    skipped = [step["skipped"] for step in answer["steps"]]
    assert 0 < sum(skipped) < 6
    assert [step["gradient_error"] is None for step in answer["steps"]] == skipped
    assert fault({**answer, "precision": "fp16"}) == ""


def test_gradients_against_known_ones() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[0.0], [0.5]]), "c": torch.tensor([1e-9])}
    same = compared(list(reference.values()), reference)
    assert (same["gradient_error"], same["worst_layer"], same["nonfinite"]) == (0.0, {"name": "a", "error": 0.0}, 0)
    none = compared([torch.zeros_like(g) for g in reference.values()], reference)
    assert none["gradient_error"] == 1.0
    wrong = compared([reference["a"], -reference["b"].reshape(2), torch.tensor([7e-9])], reference)
    assert wrong["worst_layer"] == {"name": "b", "error": 2.0}
    assert wrong["gradient_error"] == pytest.approx(1 / 25.25**0.5)


def worst(answer: dict[str, Any], name: str) -> float:
    return max(float(step[name]) for step in answer["steps"])


@pytest.mark.slow
def test_two_ranks_are_as_expected_and_what_they_exchange_is_what_is_compared(
    synthetic: RunConfig, tmp_path: Path
) -> None:
    """Each rank computes its half, and rank 0 the whole; in two bytes a value they are rounded as these explain."""
    config = dataclasses.replace(synthetic, world_size=2, accumulation=2, oversubscribe=True)
    config = dataclasses.replace(config, purpose="check", workload=CHECK)

    def checked(exchange: ExchangeConfig) -> dict[str, Any]:
        record = done_alone(tmp_path, dataclasses.replace(config, exchange=exchange), compare_gradients, role="check")
        assert record.quality is not None, record.reason
        answer: dict[str, Any] = record.quality["gradients"]
        return answer

    together, bf16, fp16 = (checked(ExchangeConfig(hook=hook)) for hook in ("none", "bf16", "fp16"))
    assert {step["ranks_error"] for found in (together, bf16, fp16) for step in found["steps"]} == {0}
    assert fault(together) == fault(bf16) == ""
    assert fault({**bf16, "hook": "none"}), "nothing was rounded"
    assert worst(fp16, "gradient_error") < worst(bf16, "gradient_error") / 3
    assert worst(bf16, "loss_error") < 1e-6
    alone = checked(ExchangeConfig(enabled=False))
    assert worst(alone, "gradient_error") > 0.1
    assert "the gradients of two ranks differ" in fault(alone)


# What the numbers are called: bounds by precision, flipped signs, and what cannot be judged


def told(
    gradient: float | None = 0.0, *, loss: float | None = 0.0, layer: float = 0.0, skipped: bool = False, **values: Any
) -> dict[str, Any]:
    """One step of an answer, off by so much."""
    known: dict[str, Any] = {"gradient_error": gradient, "ranks_error": 0.0}
    known["worst_layer"] = {"name": "stem.bias", "error": layer}
    if skipped or gradient is None:
        known = dict.fromkeys(known)
    return {"step": 10, "loss": 0.8, "loss_error": loss, "skipped": skipped, "nonfinite": 0, **known, **values}


def made(*steps: dict[str, Any], precision: str = "fp32", loss: str = "l2") -> dict[str, Any]:
    """An answer."""
    return {"precision": precision, "loss": loss, "steps": list(steps)}


GRADIENT, LAYER = 1, 2  # places in FLIP_BOUNDS


def test_a_flipped_sign_is_excused_in_one_step_of_an_l1_loss_alone() -> None:
    flipped, sound = told(0.5 * FLIPS[GRADIENT], layer=0.5 * FLIPS[LAYER]), told(1e-6, layer=1e-5)
    assert not fault(made(sound, flipped, sound, loss="l1"))
    assert fault(made(sound, flipped, sound, loss="l2"))
    assert fault(made(flipped, flipped, sound, loss="l1")), "in most steps"
    assert fault(made(sound, told(2 * FLIPS[GRADIENT]), sound, loss="l1"))
    assert fault(made(sound, told(loss=1e-4), sound, loss="l1")), "a sign does not jump the loss"


def test_a_layer_alone_keeps_nobody_from_training_and_what_cannot_be_judged_does() -> None:
    one_layer = made(told(3e-5, layer=0.58))
    assert fault(one_layer)
    assert fault(one_layer, layers=False) == "", "trials say what one layer costs"
    assert fault(made(told(), told(ranks_error=1e-3), precision="bf16"))
    assert fault(made(told(skipped=True), told(skipped=True)))
    for found in (made(told(None, nonfinite=9)), made(told(loss=None)), made(told(ranks_error=None))):
        assert fault(found, layers=False)
    assert not fault(made(told(skipped=True), told(1e-3), precision="fp16")), "skipped steps are not judged"
