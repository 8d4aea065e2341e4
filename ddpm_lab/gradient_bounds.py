"""What a gradient check says of a configuration: that it computes what its precision allows, or what is wrong.

Both halves ask: whoever measures does not train what is wrong, and whoever explains says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

BOUNDS = {
    "fp32": (1e-5, 1e-4, 1e-3),
    **dict.fromkeys(("tf32", "fp16"), (2e-3, 0.02, 0.1)),
    "bf16": (1e-2, 0.1, 0.5),
}
"""The most by which a sound step is off, relative to fp32, by precision: its loss, its gradient, its worst layer's.

Measured on a CPU over tiny and seed, both losses, several seeds, batches of 8 to 64, up to 20 steps from 0, 20 and 300
on; well above what sound settings show, and well below what a defect does. fp32 (accumulation, two ranks, compiled,
fused kernels, plain): 2e-7, 1e-5 and 3e-5; it grows with the number of values that are added up, so a GPU has room for
ten times as much. bf16: up to 9e-4, 0.04 and 0.2 in the first 40 steps; after 300 the gradient itself was smaller, and
off by 0.1, its worst layer's by 0.3. tf32 and fp16 have not been measured: both keep three bits more than bf16, so an
eighth of its errors is expected, and a fifth of its bounds granted. With an error of e the cosine is at least
sqrt(1 - e^2), and needs no bound of its own.
"""

HOOKS = {"none": (0.0, 0.0, 0.0), "bf16": (0.0, 0.01, 0.05), "fp16": (0.0, 0.002, 0.02)}
"""What an exchange by a hook may add to these: it rounds each rank's gradient, and their sum.

Measured with two gloo ranks in fp32, tiny and seed, both losses, batches of 8 and 64, after 10 and 100 steps. bf16: the
gradient was off by 2.4e-3, the worst layer's by 7e-3. fp16: the gradient by 3e-4, but a layer's that falls below what
fp16 can hold by 0.03 to 0.8: no scaler guards an exchange. For that defect there is no room here.
"""

FLIPS = (0.0, 0.02, 0.2)
"""What a flipped sign may do to one step, in any precision.

Under an L1 loss the gradient at an output turns its sign where the prediction meets its target. In fp32 rounding turns
one of N about every hundredth step, which changes the output's gradient by 2 / sqrt(N); measured in the weights': 3e-3,
and 0.02 in the worst layer's. A defect is in every step, so under an L1 loss the median step has to keep the bounds
above, and the worst step these.
"""

RANKS = 1e-6
"""The most by which ranks' gradients differ, in any precision: all of them get the same sum, to the last bit."""


def fault(answer: Mapping[str, Any], *, layers: bool = True) -> str:
    """What is wrong by the answer of a gradient check (``compare`` in ``model.gradient_check``); empty if it is sound.

    Steps that the gradient scaler skipped are not judged; at least one has to be left. Without ``layers`` no layer is
    judged alone, as for the question whether to train: an exchange in fp16 lost more than half of a bias's gradient,
    the whole gradient was off by 0.03 %, and eight trained runs were not worse.
    """
    taken = [step for step in answer["steps"] if not step["skipped"]]
    if not taken:
        return f"the gradient scaler skipped every step of {len(answer['steps'])}"
    if answer["worst"]["nonfinite"]:
        return f"{answer['worst']['nonfinite']:,} values of loss and gradient are infinite or no numbers"
    numbers = ("loss_error", "gradient_error", "worst_layer", "ranks_error")
    if any(step[name] is None for step in taken for name in numbers):
        return "the reference has no loss or gradient to compare with, or a rank's gradient is no number"
    found, hook = [], answer.get("hook", "none")
    precision = answer["precision"] + f" with gradients exchanged in {hook}" * (hook != "none")
    if (apart := max(step["ranks_error"] for step in taken)) > RANKS:
        found.append(f"the gradients of two ranks differ by {_share(apart)}, and after an exchange they are the same")
    layer = max((step["worst_layer"] for step in taken), key=lambda layer: float(layer["error"]))["name"]
    errors = {"the loss": [s["loss_error"] for s in taken], "the gradient": [s["gradient_error"] for s in taken]}
    if layers:
        errors[f"the gradient of {layer}"] = [step["worst_layer"]["error"] for step in taken]
    bounds = zip(BOUNDS[answer["precision"]], HOOKS[hook], FLIPS, strict=True)
    for (what, off), (own, hooked, flips) in zip(errors.items(), bounds, strict=False):
        once = max(own + hooked, flips) if answer["loss"] == "l1" else own + hooked
        if max(off) > once or statistics.median_low(off) > own + hooked:
            found.append(f"{what} is off by {_share(max(off))}, and {precision} explains {_share(own + hooked)}")
    if found:
        worst = max(taken, key=lambda step: float(step["gradient_error"]))
        found[-1] += f" (norm {worst['norm_ratio']:.3g} times the reference's, cosine {worst['cosine']:.3g})"
    return "; ".join(found)


def _share(error: float) -> str:
    """A relative error in percent, or as a power of ten where that would be mostly zeros."""
    if 0 < error < 1e-4:
        return f"{error:.0e}"
    return f"{100 * error:.0f} %" if error > 0.1 else f"{100 * error:.2g} %"
