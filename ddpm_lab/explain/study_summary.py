"""The summary table and the speed-up block of a study of scaling: paired speed-ups, from records alone."""

from __future__ import annotations

from collections.abc import Iterable

from ddpm_lab.explain import machine_state, phrases, scaling
from ddpm_lab.explain.bands import S001
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, PROJECTED_IMAGES, Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.pairs import EPOCH, evidence, known, rating, records_of, where
from ddpm_lab.explain.summary import Row as Run
from ddpm_lab.explain.summary import Scaling, SpeedUps, Summary
from ddpm_lab.record import RunRecord

METHOD = "Speed-ups are paired, in sets whose configurations take turns; intervals are over sets. "
METHOD += "Time (s) is that of the timed windows alone."


def of_study(study: Study, source: str = "") -> tuple[list[Run], SpeedUps]:
    """The runs of a study's families that scale, and what several devices gain over one; ``source`` is the ledger."""
    rows = [r for r in scaling.rows(study) if r.role in ("baseline", "candidate")]
    runs = [_run(study, r, rows, source) for r in rows]
    sizes = [_size(r) for r in rows if r.sets]
    lone = [one for one in sizes if one.speed_up is None]
    return runs, SpeedUps(
        per_epoch=True,
        baselines=tuple(one for one in lone if one.devices == 1),
        compared=tuple(one for one in sizes if one.devices > 1),
        notes=(f"{METHOD} {EPOCH}", f"Measured on {where(study)}.{machine_state.busy(study)}") if rows else (),
    )


def _run(study: Study, row: Comparison, rows: Iterable[Comparison], source: str) -> Run:
    config = row.config
    records = records_of(study, row)
    kept = [w for r in records if r.status == "ok" for w in r.windows]
    busy = [p for w in kept if (p := w.state.get("gpu_utilisation_percent")) is not None]
    sets = bool(row.sets)
    told = Summary(
        job_id=next((r.environment.slurm_job_id for r in reversed(records) if r.environment.slurm_job_id), "none"),
        configuration=row.family,
        gpus=config.world_size if config.device == "cuda" else 0,
        ranks=config.world_size,
        nodes=config.nodes,
        epochs=sum(w.images for w in kept) / PROJECTED_IMAGES if sets else None,
        seconds=sum(w.seconds for w in kept) if sets else None,
        epoch_seconds=row.projected_seconds if sets else None,
        loss=_best(row, rows),
        gpu_percent=sum(busy) / len(busy) if busy else None,
        note=MECHANISM_ONLY if row.mechanism_only else "",
    )
    return Run(log=source, summary=told, note=_note(row))


def _note(row: Comparison) -> str:
    """What a reader must know beside the time: where it ran, on how many sets it rests, and of what quality it is."""
    size = scaling.layout(row.config)
    if not row.sets:
        return size if row.mechanism_only else f"{size}; {phrases.without_speed(row)}"
    quality = f"; quality {row.quality}" if row.role == "candidate" else ""
    return f"{size}; {phrases.plural(row.sets, 'set')}{quality}"


def _best(row: Comparison, rows: Iterable[Comparison]) -> float | None:
    """The lowest held-out loss that trials of a configuration reached; None without any."""
    trials: list[RunRecord] = []
    for other in rows:
        pairs = other.equivalence.pairs
        if other is row:
            trials += [mine for _, mine in pairs]
        elif row.role == "baseline" and other.baseline_id == row.run_id:
            trials += [base for base, _ in pairs]
    return min((look["loss"] for t in trials for look in (t.quality or {})["held_out"]), default=None)


def _size(row: Comparison) -> Scaling:
    config = row.config
    ratio = row.ratio.value if row.role == "candidate" and known(row.ratio.value) else None
    return Scaling(
        configuration=row.family,
        gpu=config.device == "cuda",
        devices=config.world_size,
        nodes=config.nodes,
        times=(row.projected_seconds,),
        speed_up=ratio,
        missing="no run on a single device beside it" if ratio is None else "",
        evidence=evidence(row) if ratio is not None else "",
        rating=rating(row, S001) if ratio is not None else "",
    )
