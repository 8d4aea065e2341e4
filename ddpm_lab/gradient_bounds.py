"""What a gradient check says of a configuration: that it computes what its precision allows, or what is wrong.

Both halves ask: whoever measures does not train what is wrong, and whoever explains says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most by which a sound step is off, relative to fp32: its loss, its whole gradient, its worst layer's.

    The cosine needs no bound of its own: with an error of e it is at least sqrt(1 - e^2), so 0.1 implies 0.995.
    """

    loss: float
    gradient: float
    layer: float


BOUNDS = {
    "fp32": Bounds(loss=1e-5, gradient=1e-4, layer=1e-3),
    "tf32": Bounds(loss=2e-3, gradient=0.02, layer=0.1),
    "fp16": Bounds(loss=2e-3, gradient=0.02, layer=0.1),
    "bf16": Bounds(loss=1e-2, gradient=0.1, layer=0.5),
}
"""By precision: well above what sound settings show, well below what a defect does.

Measured on a CPU over the networks tiny and seed, both losses, several seeds and batches of 8 to 64, in up to 20 steps
from 0, 20 and 300 on. fp32, with accumulation, with two ranks, compiled, with joined kernels, and of the plain
implementation: the loss was off by up to 2e-7, the gradient by 1e-5 and the worst layer's by 3e-5. That grows with the
number of values that are added up, which is larger on a GPU, so there is room for ten times as much. bf16: up to 9e-4,
0.04 and 0.2 in the first 40 steps; after 300 the gradient itself was smaller, and off by up to 0.1, its worst layer's
by 0.3. The worst layers are mostly biases, whose gradients are sums over all positions. tf32 and fp16 need a GPU and
have not been measured: both keep three bits more than bf16, so an eighth of its errors is expected, and a fifth of its
bounds granted.

The gradients of two halves of a large batch may differ by less than bf16 explains. What mistakes one for the whole
shows in the same configuration in fp32.
"""

HOOKS = {
    "none": Bounds(loss=0.0, gradient=0.0, layer=0.0),
    "bf16": Bounds(loss=0.0, gradient=0.01, layer=0.05),
    "fp16": Bounds(loss=0.0, gradient=0.002, layer=0.02),
}
"""What an exchange by a hook may add to these: it rounds each rank's gradient, and their sum.

Measured with two gloo ranks in fp32, the networks tiny and seed, both losses, batches of 8 and 64, after 10 and 100
steps. bf16: the gradient was off by 2.3e-3 to 2.4e-3, the worst layer's by up to 7e-3. fp16: the gradient by 3e-4, but
where a layer's gradient falls below what fp16 can hold, that layer's by 0.03 to 0.8 (tiny, in each of four runs): no
scaler guards an exchange. That is a defect for which there is no room here.
"""

RANKS = 1e-6
"""The most by which ranks' gradients differ, in any precision: all of them get the same sum, to the last bit."""

FLIPS = Bounds(loss=0.0, gradient=0.02, layer=0.2)
"""What a flipped sign may do to one step, in any precision.

Under an L1 loss the gradient at the output has the same size everywhere, and its sign turns where the prediction meets
its target. In fp32 the rounding of N outputs turns one of these signs about every hundredth step. That changes the
output's gradient by 2 / sqrt(N); measured in the weights': 3e-3, and 0.02 in the worst layer's. A defect is in every
step, so under an L1 loss the median step has to keep the bounds above, and the worst step these.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a configuration computes what it should, and a sentence that says so, without a full stop."""

    as_expected: bool
    sentence: str


def verdict(answer: Mapping[str, Any]) -> Verdict:
    """Judge the answer of a gradient check (``compare`` in ``model.gradient_check``).

    Steps that the gradient scaler skipped are named and not judged; at least one has to be left.
    """
    precision, steps = _arithmetic(answer), answer["steps"]
    taken = [step for step in steps if not step["skipped"]]
    faults = _faults(answer, taken)
    if faults:
        return Verdict(as_expected=False, sentence=f"not as expected: {'; '.join(faults)}")
    layer = max((step["worst_layer"] for step in taken), key=lambda layer: float(layer["error"]))
    sentence = (
        f"as expected for {precision}: over {len(taken)} step{'s' * (len(taken) != 1)} the gradient is off by at most "
        f"{_share(max(step['gradient_error'] for step in taken))} of single precision's, that of the worst layer "
        f"({layer['name']}) by {_share(layer['error'])} and the loss by {_share(max(s['loss_error'] for s in taken))}"
    )
    if len(taken) < len(steps):
        sentence += f"; the gradient scaler skipped {len(steps) - len(taken)} of {len(steps)} steps"
    return Verdict(as_expected=True, sentence=sentence)


