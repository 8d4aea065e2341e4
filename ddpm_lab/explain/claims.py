"""Published claims: what was said, what wrong and right ways of measuring say here, and a verdict with its reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from ddpm_lab.explain import claim_verdicts as verdicts
from ddpm_lab.explain import faults, phrases, stats
from ddpm_lab.explain.claim_evidence import Evidence
from ddpm_lab.explain.claim_verdicts import Judged
from ddpm_lab.explain.faults import Fault
from ddpm_lab.explain.frames import CLAIMS, Study, once

EXPERIMENT = CLAIMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published claim: ``wrong`` are keys of the faults behind its number."""

    key: str
    text: str
    published: str
    wrong: tuple[str, ...]
    judge: Callable[[Evidence], Judged]


PUBLISHED: tuple[Claim, ...] = (
    Claim(
        key="S000-1",
        text="8 GPUs train so many times as fast as one",
        published="6.45 times, 80.6 % efficiency",
        wrong=("single", "cold"),
        judge=verdicts.several(8, 6.45, kind="weak"),
    ),
    Claim(
        key="S000-2",
        text="The width-128 network has about 13 M parameters",
        published="13 M",
        wrong=(),
        judge=verdicts.parameters,
    ),
    Claim(
        key="S001-1",
        text="4 GPUs against one",
        published="3.81 times (362.45 / 95.23 s), 95.2 %",
        wrong=("single",),
        judge=verdicts.several(4, 3.81),
    ),
    Claim(
        key="S001-1",
        text="8 GPUs on 2 nodes against one",
        published="6.34 times (362.45 / 57.14 s), 79.3 %",
        wrong=("single",),
        judge=verdicts.several(8, 6.34, nodes=2),
    ),
    Claim(
        key="S001-2",
        text="All configurations reach the same validation loss",
        published="0.1187 / 0.1192 / 0.1190, one run each",
        wrong=(),
        judge=verdicts.same_loss,
    ),
    Claim(
        key="S002-1",
        text="Where a step goes; the phases' sum and the epoch are both called actual",
        published="backward 51.9 %, forward 35.7 %, data 6.0 %, optimizer 5.2 %, copy 0.5 % of 65.55 ms; 5.31 s an "
        "epoch by phases, about 3 s by the clock",
        wrong=("phase_sums",),
        judge=verdicts.step_budget,
    ),
    Claim(
        key="S002-2",
        text="The compute share is GPU utilisation",
        published="87.7 %",
        wrong=("share",),
        judge=verdicts.utilisation,
    ),
    Claim(
        key="S002-3",
        text="Batch 8 to 16, 32 and 64 is so many times as fast",
        published="1.2 / 2 / 2.5 to 3 times",
        wrong=("unequal",),
        judge=verdicts.batches,
    ),
    Claim(
        key="S002-4",
        text="AMP is faster and needs less memory",
        published="20 to 40 % faster, 50 % less memory",
        wrong=("profiler",),
        judge=verdicts.amp(verdicts.amp_memory),
    ),
    Claim(
        key="S003-1",
        text="The time around the gradient call is communication",
        published="\N{EN DASH}",
        wrong=("gradient",),
        judge=verdicts.communication,
    ),
    Claim(
        key="S003-1",
        text="Percentiles of runs are a 95 % interval",
        published="\N{EN DASH}",
        wrong=("percentiles",),
        judge=verdicts.intervals,
    ),
    Claim(
        key="S004-1",
        text="AMP accelerates training",
        published="1 GPU about 1,830 to 1,140 s; \N{LEFT DOUBLE QUOTATION MARK}2 GPUs\N{RIGHT DOUBLE QUOTATION MARK} "
        "1,140 to 870 s",
        wrong=("profiler", "multiplied"),
        judge=verdicts.amp(verdicts.faster),
    ),
    Claim(
        key="S004-2",
        text="Several GPUs help at larger batches, and fade beyond three",
        published="batch 512: 1 GPU about 1,000 s, "
        "\N{LEFT DOUBLE QUOTATION MARK}2\N{RIGHT DOUBLE QUOTATION MARK} 520, "
        "\N{LEFT DOUBLE QUOTATION MARK}3\N{RIGHT DOUBLE QUOTATION MARK} 600, "
        "\N{LEFT DOUBLE QUOTATION MARK}4\N{RIGHT DOUBLE QUOTATION MARK} 660",
        wrong=("label", "unequal"),
        judge=verdicts.fades,
    ),
    Claim(
        key="S004-2",
        text="On a CPU, batch 256 trains faster than batch 32",
        published="about 5,540 to 3,620 s",
        wrong=("unequal",),
        judge=verdicts.cpu_batches,
    ),
    Claim(
        key="S004-3",
        text="Four loader workers are best",
        published="0 / 4 / 8 / 20: 1 GPU about 1,320 / 1,073 / 1,040 / 1,075 s",
        wrong=("single", "cold"),
        judge=verdicts.workers,
    ),
    Claim(
        key="S004-4",
        text="torch.compile is unsuitable",
        published="as a conclusion",
        wrong=("compiling",),
        judge=verdicts.unsuitable,
    ),
    Claim(
        key="S004-4",
        text="Compiled training takes so many times as long",
        published="about 8,800 s with, 830 s without (1 GPU)",
        wrong=("compiling",),
        judge=verdicts.compile_seconds,
    ),
    Claim(
        key="S004-5",
        text="Optimisation preserves performance: precision, compiling, ranks, loader workers",
        published="never measured",
        wrong=(),
        judge=verdicts.preserves,
    ),
    Claim(
        key="S004-5",
        text="Optimisation preserves performance: larger batches",
        published="never measured",
        wrong=(),
        judge=verdicts.larger_batches,
    ),
    Claim(
        key="S004-5",
        text="The method carries over to other models",
        published="never measured",
        wrong=(),
        judge=verdicts.other_models,
    ),
)


