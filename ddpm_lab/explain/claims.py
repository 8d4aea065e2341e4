"""Published claims: what was said, what wrong and right ways of measuring say here, and a verdict with its reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from ddpm_lab.explain import claim_verdicts as verdicts
from ddpm_lab.explain import decisions, faults, phrases, quality
from ddpm_lab.explain.claim_verdicts import Evidence, Judged
from ddpm_lab.explain.frames import Study, once


@dataclass(frozen=True, slots=True)
class Claim:
    """A published claim, with what judges it: ``wrong`` are keys of the faults behind its number."""

    key: str
    text: str
    published: str
    judge: Callable[[Evidence], Judged]
    wrong: tuple[str, ...] = ()


PUBLISHED: tuple[Claim, ...] = (
    Claim(
        "S000-1",
        "8 GPUs train so many times as fast as one",
        "6.45 times, 80.6 % efficiency",
        verdicts.several(8, 6.45, kind="weak"),
        wrong=("single", "cold"),
    ),
    Claim("S000-2", "The width-128 network has about 13 M parameters", "13 M", verdicts.parameters),
    Claim(
        "S001-1",
        "4 GPUs against one",
        "3.81 times (362.45 / 95.23 s), 95.2 %",
        verdicts.several(4, 3.81),
        wrong=("single",),
    ),
    Claim(
        "S001-1",
        "8 GPUs on 2 nodes against one",
        "6.34 times (362.45 / 57.14 s), 79.3 %",
        verdicts.several(8, 6.34, nodes=2),
        wrong=("single",),
    ),
    Claim(
        "S001-2",
        "All configurations reach the same validation loss",
        "0.1187 / 0.1192 / 0.1190, one run each",
        verdicts.same_loss,
    ),
    Claim(
        "S002-1",
        "Where a step goes; the phases' sum and the epoch are both called actual",
        "backward 51.9 %, forward 35.7 %, data 6.0 %, optimizer 5.2 %, copy 0.5 % of 65.55 ms; 5.31 s an "
        "epoch by phases, about 3 s by the clock",
        verdicts.step_budget,
        wrong=("phase_sums",),
    ),
    Claim("S002-2", "The compute share is GPU utilisation", "87.7 %", verdicts.utilisation, wrong=("share",)),
    Claim(
        "S002-3",
        "Batch 8 to 16, 32 and 64 is so many times as fast",
        "1.2 / 2 / 2.5 to 3 times",
        verdicts.batches,
        wrong=("unequal",),
    ),
    Claim(
        "S002-4",
        "AMP is faster and needs less memory",
        "20 to 40 % faster, 50 % less memory",
        verdicts.amp(verdicts.amp_memory),
        wrong=("profiler",),
    ),
    Claim(
        "S003-1",
        "The time around the gradient call is communication",
        "\N{EN DASH}",
        verdicts.communication,
        wrong=("gradient",),
    ),
    Claim(
        "S003-1", "Percentiles of runs are a 95 % interval", "\N{EN DASH}", verdicts.intervals, wrong=("percentiles",)
    ),
    Claim(
        "S004-1",
        "AMP accelerates training",
        "1 GPU about 1,830 to 1,140 s; \N{LEFT DOUBLE QUOTATION MARK}2 GPUs\N{RIGHT DOUBLE QUOTATION MARK} "
        "1,140 to 870 s",
        verdicts.amp(verdicts.faster),
        wrong=("profiler", "multiplied"),
    ),
    Claim(
        "S004-2",
        "Several GPUs help at larger batches, and fade beyond three",
        "batch 512: 1 GPU about 1,000 s, "
        "\N{LEFT DOUBLE QUOTATION MARK}2\N{RIGHT DOUBLE QUOTATION MARK} 520, "
        "\N{LEFT DOUBLE QUOTATION MARK}3\N{RIGHT DOUBLE QUOTATION MARK} 600, "
        "\N{LEFT DOUBLE QUOTATION MARK}4\N{RIGHT DOUBLE QUOTATION MARK} 660",
        verdicts.fades,
        wrong=("label", "unequal"),
    ),
    Claim(
        "S004-2",
        "On a CPU, batch 256 trains faster than batch 32",
        "about 5,540 to 3,620 s",
        verdicts.cpu_batches,
        wrong=("unequal",),
    ),
    Claim(
        "S004-3",
        "Four loader workers are best",
        "0 / 4 / 8 / 20: 1 GPU about 1,320 / 1,073 / 1,040 / 1,075 s",
        verdicts.workers,
        wrong=("single", "cold"),
    ),
    Claim("S004-4", "torch.compile is unsuitable", "as a conclusion", verdicts.unsuitable, wrong=("compiling",)),
    Claim(
        "S004-4",
        "Compiled training takes so many times as long",
        "about 8,800 s with, 830 s without (1 GPU)",
        verdicts.compile_seconds,
        wrong=("compiling",),
    ),
    Claim(
        "S004-5",
        "Optimisation preserves performance: precision, compiling, ranks, loader workers",
        "never measured",
        verdicts.preserves,
    ),
    Claim("S004-5", "Optimisation preserves performance: larger batches", "never measured", verdicts.larger_batches),
    Claim("S004-5", "The method carries over to other models", "never measured", verdicts.other_models),
)


@once
def judged(study: Study) -> list[tuple[Claim, Judged]]:
    """Every published claim with its verdict on the machine of the study's records."""
    evidence = Evidence(study)
    return [(claim, claim.judge(evidence)) for claim in PUBLISHED]


def table(study: Study) -> pd.DataFrame:
    """One row a claim: published, what the wrong and the right way read, verdict and reason."""
    found = {f.key: f"{f.name}: {f.compared or f.reads}" for f in faults.faults(study) if f.shown}
    return pd.DataFrame(
        [
            {
                "Claim": f"{claim.key}: {claim.text}",
                "Published": claim.published,
                "Wrong way, measured": "; ".join(found[key] for key in claim.wrong if key in found) or phrases.DASH,
                "Right way, measured": answer.here,
                "Verdict": answer.verdict,
                "Why": answer.why,
            }
            for claim, answer in judged(study)
        ]
    )


def headline(study: Study) -> str:
    """How many claims are confirmed, refuted, and not testable, in one line."""
    counts = Counter(answer.verdict for _, answer in judged(study))
    words = [f"{counts[verdicts.CONFIRMED]} are confirmed{'' if study.published else ' here'}"]
    words += [f"{counts[v]} {v}" for v in (verdicts.REFUTED, decisions.INCONCLUSIVE, quality.NOT_MEASURED) if counts[v]]
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