def failure(answer: Mapping[str, Any]) -> str:
    """Why a configuration is not worth hours of training, in a few words; empty where it is.

    One layer alone that is off does not decide: an exchange in fp16 lost more than half of a bias's gradient, the whole
    gradient was off by 0.03 %, and eight trained runs were not worse. It is told, and trials say what it costs.
    """
    taken = [step for step in answer["steps"] if not step["skipped"]]
    faults = _faults(answer, taken, layers=False)
    numbers = ("worst_layer", "gradient_error", "loss_error", "ranks_error")
    if not faults or not taken or any(step[name] is None for step in taken for name in numbers):
        return "".join(faults[:1])
    layer = max((step["worst_layer"] for step in taken), key=lambda layer: float(layer["error"]))
    gradient, loss, ranks = (max(float(step[name]) for step in taken) for name in numbers[1:])
    found = f"worst layer {layer['name']} off by {_share(layer['error'])}, "
    found += f"the gradient by {_share(gradient)}, the loss by {_share(loss)}"
    return f"{found}, two ranks' gradients by {_share(ranks)}" if ranks > RANKS else found


def _faults(answer: Mapping[str, Any], taken: Sequence[Mapping[str, Any]], *, layers: bool = True) -> list[str]:
    """What is wrong, each in words; empty for a sound configuration. Without ``layers`` no single one is judged."""
    if not taken:
        return [f"the gradient scaler skipped every step of {len(answer['steps'])}"]
    if answer["worst"]["nonfinite"]:
        return [f"{answer['worst']['nonfinite']:,} values of loss and gradient are infinite or no numbers"]
    if any(step["worst_layer"] is None or step["loss_error"] is None for step in taken):
        return ["the reference has no loss or no gradient to compare with"]
    if any(step["ranks_error"] is None for step in taken):
        return ["a rank's gradient is infinite or no number, and rank 0's is not"]
    own, hook, precision = BOUNDS[answer["precision"]], HOOKS[answer.get("hook", "none")], _arithmetic(answer)
    worst_layers = [step["worst_layer"] for step in taken]
    layer = max(worst_layers, key=lambda layer: float(layer["error"]))
    found = []
    apart = max(step["ranks_error"] for step in taken)
    if apart > RANKS:
        found.append(f"the gradients of two ranks differ by {_share(apart)}, and after an exchange they are the same")
    for what, errors, bound, flips in (
        ("the loss", [s["loss_error"] for s in taken], own.loss + hook.loss, FLIPS.loss),
        ("the gradient", [s["gradient_error"] for s in taken], own.gradient + hook.gradient, FLIPS.gradient),
        (f"the gradient of {layer['name']}", [x["error"] for x in worst_layers], own.layer + hook.layer, FLIPS.layer),
    )[: 3 if layers else 2]:
        l1 = answer["loss"] == "l1"
        often, once = statistics.median_low(errors), max(errors)
        if once > (max(bound, flips) if l1 else bound):
            found.append(f"{what} is off by {_share(once)}, and {precision} explains {_share(bound)}")
        elif often > bound:
            found.append(f"{what} is off by {_share(often)} in most steps, and {precision} explains {_share(bound)}")
    if found:
        worst = max(taken, key=lambda step: float(step["gradient_error"]))
        found[-1] += (
            f" (the whole gradient is {worst['norm_ratio']:.3g} times as long as it should be, at a cosine of "
            f"{worst['cosine']:.3g})"
        )
    return found


def _arithmetic(answer: Mapping[str, Any]) -> str:
    """In what a step computes, such as "fp32", or "fp32 with gradients exchanged in bf16"."""
    hook = answer.get("hook", "none")
    return str(answer["precision"]) + ("" if hook == "none" else f" with gradients exchanged in {hook}")


def _share(error: float) -> str:
    """A relative error in percent, or as a power of ten where that would be mostly zeros."""
    if 0 < error < 1e-4:
        return f"{error:.0e}"
    return f"{100 * error:.0f} %" if error > 0.1 else f"{100 * error:.2g} %"
