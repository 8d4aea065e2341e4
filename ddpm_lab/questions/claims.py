"""Do published claims hold here? Sets of what they are about, and beside them the wrong ways to measure, really run.

Claims, and the faults behind their numbers, are rows of ``claims.toml``. A claim about the speed of GPUs is judged by
GPUs alone: on a CPU it is not testable, and only the fault behind its number is shown, with its size there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from ddpm_lab.declared import Opt
from ddpm_lab.explain import decisions, machine_state, phrases, quality
from ddpm_lab.explain.answer import Answer, View, speed_table, speeds
from ddpm_lab.explain.bands import DOCUMENTS
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, compared, plain
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.explain.table import Table
from ddpm_lab.measure.alone import WORKLOAD
from ddpm_lab.plan import Experiment, Family, Trial, scaling
from ddpm_lab.questions import faults, torch_compile
from ddpm_lab.questions import time_budget as budget
from ddpm_lab.questions.faults import FAULTS, Records, readings
from ddpm_lab.questions.question import Question
from ddpm_lab.training.setting import Batch, Setup

QUESTION = Question(title="Which published claims hold here?", file="09_claims", long=True)

Repeats = Annotated[int | None, Opt("times that each wrong way is run", least=1)]
BAR_STEPS = 6
"""Steps of the smaller batch in a bar; the larger batch does as many as fit into the same images, which is fewer."""
_REPEATS = {"smoke": 1, "quick": 6, "full": 12}
_WAYS = ("fresh", "bars", "runs", "profiled", "phases", "counted")
_CPU_WAYS = ("one_thread",)
_CUDA_WAYS = ("loss_read", "unsynchronised", "phases_waited_for", "hidden_devices")


def claims(setup: Setup, *, global_batch_size: Batch = None, repeats: Repeats = None) -> Experiment:
    """Which published claims hold here? Settings that the claims are about, in sets, and wrong ways to measure them.

    Each wrong way is run ``repeats`` times, in processes of its own. Its records have the role "wrong", and no figure
    or table takes a speed from them. ``smoke`` leaves compiling out, which takes most of a minute.
    """
    cuda = setup.device == "cuda"
    batch = setup.batch_size(global_batch_size) if cuda or global_batch_size else 8
    count = _REPEATS[setup.preset] if repeats is None else repeats
    base = setup.config(global_batch_size=batch)
    narrow = "fp16" if cuda else "bf16"
    # The images of a bar hold one step of the larger batch, and half as many images again.
    large, larger = f"batch {4 * batch}", replace(base, global_batch_size=4 * batch)
    rows = [(narrow, replace(base, precision=narrow))]
    rows += [("compiled", replace(base, compile="whole"))] if setup.preset != "smoke" else []
    rows += [(large, larger)]
    two = setup.ranks_label(2)
    several = setup.most_ranks > 1 and batch % 2 == 0 and 2 % setup.nodes(2) == 0
    rows += [(two, setup.config(global_batch_size=batch, world_size=2))] if several else []
    name = setup.family_name(batch)
    family = Family(name=name, baseline=base, baseline_label="fp32", candidates=tuple(rows), together=True)
    why = "the batch is odd" if setup.most_ranks > 1 else "each rank needs a device of its own"
    # A thread and a core are one on a CPU alone, and where there is one core no other can be idle.
    ways = (*_WAYS, *(_CUDA_WAYS if cuda else _CPU_WAYS if setup.usable_cores > 1 else ()))
    wrong = []
    for seed in range(setup.seed, setup.seed + count):
        each = (("fp32", base, ways), (narrow, rows[0][1], ("bars", "profiled")), (large, larger, ("bars",)))
        for label, config, mine in each:
            options = (("ways", " ".join(mine)), ("bar_images", BAR_STEPS * batch))
            run = replace(config, purpose="check", workload=WORKLOAD, seed=seed, options=options)
            wrong.append(Trial(family=name, label=label, baseline=base, config=run))
    left_out = () if several else ((name, two, why),)
    return Experiment(name="claims", families=(family,), left_out=left_out, checks=tuple(wrong))


def answer(study: Study) -> Answer:
    """Judge each published claim, and show what each wrong way to measure did to a number."""
    shown = speeds(study, compared(study))
    wrong = "Each fault: what is done wrong, what that did to a number here, how it is done right."
    sets = "What the right way rests on: the sets of this notebook."
    if study.records:
        headline, decided = _verdicts(study)
        found = plain(study, headline, ANSWERED, decided, *machine_state.warnings(study))
        found = replace(found, verdict="judged", quality="quality in the table, where a claim is about it")
        shown = replace(shown, finding=found)
    views = (
        View(caption=wrong, table=lambda: faults.table(study)),
        View(caption=sets, table=lambda: speed_table(study, comparisons(study))),
    )
    figure = shown.figure
    return replace(shown, figure=lambda: faults.figure(study) or figure(), table=lambda: table(study), views=views)


def _verdicts(study: Study) -> tuple[str, str]:
    """How many claims are refuted, confirmed and not testable; and which are decided."""
    named: dict[str, list[str]] = defaultdict(list)
    for claim, found in judged(study):
        named[found.verdict].append(f"{phrases.within(claim.says)} ({claim.key})")
    short = f"Of {len(CLAIMS)} published claims {len(named[REFUTED])} are refuted and {len(named[CONFIRMED])} confirmed"
    short += f"; {len(named[UNTESTABLE])} need GPUs" * bool(named[UNTESTABLE])
    return short, " ".join(f"{v.capitalize()}: {'; '.join(named[v])}." for v in (CONFIRMED, REFUTED) if named[v])


def table(study: Study) -> Table:
    """One row a claim: published, what the wrong and the right way read, verdict and reason."""
    found = {key: f"{FAULTS[key].name}: {r.also or FAULTS[key].said(r)[0]}" for key, r in readings(study).items()}
    return [
        {
            "Claim": claim.says,
            "Document": f"{claim.key}, {DOCUMENTS[claim.key[:4]]}",
            "Published": claim.number,
            "Wrong way, measured": "; ".join(found[key] for key in claim.faults if key in found) or phrases.DASH,
            "Right way, measured": answer.here,
            "Verdict": answer.verdict,
            "Why": answer.why,
        }
        for claim, answer in judged(study)
    ]


CONFIRMED, REFUTED, UNTESTABLE = "confirmed", "refuted", "not testable on this machine"
_NOTEBOOKS = {
    "multi_gpu": "notebook 02",
    "amp": "notebook 03",
    "workers": "notebook 04",
    "torch_compile": "notebook 05",
    "quality": "notebook 08",
    "claims": "this notebook",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published claim and what judges it: see the head of ``claims.toml``."""

    key: str
    says: str
    number: str
    judge: str
    questions: Sequence[str] = ()
    setting: str = ""
    values: Sequence[object] = ()
    baseline: object = None
    scaling: str = ""
    device: str = "cuda"
    nodes: int = 1
    gpus: int = 0
    between: Sequence[tuple[float, float]] = ()
    expects: str = decisions.FASTER
    best: bool = False
    varies: Sequence[str] = ()
    fault: str = ""
    within: float = 0.0
    command: str = ""
    why: str = ""
    faults: Sequence[str] = ()


