"""What a profile says: exclusive time of operators, grouped into classes, each second counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_lab.explain import phrases
from ddpm_lab.record import RunRecord

CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("c10d", "nccl", "gloo", "allreduce", "all_reduce", "broadcast", "reducer", "distributed")),
    ("optimizer and averaging", ("optimizer", "_foreach_", "_fused_adam", "multi_tensor", "lerp", "vector_norm")),
    ("convolution", ("conv", "wgrad", "dgrad", "fprop", "winograd")),
    ("matrix product, attention", ("mm", "linear", "matmul", "einsum", "attention", "softmax", "gemm", "::dot")),
    ("normalisation", ("norm",)),
    ("copy and memory", ("cop", "::to", "clone", "contiguous", "::cat", "empty", "fill_", "zero", "memcpy", "memset")),
    ("copy and memory", ("resize", "strided", "view", "pad", "index", "gather", "slice", "select", "pin_", "upsample")),
    ("element-wise, sums", ("silu", "gelu", "sigmoid", "add", "mul", "sub", "div", "neg", "abs", "exp", "pow", "sqrt")),
    ("element-wise, sums", ("sum", "mean", "elementwise", "reduce", "sin", "cos", "clamp", "where", "sign", "::l1_")),
)
"""Class and the parts of a name that put an operator into it; the first that fits decides, else it is "other"."""

OTHER = "other"
PLURALS = {
    "convolution": "convolutions",
    "matrix product, attention": "matrix products and attention",
    "element-wise, sums": "element-wise operations and sums",
    "optimizer and averaging": "optimizer and weight averaging",
    "copy and memory": "copies and memory",
    OTHER: "other operators",
}
"""Classes as the subject of a sentence."""


def latest_profile(records: Sequence[RunRecord]) -> RunRecord | None:
    """The profile that was recorded last; of several ranks or configurations, the last one written."""
    return next((r for r in reversed(records) if r.role == "profile" and r.status == "ok" and r.profile), None)


def operator_class(name: str) -> str:
    """The class of an operator or kernel, by its name."""
    lowered = name.lower()
    return next((label for label, parts in CLASSES if any(part in lowered for part in parts)), OTHER)


def on_device(record: RunRecord) -> bool:
    """Whether a profile holds device time, which then is what its shares are taken of."""
    return any((op.get("self_device_seconds") or 0) > 0 for op in (record.profile or {}).get("operators", ()))


@dataclass(frozen=True, slots=True)
class Operator:
    """Calls and exclusive seconds of an operator, or a class of them, in a profile; and its share of all seconds."""

    name: str
    kind: str
    calls: float
    seconds: float
    share: float


def operators(record: RunRecord) -> list[Operator]:
    """Operators of a profile by exclusive time, longest first.

    Exclusive time leaves out what an operator spends in others that it calls, so the seconds add up. It is device time
    where the profile holds any, else CPU time.
    """
    field = "self_device_seconds" if on_device(record) else "self_cpu_seconds"
    rows = [
        (op["name"], int(op["calls"]), float(op.get(field) or 0.0))
        for op in (record.profile or {}).get("operators", ())
        if not op["name"].startswith("ProfilerStep")  # a range around operators: the Python code between them
    ]
    total = sum(seconds for *_, seconds in rows)
    found = (Operator(name, operator_class(name), n, time, time / total) for name, n, time in rows if time > 0)
    return sorted(found, key=lambda op: (-op.seconds, op.name))


def classes(record: RunRecord) -> list[Operator]:
    """Classes of operators by exclusive time, longest first; "other" comes last."""
    kinds: dict[str, list[Operator]] = defaultdict(list)
    for op in operators(record):
        kinds[op.kind].append(op)
    found = (
        Operator(kind, kind, sum(o.calls for o in ops), sum(o.seconds for o in ops), sum(o.share for o in ops))
        for kind, ops in kinds.items()
    )
    return sorted(found, key=lambda op: (op.name == OTHER, -op.seconds))


def shares(record: RunRecord) -> tuple[str, str]:
    """What the classes of a profile say, in one line and with what comes next; it must hold operator time."""
    first, *others = classes(record)
    subject = f"{PLURALS[first.name]} take" if first.name in PLURALS else f"{first.name} takes"
    short = f"{phrases.begun(subject)} {100 * first.share:.0f} % of the operator time of a training step"
    rest = [f"{r.name} {100 * r.share:.0f} %" for r in others[:3]]
    steps = phrases.plural(int((record.profile or {}).get("steps", 0)), "profiled step")
    kind = "device" if on_device(record) else "CPU"
    text = f"Next {'come' if len(rest) > 1 else 'comes'} {phrases.joined(rest)}. " if rest else ""
    return short, f"{text}Exclusive {kind} time of {steps}, each second counted once"
