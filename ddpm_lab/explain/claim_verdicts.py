"""Verdicts on published claims, each from what the records of a machine say.

A claim about the speed of GPUs is judged by GPUs alone. What a CPU shows then is the fault behind a number, and its
size; the verdict is "not testable on this machine".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from ddpm_lab.explain import budget, compiling, decisions, operators, phrases, quality
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.faults import Fault, faults
from ddpm_lab.explain.frames import CLAIMS, Study
from ddpm_lab.explain.wrong_ways import Seen
from ddpm_lab.plan import scaling

CONFIRMED, REFUTED, UNTESTABLE = "confirmed", "refuted", "not testable on this machine"
LIKE = 0.10
"""A published ratio without an interval is met by one that comes so near to it."""
PARAMETERS = 13e6
UTILISED = 0.05
"""A share is a utilisation if the two differ by no more than this, as a ratio."""

_WHERE = {"multi_gpu": "notebook 02", "amp": "notebook 03", "workers": "notebook 04", "torch_compile": "notebook 05"}
_WHERE |= {"quality": "notebook 08", CLAIMS: "this notebook"}


class Evidence:
    """What the records of a machine say about claims."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.seen = Seen(study)
        self.faults = {f.key: f for f in faults(study)}
        records = (*study.records, *study.beside)
        self.gpus = len(records[-1].machine.gpus) if records else 0
        self._studies = {
            name: dataclasses.replace(study, experiment=name, records=tuple(r for r in records if r.experiment == name))
            for name in {r.experiment for r in records}
        }

    def study_of(self, row: Comparison) -> Study:
        """The study that a row comes from."""
        return self._studies[row.experiment]

    def rows(self, *experiments: str) -> list[Comparison]:
        """Candidates that have a speed, of each experiment in this order."""
        studies = [self._studies[name] for name in experiments if name in self._studies]
        return [r for study in studies for r in comparisons(study) if r.role == "candidate" and r.sets]

    def first(self, wanted: Callable[[Comparison], bool], *experiments: str) -> Comparison | None:
        """The first such row that is wanted."""
        return next((row for row in self.rows(*experiments) if wanted(row)), None)