CLAIMS = tuple(Claim(**row) for row in faults.ROWS["claim"])


class Judged(NamedTuple):
    """A verdict, what the right way says here, and why the verdict is what it is."""

    verdict: str
    here: str
    why: str


def _rows(claim: Claim, records: Records) -> list[Comparison]:
    """Comparisons with a speed of the questions that a claim is about, in their order."""
    studies = [records.studies[name] for name in claim.questions if name in records.studies]
    found = [r for s in studies for r in comparisons(s) if r.role == "candidate" and r.sets and not r.loader_alone]
    return sorted(found, key=lambda r: bool(claim.scaling) and scaling(r.family) != claim.scaling)


@once
def judged(study: Study) -> list[tuple[Claim, Judged]]:
    """Every published claim with its verdict on the machine of the records."""
    records = Records(study)
    return [(claim, _JUDGES[claim.judge](claim, records)) for claim in CLAIMS]


def _said(row: Comparison) -> str:
    """Such as "bf16 0.74 (0.62 to 0.88) times as fast as fp32, 6 sets, notebook 03"."""
    grown = row.batch != row.baseline.global_batch_size
    base = f"batch {row.baseline.global_batch_size}" if grown and row.ranks == 1 else row.baseline_label
    said = f"{row.label} {phrases.ratio_with_interval(row)} times as fast as {base}, {phrases.plural(row.sets, 'set')}"
    return f"{said}{', weak scaling' * (grown and row.ranks > 1)}, {_NOTEBOOKS.get(row.experiment, row.experiment)}"


