"""One rank or several for a network and a batch: by what was measured here, else by a published rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, machine_state, phrases, scaling, sentences
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study

SINGLE, MULTI, MEASURE, NOT_RESOLVED = "single", "multi", "measure", decisions.INCONCLUSIVE
PRIOR = "prior, not measured"
PARAMETERS = {"tiny": 44_332, "seed": 10_050_819, "ddpm": 35_746_307, "s000": 39_156_227}
"""Trained parameters of each network, which do not depend on the size of its images."""
LEAST, SMALL, LARGE = 1_000_000, 5_000_000, 10_000_000
SMALL_BATCH, LARGE_BATCH = 128, 64
PLAIN = RunConfig()
"""The step that ``--ranks`` measures: in fp32, eager, with the lab's own kernels and loader."""
_VARIES = {"network", "device", "global_batch_size", "world_size", "nodes", "data_sha256", "image_size", "seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Whether one rank or several should train a network at a batch, and why.

    ``answer`` is single, multi, inconclusive (measured, and neither), or measure (the rule leaves it to a measurement).
    ``source`` says what it rests on: "measured", with the batch where that is another one, or that it is a prior.
    ``speeds`` are the throughputs that were measured. Ratio, interval and sets are those of the comparison behind it.
    """

    answer: str
    reason: str
    source: str
    network: str | None
    parameters: int
    batch: int
    device: str
    measured_batch: int | None = None
    speeds: tuple[str, ...] = ()
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sets: int = 0
    where: str = ""

    def sentence(self) -> str:
        """The answer in one sentence, with its reason and what it rests on."""
        work = f"{self.network or 'a network'} ({self.parameters:,} parameters), batch {self.batch}"
        work += f", {PLAIN.precision}" * (self.measured_batch is not None)
        return f"{self.answer} for {work}: {self.reason} [{self.source}]"

    def text(self, carried: str = "") -> str:
        """The answer, what was measured, and what to do next, one line each.

        ``carried`` are options with which it was asked for, which the next command needs too.
        """
        lines = [self.sentence()]
        lines += [f"  {speed}" for speed in self.speeds]
        lines += [f"  measured on {self.where}"] if self.where else []
        return "\n".join([*lines, *(f"  {line}" for line in self._next(carried))])

    def _next(self, carried: str) -> list[str]:
        more = f" {carried}" if carried else ""
        at = f"--network {self.network or 'NAME'} --batch-size {self.batch}{more}"
        if self.answer == NOT_RESOLVED:
            sizes = f"--network {self.network or 'NAME'} --batch-sizes {self.batch}{more}"
            return [f"to resolve 2 %: ddpm-lab run multi_gpu {sizes} --resolution 2%"]
        if self.measured_batch != self.batch:
            return [f"to measure it: ddpm-lab strategy {at} --ranks multi"]
        return []


def prior(parameters: int, batch: int) -> tuple[str, str]:
    """Answer and reason by the thresholds of S003's strategy selector, which know neither machine nor network."""
    if parameters < LEAST:
        return SINGLE, f"the model is too small, below {LEAST:,} parameters"
    if parameters < SMALL:
        if batch < SMALL_BATCH:
            return SINGLE, f"below {SMALL:,} parameters with a batch below {SMALL_BATCH}"
        return MEASURE, f"below {SMALL:,} parameters with a batch of at least {SMALL_BATCH}, only measuring tells"
    if parameters < LARGE:
        return MEASURE, f"between {SMALL:,} and {LARGE:,} parameters only measuring tells"
    if batch >= LARGE_BATCH:
        return MULTI, f"at least {LARGE:,} parameters with a batch of at least {LARGE_BATCH}"
    return SINGLE, f"the batch is below {LARGE_BATCH}: increase it for several"


def strategy(studies: Sequence[Study], *, network: str | None, parameters: int, batch: int, device: str) -> Strategy:
    """The answer for a network and a global batch size.

    Strong scaling of the plain step (fp32, eager) that was measured with this network on this kind of device decides:
    at this batch, else at the nearest one. Of several cohorts the last with sets enough for a verdict counts, else the
    last. Only where there is none does the prior speak.

    Args:
        studies: records of the experiment multi_gpu of one machine, a study for each cohort, the latest last.
        network: its name; None for one of which only the size is known.
        parameters: trained parameters.
        batch: images of an optimizer step over all ranks.
        device: cpu or cuda.
    """
    answer, reason = prior(parameters, batch)
    common: dict[str, Any] = {"network": network, "parameters": parameters, "batch": batch, "device": device}
    each = [_told(study, network, device) for study in studies]
    compared = [
        (study, told, r) for study, told in zip(studies, each, strict=True) for r in told if r.role == "candidate"
    ]
    if not compared:
        speeds = {r.label: f"{r.label}: {phrases.throughput(r)}" for told in each for r in told if r.batch == batch}
        return Strategy(answer=answer, reason=reason, source=PRIOR, speeds=tuple(speeds.values()), **common)
    nearest = min((r.batch for *_, r in compared), key=lambda b: (abs(math.log(b / batch)), b))
    near = [found for found in compared if found[2].batch == nearest]
    study, told, last = next((found for found in reversed(near) if found[2].sets >= decisions.LEAST_SETS), near[-1])
    told = [r for r in told if r.baseline_id == last.baseline_id]
    candidates = [r for r in told if r.role == "candidate"]
    faster = [r for r in candidates if r.verdict == decisions.FASTER]
    lead = max(faster or candidates, key=lambda r: r.ratio.value)
    if faster or all(r.answered for r in candidates):
        answer = MULTI if faster else SINGLE
        reason = f"{sentences.headline(lead)} ({phrases.evidence(lead)})"
    else:
        answer = NOT_RESOLVED
        pair = f"{lead.label} against {lead.baseline_label}"
        reason = f"{pair} reads {phrases.ratio(lead)} ({phrases.evidence(lead)})"
        if lead.verdict != decisions.INCONCLUSIVE:
            reason += f", {phrases.outcome(lead)}"
    return Strategy(
        answer=answer,
        reason=reason,
        source="measured" if nearest == batch else f"measured at batch {nearest}, the nearest to {batch}",
        measured_batch=int(nearest),
        speeds=tuple(f"{r.label}: {phrases.throughput(r)}" for r in told),
        ratio=lead.ratio.value,
        low=lead.ratio.low,
        high=lead.ratio.high,
        sets=lead.sets,
        where=f"{study.hardware}, {study.date}" + "; the machine was busy" * bool(machine_state.disturbed_sets(study)),
        **common,
    )


def _told(study: Study, network: str | None, device: str) -> list[Comparison]:
    """Strong scaling of the plain step, with a speed."""
    return [
        r
        for r in scaling.rows(study)
        if r.scaling == "strong" and r.sets and r.role in ("baseline", "candidate")
        if r.config.network == network and r.config.device == device
        if r.config.differences(PLAIN).keys() <= _VARIES
    ]
