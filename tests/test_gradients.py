"""What a gradient check's numbers are called: bounds by precision, flipped signs, and what cannot be judged."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import HOOKS as ALL_HOOKS
from ddpm_lab.config import PRECISIONS
from ddpm_lab.gradient_bounds import BOUNDS, FLIPS, HOOKS, fault


def step(
    gradient: float | None = 0.0, *, loss: float | None = 0.0, layer: float = 0.0, skipped: bool = False, **values: Any
) -> dict[str, Any]:
    """One step of an answer, off by so much."""
    judged = not skipped and gradient is not None
    return {
        "step": 10,
        "loss": 0.8,
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


LOSS, GRADIENT, LAYER = range(3)


def test_every_precision_has_bounds_and_fewer_bits_have_wider_ones() -> None:
    assert set(BOUNDS) == set(PRECISIONS)
    assert set(HOOKS) == set(ALL_HOOKS)
    for kind in (LOSS, GRADIENT, LAYER):
        bounds = [BOUNDS[precision][kind] for precision in ("fp32", "tf32", "bf16")]
        assert bounds == sorted(set(bounds))
    assert all(b[GRADIENT] < b[LAYER] < 1 for b in BOUNDS.values()), "a gradient of zeros, off by 1, must be found"
    assert math.sqrt(1 - BOUNDS["bf16"][GRADIENT] ** 2) > 0.98


def test_a_step_beyond_a_bound_is_named() -> None:
    names = {"loss": "the loss", "gradient": "the gradient", "layer": "the gradient of stem.bias"}
    for precision, bounds in BOUNDS.items():
        for (kind, name), bound in zip(names.items(), bounds, strict=True):
            assert fault(answer(step(), step(**dict[str, Any]({kind: 0.9 * bound})), precision=precision)) == ""
            beyond = fault(answer(step(), step(**dict[str, Any]({kind: 1.1 * bound})), precision=precision))
            assert beyond.startswith(f"{name} is off by ")
            assert f"and {precision} explains " in beyond


def test_a_hook_may_add_its_own_rounding_and_no_more() -> None:
    for hook in ("bf16", "fp16"):
        bound = HOOKS[hook][GRADIENT]
        assert not fault({**answer(step(0.9 * bound)), "hook": hook})
        assert f"fp32 with gradients exchanged in {hook}" in fault({**answer(step(1.1 * bound)), "hook": hook})
        assert fault({**answer(step(0.9 * bound)), "hook": "none"})
        assert fault({**answer(step(loss=1e-4)), "hook": hook}), "no hook has a part in the loss"


def test_a_flipped_sign_is_excused_in_one_step_of_an_l1_loss_alone() -> None:
    flipped, sound = step(0.5 * FLIPS[GRADIENT], layer=0.5 * FLIPS[LAYER]), step(1e-6, layer=1e-5)
    assert not fault(answer(sound, flipped, sound, loss="l1"))
    assert fault(answer(sound, flipped, sound, loss="l2"))
    assert fault(answer(flipped, flipped, sound, loss="l1")), "in most steps"
    assert fault(answer(sound, step(2 * FLIPS[GRADIENT]), sound, loss="l1"))
    assert fault(answer(sound, step(loss=1e-4), sound, loss="l1")), "a sign does not jump the loss"


def test_what_is_wrong_says_how_and_a_layer_alone_keeps_nobody_from_training() -> None:
    """A gradient that was not divided points where it should, twice as far."""
    undivided = answer(step(1.0, norm_ratio=2.0, layer=1.0))
    for layers in (True, False):
        found = fault(undivided, layers=layers)
        assert found.startswith("the gradient is off by 100 %")
        assert ("the gradient of stem.bias is off by 100 %" in found) == layers
        assert found.endswith("(norm 2 times the reference's, cosine 1)")
    one_layer = answer(step(3e-5, layer=0.58))
    assert fault(one_layer)
    assert fault(one_layer, layers=False) == "", "trials say what one layer costs"


def test_what_cannot_be_judged_is_not_as_expected() -> None:
    """Ranks with different gradients are found however little: over a large batch the halves' are near the whole's."""
    assert "two ranks differ by 0.1 %" in fault(answer(step(), step(ranks_error=1e-3), precision="bf16"))
    assert "skipped every step of 2" in fault(answer(step(skipped=True), step(skipped=True)))
    assert fault(answer(step(None, nonfinite=1234), nonfinite=1234)).startswith("1,234 values")
    for found in (answer(step(None)), answer(step(loss=None)), answer(step(ranks_error=None))):
        assert fault(found, layers=False)
    assert not fault(answer(step(skipped=True), step(1e-3), precision="fp16")), "skipped steps are not judged"


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
        fault(answer(*(step(g * f, loss=e * f, layer=x * f) for g, e, x in errors), precision=precision, loss=loss))
        for f in (1.0, factor)
    )
    assert worse or not found