def _asked(claim: Claim, records: Records) -> dict[object, Comparison]:
    """The first comparison for each of the values that a claim is about, if it was measured."""

    def fits(r: Comparison, value: object) -> bool:
        changed, ranks = r.config.differences(r.baseline).keys(), claim.setting == "world_size"
        there = r.config.nodes == claim.nodes and claim.device in ("", r.config.device)
        alone = ranks or (r.ranks == 1 and changed == {claim.setting})
        from_there = claim.baseline in (None, getattr(r.baseline, claim.setting))
        return there and alone and from_there and getattr(r.config, claim.setting) == value

    rows = _rows(claim, records)
    found = {value: next((r for r in rows if fits(r, value)), None) for value in claim.values}
    return {value: row for value, row in found.items() if row is not None}


def _undecided(claim: Claim, records: Records, here: str = "") -> Judged:
    """Not testable where GPUs are missing, else not measured; with the comparisons that come nearest."""
    rows: dict[str, Comparison] = {}
    for row in _rows(claim, records):
        if claim.setting in row.config.differences(row.baseline):
            rows.setdefault(row.label, row)
    here = here or "; ".join(map(_said, list(rows.values())[:4])) or phrases.DASH
    question = claim.questions[0] if claim.questions else "claims"
    command = claim.command or f"ddpm-lab run {question} --preset full{' --data DATA' * (question == 'quality')}"
    if records.gpus >= claim.gpus:
        return Judged(quality.NOT_MEASURED, here, f"{command} measures it")
    need = f"{phrases.plural(claim.gpus, 'GPU')}{f' on each of {claim.nodes} hosts' * (claim.nodes > 1)}"
    return Judged(
        UNTESTABLE, here, f"needs {need}, the machine has {records.gpus or 'none'}; there {command} measures it"
    )


def _near(claim: Claim, records: Records) -> Judged:
    """Whether measured numbers meet the published ones: of ratios their intervals decide."""
    if not claim.questions and (counted := records.runs("counted")):
        count, (low, high) = counted[-1][1]["parameters"] / 1e6, claim.between[0]
        verdict = CONFIRMED if low <= count <= high else REFUTED
        return Judged(verdict, f"{count:.1f} M, counted on the network itself", f"accepted: {low} M to {high} M")
    rows = _asked(claim, records)
    if not rows:
        return _undecided(claim, records)
    verdicts, why = [], []
    for value, (low, high) in zip(claim.values, claim.between, strict=True):
        if (row := rows.get(value)) is not None:
            meets = row.ratio.low <= high and row.ratio.high >= low
            verdicts.append((CONFIRMED if meets else REFUTED) if row.resolved else decisions.INCONCLUSIVE)
            accepted = f"the interval {'meets' if meets else 'misses'} {low} to {high}"
            why.append(f"{row.label}: {accepted if row.resolved else phrases.outcome(row)}")
    worst = next(v for v in (REFUTED, decisions.INCONCLUSIVE, CONFIRMED) if v in verdicts)
    here = "; ".join(f"{_said(r)}, peak memory {phrases.peak_memory(r)}" for r in rows.values())
    return Judged(worst, here, "; ".join(why))


