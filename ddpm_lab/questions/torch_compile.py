"""Is torch.compile worth its compile time? Eager against compiled."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ddpm_lab.explain import charts, phrases, stats
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.charts import Figure, Panel, Row, bars
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Experiment, Family, Question
from ddpm_lab.training.setting import Batch, Precision, Setup, Workers, WorldSizes

QUESTION = Question(title="Is torch.compile worth its compile time?", file="05_torch_compile", trains=True)
STAGES = {
    "start": "start-up",
    "build": "data and network",
    "compile": "compile",
    "warmup": "warm-up",
    "steady": "timed steps",
    "teardown": "tear-down",
}


def torch_compile(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    precision: Precision | None = None,
    global_batch_size: Batch = None,
    loader_workers: Workers = None,
) -> Experiment:
    """Is torch.compile worth its compile time? Eager against compiled, in bf16 autocast unless said otherwise.

    On a GPU with CUDA graphs too, in the same sets, which launch a step's kernels at once; in ``full`` block by block,
    which compiles less and leaves what lies between the blocks eager.
    """
    full, precision = setup.preset == "full", precision or setup.usual_precision
    count = (min(4, setup.usable_cores) if full else 0) if loader_workers is None else loader_workers
    loader = setup.files(count) if count else {"loader": "packed"}
    usual = sorted({1, setup.most_ranks}) if full else [1]
    ways: list[tuple[str, dict[str, Any]]] = [("compiled", {"compile": "whole"})]
    if setup.device == "cuda" and not setup.own:
        ways.append(("compiled, CUDA graphs", {"compile": "whole", "compile_mode": "reduce-overhead"}))
    if full and not setup.own:
        ways.append(("compiled block by block", {"compile": "regional"}))
    families = []
    for ranks in setup.world_sizes(world_sizes, usual):
        batch = setup.batch_size(global_batch_size, ranks)
        eager = setup.config(global_batch_size=batch, world_size=ranks, precision=precision, **loader)
        name = f"{setup.family_name(batch, ranks)}, {setup.precision_name(precision)}"
        rows = tuple((label, replace(eager, **how)) for label, how in ways)
        family = Family(name=name, baseline=eager, baseline_label="eager", candidates=rows, primary="compiled")
        families.append(replace(family, together=setup.device == "cuda"))
    return Experiment(name="torch_compile", families=tuple(families))


def answer(study: Study) -> Answer:
    """Compare eager and compiled speed, and what compiling costs with what it saves."""

    def columns(row: Comparison) -> dict[str, str]:
        (cost, steps), compiled = break_even(study, row), bool(row.sets) and row.role == "candidate"
        return {
            "Compile, cold": phrases.seconds(cost.value) if compiled and cost.sets else phrases.DASH,
            "Pays off": pays_off(steps, row) if compiled else phrases.DASH,
        }

    split = "What a run costs beside its steps: eager, from a warm and from a cold cache."
    found = compared(study, own=lambda lead: [sentence(study, lead)])
    return speeds(study, found, columns=columns, views=(View(split, "costs", lambda: costs(study)),))


def break_even(study: Study, row: Comparison) -> tuple[stats.Estimate, stats.Interval]:
    """Seconds of a cold compile, and the steps that earn them back; infinite: never, at this speed.

    The geometric mean of one measurement has no interval; that of the steps then follows from the ratio's alone.
    """
    ok = [r for r in study.records if (r.role, r.status, r.run_id) == ("cold", "ok", row.run_id)]
    cost = stats.estimate(np.log([seconds for r in ok if (seconds := r.stages.get("compile"))]))
    step = row.step_seconds * row.ratio.value
    value, low, high = (step * (1 - 1 / v) if v else -math.inf for v in (row.ratio.value, *row.ratio.ends))
    saved = stats.Interval(value=value, low=low, high=high)
    low = high = math.inf if cost.sets and saved.exists else math.nan
    if value > 0 and math.isinf(low):
        low, high = stats.quotient_interval(cost, saved)
    known = not math.isnan(cost.value + value)
    steps = math.nan if not known else cost.value / value if value > 0 else math.inf
    return cost, stats.Interval(value=steps, low=low, high=high)


def pays_off(steps: stats.Interval, row: Comparison) -> str:
    """Such as "after 2,130 steps (1,900 to 2,500)", "never, at this speed", "inconclusive", or "unknown"."""
    if row.verdict == stats.SLOWER:
        return "never, at this speed"
    if row.verdict != stats.FASTER:
        return stats.INCONCLUSIVE
    if math.isnan(steps.value):
        return "unknown"
    count, few, many = (phrases.significant(v) for v in (steps.value, *steps.ends))
    between = f"{few} or more" if math.isinf(steps.high) else f"{few} to {many}"
    return f"after {phrases.plural(count, 'step')} ({between})"


def sentence(study: Study, row: Comparison) -> str:
    """Return cost and break-even of a compiled configuration, and what its last witness counted."""
    cost, steps = break_even(study, row)
    if not cost.sets:
        return "The cost of a cold compile was not measured."
    measured = phrases.plural(cost.sets, "measurement")
    text = f"Compiling takes {phrases.seconds(cost.value)} with an empty cache ({measured})"
    alone = cost.sets == 1 and row.verdict == stats.FASTER
    pays = f" and pays off {pays_off(steps, row)}{'; the interval is that of the speed alone' * alone}."
    text += pays if row.resolved else "; whether it pays off is not known yet."
    nouns = {"compiled_frames": "compiled frame", "graphs": "graph", "graph_breaks": "graph break"}
    nouns |= {"recompiles": "recompile"}
    ranks = [rank for r in study.records if r.run_id == row.run_id for rank in r.witness.get("ranks", ())]
    if last := next((rank for rank in reversed(ranks) if nouns.keys() <= rank.keys()), None):
        text += f" Witnessed: {phrases.joined([phrases.plural(int(last[key]), noun) for key, noun in nouns.items()])}."
    return text


def costs(study: Study) -> "Figure | None":
    """One stacked bar for eager training, and for compiled training from a warm and from a cold cache."""
    shown = [(c, rows) for c in comparisons(study) if c.role == "candidate" and (rows := _bars(study, c))]
    if not shown:
        return None
    return bars(
        [Panel(heading=c.family, rows=rows) for c, rows in shown],
        title="What a run costs beside its steps",
        context=phrases.context(study),
        label="seconds",
        names=dict(zip(STAGES.values(), charts.SERIES, strict=False)),
        note="Median of each stage over the groups measured; timed steps last as long as the plan of a set says, and a "
        "cold compile is measured without them.",
    )


def _bars(study: Study, c: Comparison) -> list[Row]:
    """The bars of a compiled configuration; none unless its compile was measured."""
    ok = [r for r in study.records if r.status == "ok" and r.baseline_id == c.baseline_id]
    cold, warm = ([r for r in ok if (r.run_id, r.compile_cache) == (c.run_id, cache)] for cache in ("cold", "warm"))
    eager = [r for r in ok if r.role in ("baseline", "twin")]
    rows = []
    for name, found in ((c.baseline_label, eager), (f"{c.label}, warm cache", warm), (f"{c.label}, cold cache", cold)):
        if found and (cold or warm):
            each = {label: [r.stages[name] for r in found if name in r.stages] for name, label in STAGES.items()}
            parts = {label: float(np.median(seconds)) for label, seconds in each.items() if seconds}
            compiled = f", compile {phrases.seconds(parts['compile'])}" if "compile" in parts else ""
            text = f"{phrases.seconds(sum(parts.values()))}{compiled}"
            rows.append(Row(name=f"{name} ({phrases.plural(len(found), 'group')})", parts=parts, text=text))
    return rows
