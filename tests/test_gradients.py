"""What a gradient check's numbers are called: bounds by precision, flipped signs, and what cannot be judged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import HOOKS as ALL_HOOKS
from ddpm_lab.config import PRECISIONS
from ddpm_lab.gradient_bounds import BOUNDS, FLIPS, HOOKS, failure, verdict


def step(
    gradient: float | None = 0.0, *, loss: float | None = 0.0, layer: float = 0.0, skipped: bool = False, **values: Any
) -> dict[str, Any]:
    """One step of an answer, off by so much."""
    judged = not skipped and gradient is not None
    return {
        "step": 10,
        "loss": 0.8,
        "reference_loss": 0.8,
        "loss_error": loss,
        "ranks_error": 0.0 if judged else None,
        "skipped": skipped,
        "gradient_error": gradient if judged else None,
        "cosine": 1.0 if judged else None,
        "norm_ratio": 1.0 if judged else None,
        "layers": 70 if judged else 0,
        "worst_layer": {"name": "stem.bias", "error": layer, "cosine": 1.0} if judged else None,
        "nonfinite": 0,
        **values,
    }


def answer(*steps: dict[str, Any], precision: str = "fp32", loss: str = "l2", nonfinite: int = 0) -> dict[str, Any]:
    """An answer as it comes from the ledger."""
    worst = {"nonfinite": nonfinite, "skipped": sum(s["skipped"] for s in steps)}
    values = {"precision": precision, "loss": loss, "steps": list(steps), "worst": worst}
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return found


def test_every_precision_has_bounds_and_fewer_bits_have_wider_ones() -> None:
    assert set(BOUNDS) == set(PRECISIONS)
    assert set(HOOKS) == set(ALL_HOOKS)
    for kind in ("loss", "gradient", "layer"):
        bounds = [getattr(BOUNDS[precision], kind) for precision in ("fp32", "tf32", "bf16")]
        assert bounds == sorted(set(bounds))
    assert all(b.gradient < b.layer < 1 for b in BOUNDS.values()), "a gradient of zeros, off by 1, must be found"
    assert math.sqrt(1 - BOUNDS["bf16"].gradient ** 2) > 0.98


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["loss", "gradient", "layer"])
def test_a_step_beyond_a_bound_is_named(precision: str, kind: str) -> None:
    bound = getattr(BOUNDS[precision], kind)
    within = verdict(answer(step(), step(**{kind: 0.9 * bound}), precision=precision))
    assert within.as_expected
    assert within.sentence.startswith(f"as expected for {precision}: over 2 steps the gradient is off by at most ")
    beyond = verdict(answer(step(), step(**{kind: 1.1 * bound}), precision=precision))
    assert not beyond.as_expected
    what = {"loss": "the loss", "gradient": "the gradient", "layer": "the gradient of stem.bias"}[kind]
    assert beyond.sentence.startswith(f"not as expected: {what} is off by ")
    assert f"and {precision} explains " in beyond.sentence


@pytest.mark.parametrize("hook", ["bf16", "fp16"])
def test_a_hook_may_add_its_own_rounding_and_no_more(hook: str) -> None:
    bound = HOOKS[hook].gradient
    for off, expected in ((0.9 * bound, True), (1.1 * bound, False)):
        found = verdict({**answer(step(off), step(off)), "hook": hook})
        assert found.as_expected == expected
        assert f"fp32 with gradients exchanged in {hook}" in found.sentence
        assert not verdict({**answer(step(off)), "hook": "none"}).as_expected
    assert not verdict({**answer(step(loss=1e-4)), "hook": hook}).as_expected, "no hook has a part in the loss"
    assert verdict(answer(step())) == verdict({**answer(step()), "hook": "none"}), "as in records without a hook"


def test_a_flipped_sign_is_excused_in_one_step_of_an_l1_loss_alone() -> None:
    flipped, sound = step(0.5 * FLIPS.gradient, layer=0.5 * FLIPS.layer), step(1e-6, layer=1e-5)
    assert verdict(answer(sound, flipped, sound, loss="l1")).as_expected
    assert not verdict(answer(sound, flipped, sound, loss="l2")).as_expected
    often = verdict(answer(flipped, flipped, sound, loss="l1"))
    assert not often.as_expected
    assert "in most steps" in often.sentence
    assert not verdict(answer(sound, step(2 * FLIPS.gradient), sound, loss="l1")).as_expected
    assert not verdict(answer(sound, step(loss=1e-4), sound, loss="l1")).as_expected, "a sign does not jump the loss"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_with_different_gradients_are_found_in_every_precision(precision: str) -> None:
    """However little: over a large batch the halves' gradients are near to the whole's."""
    apart = verdict(answer(step(), step(ranks_error=1e-3), precision=precision))
    assert not apart.as_expected
    assert "two ranks differ by 0.1 %" in apart.sentence
    assert not verdict(answer(step(ranks_error=None))).as_expected


def test_what_is_wrong_says_how() -> None:
    """A gradient that was not divided points where it should, twice as far."""
    found = verdict(answer(step(1.0, norm_ratio=2.0, layer=1.0)))
    assert found.sentence == (
        "not as expected: the gradient is off by 100 %, and fp32 explains 0.01 %; the gradient of stem.bias is off by "
        "100 %, and fp32 explains 0.1 % (the whole gradient is 2 times as long as it should be, at a cosine of 1)"
    )


def test_a_failure_is_told_in_a_few_words() -> None:
    """The reason for which nothing is trained: it names the worst layer and how far off everything is."""
    assert failure(answer(step(), step(1e-6, layer=1e-5))) == ""
    off = answer(step(), step(1.0, layer=0.8, loss=0.002))
    assert failure(off) == "worst layer stem.bias off by 80 %, the gradient by 100 %, the loss by 0.2 %"
    assert failure(answer(step(ranks_error=0.001))).endswith(", two ranks' gradients by 0.1 %")
    assert failure(answer(step(None, nonfinite=12), nonfinite=12)).startswith("12 values of loss and gradient")
    assert "skipped every step" in failure(answer(step(skipped=True)))
    one_layer = answer(step(3e-5, layer=0.58))
    assert not verdict(one_layer).as_expected
    assert failure(one_layer) == "", "trials say what one layer costs"


def test_what_cannot_be_judged_is_not_as_expected() -> None:
    assert "skipped every step of 2" in verdict(answer(step(skipped=True), step(skipped=True))).sentence
    infinite = verdict(answer(step(None, nonfinite=1234), nonfinite=1234))
    assert infinite.sentence == "not as expected: 1,234 values of loss and gradient are infinite or no numbers"
    for found in (answer(step(skipped=True)), answer(step(None)), answer(step(loss=None))):
        assert not verdict(found).as_expected


def test_skipped_steps_are_named_and_not_judged() -> None:
    found = verdict(answer(step(skipped=True), step(1e-3), precision="fp16"))
    assert found.as_expected
    assert found.sentence == (
        "as expected for fp16: over 1 step the gradient is off by at most 0.1 % of single precision's, that of the "
        "worst layer (stem.bias) by 0 % and the loss by 0 %; the gradient scaler skipped 1 of 2 steps"
    )


@given(
    st.sampled_from(PRECISIONS),
    st.sampled_from(["l1", "l2"]),
    st.lists(st.tuples(*[st.floats(0, 2)] * 3), min_size=1, max_size=5),
    st.floats(1, 10),
)
def test_what_is_off_by_more_is_never_judged_better(
    precision: str, loss: str, errors: list[tuple[float, float, float]], factor: float
) -> None:
    found, worse = (
        verdict(
            answer(*(step(g * f, loss=e * f, layer=x * f) for g, e, x in errors), precision=precision, loss=loss)
        ).as_expected
        for f in (1.0, factor)
    )
    assert found or not worse