def _faster(claim: Claim, records: Records) -> Judged:
    """Whether a comparison is called what a claim expects, whatever number it came with."""
    row = next(iter(_asked(claim, records).values()), None)
    if row is None:
        return _undecided(claim, records)
    if not row.resolved:
        return Judged(decisions.INCONCLUSIVE, _said(row), phrases.outcome(row))
    why = f"it is called {row.verdict}"
    if claim.expects == decisions.SLOWER:  # everywhere: where compiling pays off refutes it, and no CPU confirms it
        cost = torch_compile.break_even(records.studies[row.experiment], row)
        if row.verdict == decisions.SLOWER and row.config.device == "cpu":
            return _undecided(replace(claim, gpus=1), records)
        if row.verdict == decisions.FASTER and math.isnan(cost.steps):
            return _undecided(claim, records)
        why = f"compiling takes {phrases.seconds(cost.cold_seconds)} and pays off {torch_compile.pays_off(cost, row)}"
    others = _rows(claim, records) if claim.best else ()
    better = [r.label for r in others if r.family == row.family and r.ratio.low > row.ratio.high]
    holds = row.verdict == claim.expects and not better
    return Judged(CONFIRMED if holds else REFUTED, _said(row), f"{better[0]} is faster" if better else why)


def _equivalent(claim: Claim, records: Records) -> Judged:
    """Whether configurations learn as well as their baseline, by trials over seeds, or two numbers are one."""
    if claim.fault:
        return _same_number(claim, records)
    known = [r for r in _rows(claim, records) if r.equivalence.verdict != quality.NOT_MEASURED]
    rows = [r for r in known if r.config.differences(r.baseline).keys() <= set(claim.varies)]
    if not rows:
        return _undecided(claim, records)
    verdicts = {row.equivalence.verdict for row in rows}
    good = CONFIRMED if verdicts <= set(quality.GOOD) else decisions.INCONCLUSIVE
    ends = [loss for base, _ in rows[0].equivalence.pairs if (loss := quality.final_loss(base)) is not None]
    apart = f"; seeds of one configuration end {max(ends) - min(ends):.2g} apart" if len(ends) > 1 else ""
    labels = {said: dict.fromkeys(r.label for r in rows if r.quality == said) for said in (r.quality for r in rows)}
    here = "; ".join(f"{phrases.joined(list(names))} {said}" for said, names in labels.items())
    return Judged(REFUTED if quality.WORSE in verdicts else good, here, f"held-out loss {claim.why}{apart}")


def _same_number(claim: Claim, records: Records) -> Judged:
    """Whether what a fault reads is the true number, by the interval of their ratio."""
    read = readings(records.study).get(claim.fault)
    profile = budget.latest_profile([r for r in records.study.beside if r.experiment == "profile"])
    taken = budget.budget(profile) if profile and claim.fault == "phase_sums" else None
    here = FAULTS[claim.fault].said(read)[1] if read else ""
    if taken is not None:
        shares = (f"{name} {budget.percent(taken.running.share(name))}" for name in taken.running.phases)
        here = f"{', '.join(shares)} of {phrases.seconds(taken.running.step_seconds)}, notebook 01"
    if read is None or (claim.gpus and not records.cuda):
        return _undecided(claim, records, here)
    (low, high), most = read.ratio.ends, 1 + claim.within
    same = claim.within and 1 / most <= low and high <= most
    apart = math.isinf(read.ratio.value) or low > most or high < 1 / most
    verdict = REFUTED if apart else CONFIRMED if same else decisions.INCONCLUSIVE
    return Judged(verdict, here, f"it reads {FAULTS[claim.fault].said(read)[0]}: {read.factor()}")


_JUDGES: dict[str, Callable[[Claim, Records], Judged]]
_JUDGES = {"near": _near, "faster": _faster, "equivalent": _equivalent, "untestable": _undecided}
