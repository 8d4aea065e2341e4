"""Does mixed precision speed up training? fp32 against each narrower format."""

from collections.abc import Iterator
from dataclasses import replace

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain import charts, phrases, stats
from ddpm_lab.explain.answer import COLOURS, MEANING, Answer, View, measured, projection, speeds
from ddpm_lab.explain.charts import Figure, Panel, Row, bars
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Experiment, Family, Question
from ddpm_lab.training.setting import CPU_PRECISIONS, CUDA_PRECISIONS, Batch, Precisions, Setup, WorldSizes

QUESTION = Question(title="Does mixed precision speed up training?", file="03_amp", trains=True)


def amp(
    setup: Setup, *, precisions: Precisions = None, world_sizes: WorldSizes = None, global_batch_size: Batch = None
) -> Experiment:
    """Return the experiment that compares fp32 with each narrower format, for each number of ranks.

    On a GPU, all formats are measured in the same sets: by default torch computes convolutions in tf32, so a narrower
    format should be faster than tf32 too. The baseline of the user's own training is tf32 on such a GPU.
    """
    plain, cuda = setup.plain_precision, setup.device == "cuda"
    able = CUDA_PRECISIONS if cuda else CPU_PRECISIONS
    wanted = [p for p in (precisions or CUDA_PRECISIONS) if p != plain]
    usual = sorted({1, setup.most_ranks}) if setup.preset == "full" else [1]
    if not wanted:
        raise ConfigError(f"precisions is {precisions!r}: {plain} is what others are compared with; name another one")
    families, left_out = [], []
    for ranks in setup.world_sizes(world_sizes, usual):
        batch = setup.batch_size(global_batch_size, ranks)
        name, base = setup.family_name(batch, ranks), setup.config(global_batch_size=batch, world_size=ranks)
        rows = tuple(
            (p, replace(base, precision=p)) for p in ("bf16", "fp16", "tf32", "fp32") if p in wanted and p in able
        )
        families.append(
            Family(name=name, baseline=base, baseline_label=plain, candidates=rows, primary="bf16", together=cuda)
        )
        left_out += [(name, p, "needs a CUDA device") for p in wanted if p not in able]
    return Experiment(name="amp", families=tuple(families), left_out=tuple(left_out))


def answer(study: Study) -> Answer:
    """Return the answer: the speed of each format relative to the baseline; bars of times are a further view."""
    times = View("Time for 50,000 images in each precision.", "time", lambda: _times_figure(study))
    found = compared(study, own=lambda first: _beside_tf32(study, first))
    return speeds(study, found, views=(times,))


def _beside_tf32(study: Study, first: Comparison) -> Iterator[str]:
    """Yield a sentence on the speed of a format relative to tf32, computed from the sets that contain both."""
    for row in comparisons(study):
        if row.label == "tf32" != first.label and row.role == "candidate" and row.family == first.family and row.sets:
            other = dict(row.logs)
            logs = [log - other[each] for each, log in first.logs if each in other]
            ratio = phrases.times(stats.estimate(logs)) if logs else "not measured"
            own = f"tf32, in which torch computes convolutions unless told otherwise, {phrases.times(row.ratio)}"
            yield f"{own}; {first.label} beside tf32: {ratio}."


def _times_figure(study: Study) -> "Figure | None":
    """Return a bar chart of the time for 50,000 images, projected from each ratio; None if nothing was measured."""
    shown = measured(study)
    if not shown:
        return None
    unit, time_of = projection([c for rows in shown for c in rows])
    panels = []
    for rows in shown:
        base, bars_of = next((c for c in rows if c.role == "baseline"), rows[0]), []
        for c in rows:
            time, colour = time_of(c, base), charts.SOFT if c is base else COLOURS.get(c.verdict, charts.OPEN)
            text = phrases.significant(time.value)
            bars_of.append(Row(name=c.label, value=time.value, low=time.low, high=time.high, colour=colour, text=text))
        panels.append(Panel(heading=rows[0].family, rows=bars_of))
    return bars(
        panels,
        title="Time for 50,000 images",
        context=phrases.context(study),
        label=f"{unit} (projected from timed steps)",
        note=f"The baseline's time divided by each ratio, with its 95 % interval over sets. {MEANING}",
    )
