"""How should ranks exchange gradients? Settings of the exchange."""

from dataclasses import replace
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import ExchangeConfig
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Experiment, Family, Question
from ddpm_lab.training.setting import Batch, Precision, Setup, WorldSizes

QUESTION = Question(title="How should ranks exchange gradients?", file="exchange", trains=True)

BASELINE, NO_EXCHANGE = "default", "no exchange (no training)"
_SETTINGS: dict[str, dict[str, Any]] = {
    NO_EXCHANGE: {"enabled": False},
    "bf16 hook": {"hook": "bf16"},
    "fp16 hook": {"hook": "fp16"},
    "buckets of 5 MiB": {"bucket_mb": 5},
    "static graph": {"static_graph": True},
    "no bucket view": {"bucket_view": False},
    "buckets of 100 MiB": {"bucket_mb": 100},
    "buckets of 1 MiB": {"bucket_mb": 1},
    "NCCL for PCIe": {"nccl": "pcie"},
}


def exchange(
    setup: Setup, *, world_sizes: WorldSizes = None, global_batch_size: Batch = None, precision: Precision = "fp32"
) -> Experiment:
    """What is each setting of the exchange worth, and what does the exchange cost at all?

    Two ranks, on a GPU as many as there are; ``smoke`` measures the first two settings. NCCL's settings need GPUs.
    """
    usual = [setup.most_ranks] if setup.device == "cuda" else [2]
    asked = setup.world_sizes(world_sizes, [n for n in usual if n > 1])
    if world_sizes is not None and 1 in asked:
        raise ConfigError("world_sizes has 1, and one rank exchanges nothing: give 2 or more")
    format_ = f", {precision}" * (precision != "fp32")
    able = [label for label, changes in _SETTINGS.items() if setup.device == "cuda" or "nccl" not in changes]
    able = able[: 2 if setup.preset == "smoke" else None]
    families = []
    for ranks in asked or [1]:  # one rank alone exchanges nothing
        batch = setup.batch_size(global_batch_size, ranks)
        base = setup.config(global_batch_size=batch, world_size=ranks, precision=precision)
        rows = tuple((s, replace(base, exchange=ExchangeConfig(**_SETTINGS[s]))) for s in able) if asked else ()
        how: dict[str, Any] = {"baseline_label": BASELINE, "candidates": rows, "primary": "bf16 hook"}
        how |= {} if rows else {"baseline_label": setup.ranks_label(1), "primary": "", "mechanism": True}
        families.append(Family(name=f"{setup.family_name(batch, ranks)}{format_}", baseline=base, **how))
    left_out = () if asked else ((families[0].name, setup.ranks_label(2), setup.why_alone),)
    return Experiment(name="exchange", families=tuple(families), left_out=left_out)


def answer(study: Study) -> Answer:
    """Compare the settings of the exchange; ranks that exchange nothing train apart and are none."""
    notes = []
    for row in comparisons(study):
        if row.role == "candidate" and row.sets and not row.config.exchange.enabled:
            shorter, low, high = (100 * (1 - 1 / ratio) for ratio in (row.ratio.value, *row.ratio.ends))
            text = f"{shorter:.1f} % shorter ({low:.1f} to {high:.1f} %): exposed communication"
            unsure = f"not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row.ratio)})"
            said = text if row.verdict == stats.FASTER else unsure
            notes.append(f"Without exchange a step of {row.family} is {said}.")
    found = compared(study, keep=lambda row: row.config.exchange.enabled, own=lambda _: notes)
    return speeds(study, found)