def said(row: Comparison | None) -> str:
    """A row in words: "bf16 0.74 (0.62 to 0.88) times as fast as fp32, 6 sets, notebook 03"; a dash without one."""
    if row is None:
        return phrases.DASH
    grown = row.batch != row.baseline.global_batch_size
    base = f"batch {row.baseline.global_batch_size}" if grown and row.ranks == 1 else row.baseline_label
    words = [
        f"{row.label} {phrases.ratio_with_interval(row)} times as fast as {base}",
        phrases.plural(row.sets, "set"),
    ]
    words += ["weak scaling"] if grown and row.ranks > 1 else []
    return ", ".join([*words, _WHERE.get(row.experiment, row.experiment)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict, what the right way says here, and why the verdict is what it is."""

    verdict: str
    here: str = phrases.DASH
    why: str = ""


def _if_resolved(row: Comparison, holds: bool, why: str) -> Judged:
    """Confirmed or refuted where a row is called faster or slower, and else inconclusive."""
    if not row.resolved:
        return Judged(verdict=decisions.INCONCLUSIVE, here=said(row), why=phrases.outcome(row))
    return Judged(verdict=CONFIRMED if holds else REFUTED, here=said(row), why=why)


def _no_gpu(e: Evidence, count: int = 1, *, here: str = phrases.DASH, command: str = "") -> Judged:
    need = "a GPU" if count == 1 else f"{count} GPUs"
    what = f"; there {command} measures it" if command else ""
    return Judged(verdict=UNTESTABLE, here=here, why=f"needs {need}, the machine has {e.gpus or 'none'}{what}")


def _unmeasured(command: str, here: str = phrases.DASH) -> Judged:
    return Judged(verdict=quality.NOT_MEASURED, here=here, why=f"{command} measures it")


def like(row: Comparison, low: float, high: float) -> Judged:
    """Whether a measured ratio meets a published one between ``low`` and ``high``: its interval decides."""
    meets = row.ratio.low <= high and row.ratio.high >= low
    published = f"{phrases.significant(low)} to {phrases.significant(high)}"
    return _if_resolved(row, meets, f"the interval {'meets' if meets else 'misses'} {published}")


def near(row: Comparison, ratio: float) -> Judged:
    """Whether a measured ratio comes within ``LIKE`` of a published one that has no interval."""
    return like(row, ratio * (1 - LIKE), ratio * (1 + LIKE))


def faster(row: Comparison) -> Judged:
    """Whether a claim that something is faster holds, whatever number it came with."""
    return _if_resolved(row, row.verdict == decisions.FASTER, f"it is resolved as {row.verdict}")


def several(count: int, ratio: float, *, nodes: int = 1, kind: str = "strong") -> Callable[[Evidence], Judged]:
    """So many GPUs on so many hosts against one, in the scaling that was published if it was measured."""

    def judge(e: Evidence) -> Judged:
        rows = sorted(e.rows("multi_gpu", CLAIMS), key=lambda r: scaling(r.family) != kind)
        asked = (r for r in rows if _on_gpu(r) and (r.ranks, r.config.nodes) == (count, nodes))
        if (row := next(asked, None)) is not None:
            return near(row, ratio)
        here = said(next((r for r in rows if r.ranks == 2), None))
        command = "ddpm-lab run multi_gpu --preset full"
        if e.gpus * nodes < count:
            return _no_gpu(e, count, here=here, command=command)
        return _unmeasured(f"{command} on {nodes} hosts" if nodes > 1 else command, here)

    return judge


def parameters(e: Evidence) -> Judged:
    counted = e.seen.of("counted")
    if not counted:
        return _unmeasured("ddpm-lab run claims")
    count = counted[-1]["parameters"]
    times = count / PARAMETERS
    met = abs(math.log(times)) <= math.log1p(LIKE)
    return Judged(
        verdict=CONFIRMED if met else REFUTED,
        here=f"{count / 1e6:.1f} M, counted",
        why="counted on the network itself: " + ("as published" if met else f"{times:.1f} times as many"),
    )


def same_loss(e: Evidence) -> Judged:
    row = e.first(lambda r: r.ranks > 1 and _has_verdict(r), "quality", "multi_gpu")
    if row is None:
        return _unmeasured("ddpm-lab run quality --preset full --data DATA")
    found = row.equivalence
    ends = [loss for base, _ in found.pairs if (loss := quality.final_loss(base)) is not None]
    spread = f"{max(ends, default=0.0) - min(ends, default=0.0):.2g}"
    apart = f"; one run each could not show it: seeds of one configuration end {spread} apart" if len(ends) > 1 else ""
    return _quality([row], f"at equal images and an equal global batch{apart}")


def _has_verdict(row: Comparison) -> bool:
    found = row.equivalence
    return found is not None and found.verdict != quality.NOT_MEASURED


def _quality(rows: list[Comparison], why: str) -> Judged:
    """Whether configurations learn as well as their baseline, by trials over seeds."""
    rows = [r for r in rows if _has_verdict(r)]
    if not rows:
        return _unmeasured("ddpm-lab run quality --preset full --data DATA")
    told: dict[str, list[str]] = {}
    for row in rows:
        told.setdefault(quality.sentence(row.equivalence), []).append(row.label)
    here = "; ".join(f"{phrases.joined(list(dict.fromkeys(labels)))} {said}" for said, labels in told.items())
    verdicts = {row.equivalence.verdict for row in rows}
    good = verdicts <= set(quality.GOOD)
    verdict = REFUTED if quality.WORSE in verdicts else CONFIRMED if good else decisions.INCONCLUSIVE
    return Judged(verdict=verdict, here=here, why=why)


def preserves(e: Evidence) -> Judged:
    """What was optimised and is no batch: precision, compiling, ranks, loader workers."""
    free = {"precision", "compile", "compile_mode", "kernels", "freed_memory"}
    free |= {"world_size", "nodes", "loader", "loader_workers"}
    rows = [r for r in e.rows("quality", "workers") if r.config.differences(r.baseline).keys() <= free]
    return _quality(rows, "held-out loss, paired by seed: of these settings, this network and these images")


def larger_batches(e: Evidence) -> Judged:
    rows = [r for r in e.rows("quality", "batch_size") if _only(r, "global_batch_size")]
    return _quality(rows, "after equally many images, at the same learning rate")


def _only(row: Comparison, name: str) -> bool:
    """Whether a configuration differs from its baseline in this alone."""
    return bool(row.config.differences(row.baseline).keys() == {name})


def other_models(e: Evidence) -> Judged:
    del e
    return _unmeasured("ddpm-lab run quality --preset full --data DATA --network NAME, once for each network,")


def step_budget(e: Evidence) -> Judged:
    profiled = operators.latest_profile([r for r in e.study.beside if r.experiment == "profile"])
    taken = budget.budget(profiled) if profiled else None
    here = phrases.DASH
    if taken is not None:
        line = taken.running
        here = ", ".join(f"{name} {budget.percent(line.share(name))}" for name in line.phases)
        here = f"{here} of {phrases.seconds(line.step_seconds)}, notebook 01"
    return _by_fault(e, "phase_sums", 0.0, here, "the phases waited for add up to another time than a step takes")


def utilisation(e: Evidence) -> Judged:
    here = e.faults["share"].truth or phrases.DASH
    return _by_fault(e, "share", UTILISED, here, "share and utilisation are two numbers")


def _by_fault(e: Evidence, key: str, within: float, here: str, why: str) -> Judged:
    """Whether two numbers that a claim takes for one are one, on a GPU."""
    if not e.seen.cuda:
        return _no_gpu(e, here=here)
    if not e.faults[key].shown:
        return _unmeasured("ddpm-lab run claims", here)
    return _one_number(e.faults[key], within, here, why)


def _one_number(found: Fault, within: float, here: str, why: str) -> Judged:
    """Whether the interval of the ratio of two numbers lies within so much of 1, or outside of that."""
    least, most = 1 / (1 + within), 1 + within
    if found.low > most or found.high < least:
        return Judged(verdict=REFUTED, here=here, why=why)
    if within and least <= found.low and found.high <= most:
        return Judged(verdict=CONFIRMED, here=here, why=f"they differ by less than {100 * within:.0f} %")
    return Judged(verdict=decisions.INCONCLUSIVE, here=here, why="the interval of their ratio does not decide")


def batches(e: Evidence) -> Judged:
    published = {16: (1.2, 1.2), 32: (2.0, 2.0), 64: (2.5, 3.0)}
    rows = [r for r in e.rows("batch_size", CLAIMS) if _only(r, "global_batch_size")]
    here = "; ".join(said(r) for r in rows[:4]) or phrases.DASH
    if not e.gpus:
        return _no_gpu(e, here=here, command="ddpm-lab run batch_size")
    asked = [r for r in rows if r.baseline.global_batch_size == 8 and r.batch in published and _on_gpu(r)]
    if not asked:
        return _unmeasured('experiments.run("batch_size", global_batch_sizes=[8, 16, 32, 64])', here)
    judged = [like(r, published[r.batch][0] * (1 - LIKE), published[r.batch][1] * (1 + LIKE)) for r in asked]
    verdicts = {j.verdict for j in judged}
    verdict = next(v for v in (REFUTED, decisions.INCONCLUSIVE, CONFIRMED) if v in verdicts)
    why = "; ".join(f"{r.label}: {j.why}" for r, j in zip(asked, judged, strict=True))
    return Judged(verdict=verdict, here="; ".join(j.here for j in judged), why=why)


def _on_gpu(row: Comparison) -> bool:
    return bool(row.config.device == "cuda")


def _narrow(e: Evidence, *, on_gpu: bool) -> Comparison | None:
    """The row of fp16, or else bf16, against fp32 with one device."""
    rows = [r for r in e.rows("amp", CLAIMS) if r.ranks == 1 and _only(r, "precision") and _on_gpu(r) == on_gpu]
    return next((r for name in ("fp16", "bf16") for r in rows if r.label == name), None)


def amp(judge: Callable[[Comparison], Judged]) -> Callable[[Evidence], Judged]:
    def judged(e: Evidence) -> Judged:
        if (row := _narrow(e, on_gpu=True)) is not None:
            return judge(row)
        row = _narrow(e, on_gpu=False)
        here, command = said(row), "ddpm-lab run amp"
        return _unmeasured(command, here) if e.gpus else _no_gpu(e, here=here, command=command)

    return judged


def amp_memory(row: Comparison) -> Judged:
    judged = like(row, 1.2, 1.4)
    return dataclasses.replace(judged, here=f"{judged.here}; peak memory {phrases.peak_memory(row)}")


def fades(e: Evidence) -> Judged:
    here = said(e.first(lambda r: r.ranks == 2, "multi_gpu", CLAIMS))
    if e.gpus < 4:
        return _no_gpu(e, 4, here=here, command="ddpm-lab run multi_gpu --preset full")
    return _unmeasured("notebook 02 with world_sizes = [1, 2, 3, 4] and five batch sizes", here)


def cpu_batches(e: Evidence) -> Judged:
    row = e.first(
        lambda r: r.config.device == "cpu" and r.baseline.global_batch_size == 32 and r.batch == 256, "batch_size"
    )
    if row is not None:
        return faster(row)
    known = e.first(lambda r: r.config.device == "cpu" and _only(r, "global_batch_size"), CLAIMS, "quality")
    return _unmeasured("ddpm-lab run batch_size --preset full --device cpu", said(known))


def workers(e: Evidence) -> Judged:
    rows = [r for r in e.rows("workers") if not r.loader_alone]
    here = "; ".join(said(r) for r in rows[:3]) or phrases.DASH
    four = next((r for r in rows if r.config.loader_workers == 4 and _on_gpu(r)), None)
    if four is None:
        command = "ddpm-lab run workers --preset full"
        return _unmeasured(command, here) if e.gpus else _no_gpu(e, here=here, command=command)
    better = [r for r in rows if r.family == four.family and r.ratio.low > four.ratio.high]
    why = f"{better[0].label} are faster" if better else f"four are {four.verdict} than {four.baseline_label}"
    return _if_resolved(four, not better and four.verdict == decisions.FASTER, why)


def _compiled(e: Evidence) -> Comparison | None:
    return e.first(lambda r: r.config.compile == "whole" and r.ranks == 1, "torch_compile", CLAIMS, "quality")


def unsuitable(e: Evidence) -> Judged:
    """A general statement: one machine where compiling pays off refutes it, and no CPU can confirm it for a GPU."""
    if (row := _compiled(e)) is None:
        return _unmeasured("ddpm-lab run torch_compile")
    if row.verdict == decisions.SLOWER and not _on_gpu(row):
        return _no_gpu(e, here=said(row))
    cost = compiling.break_even(e.study_of(row), row)
    if row.verdict == decisions.FASTER and not math.isfinite(cost.steps):
        return _unmeasured("what compiling costs is not known: ddpm-lab run torch_compile", said(row))
    what = f"compiling takes {phrases.seconds(cost.cold_seconds)} and pays off {compiling.pays_off(cost, row)}"
    return _if_resolved(row, row.verdict == decisions.SLOWER, f"as a general statement: {what}")


def compile_seconds(e: Evidence) -> Judged:
    row = _compiled(e)
    here = said(row)
    if row is None or not _on_gpu(row):
        return _unmeasured("ddpm-lab run torch_compile", here) if e.gpus else _no_gpu(e, here=here)
    return near(row, 830 / 8_800)


def communication(e: Evidence) -> Judged:
    found = e.faults["gradient"]
    if not found.shown:
        return _unmeasured("ddpm-lab run claims")
    return Judged(verdict=REFUTED, here="0 with one rank", why=f"it {found.beside()}, whatever the device")


def intervals(e: Evidence) -> Judged:
    found = e.faults["percentiles"]
    if not found.shown:
        return _unmeasured("ddpm-lab run claims (two sets or more)")
    why = f"{phrases.significant(found.ratio)} times as wide as the interval of the mean"
    return _one_number(found, 0.0, found.truth, why)