@once
def judged(study: Study) -> list[tuple[Claim, Judged]]:
    """Every published claim with its verdict on the machine of the study's records."""
    evidence = Evidence(study)
    return [(claim, claim.judge(evidence)) for claim in PUBLISHED]


def table(study: Study) -> pd.DataFrame:
    """One row a claim: published, the wrong way here, the right way here, verdict and reason."""
    found = {f.key: f for f in faults.faults(study)}
    return pd.DataFrame(
        [
            {
                "Claim": f"{claim.key}: {claim.text}",
                "Published": claim.published,
                "Wrong way here": _wrong([found[key] for key in claim.wrong]),
                "Right way here": answer.here,
                "Verdict": answer.verdict,
                "Why": answer.why,
            }
            for claim, answer in judged(study)
        ]
    )


def _wrong(behind: list[Fault]) -> str:
    shown = [f"{f.name}: {f.compared or f.reads}" for f in behind if f.shown]
    return "; ".join(shown) or phrases.DASH


def headline(study: Study) -> str:
    """How many claims are confirmed, refuted, and not testable, in one line."""
    counts = Counter(answer.verdict for _, answer in judged(study))
    words = [f"{counts[verdicts.CONFIRMED]} are confirmed here"]
    words += [f"{counts[v]} {v}" for v in (verdicts.REFUTED, stats.NOT_RESOLVED, verdicts.NOT_MEASURED) if counts[v]]
    words += [f"{counts[verdicts.UNTESTABLE]} not testable"] if counts[verdicts.UNTESTABLE] else []
    return f"Of {len(PUBLISHED)} published claims {phrases.joined(words)}"


def evidence(study: Study) -> str:
    """Which claims are decided, and which faults change a number most."""
    told = []
    for verdict in (verdicts.CONFIRMED, verdicts.REFUTED):
        names = [f"{phrases.within(claim.text)} ({claim.key})" for claim, a in judged(study) if a.verdict == verdict]
        told += [f"{verdict.capitalize()}: {'; '.join(names)}."] if names else []
    shown = [f for f in faults.faults(study) if f.shown and math.isfinite(f.ratio)]
    worst = sorted(shown, key=lambda f: -abs(math.log(f.ratio)))[:3]
    if worst:
        listed = phrases.joined([f"{phrases.within(f.name)} ({phrases.significant(f.ratio)})" for f in worst])
        told.append(f"What the wrong way reads, over what is true: {listed}.")
    return " ".join(told)
