"""Memory that grows from window to window: something is kept that every step adds to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ddpm_lab.explain import phrases
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

LEAST_WINDOWS = 6
LEAST_SHARE = 0.9
"""Share of successive windows of a set between which memory grew."""
LEAST_BYTES = 8 * 2**20
"""Growth over a set. Of 338 sets of the lab's own, on a CPU, memory grew in over 80 % of the windows of none."""
KINDS = {"rss_bytes": "main memory", "allocated_bytes": "memory of the GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """How much more a rank held after a set's last window than after its first, and over how many steps."""

    record: RunRecord
    kind: str
    grown_bytes: float
    steps: int
    windows: int

    def sentence(self) -> str:
        """What is kept, by whom, how fast it grows, and where to look."""
        config = self.record.config
        place = next((str(r["place"]) for r in self.record.witness.get("ranks", ()) if r.get("place")), "")
        name = config.work_name if config.is_own else config.workload
        return (
            f"{name}{f' ({place})' if place else ''} leaks memory: with {self.record.label} a rank holds "
            f"{phrases.memory(self.grown_bytes)} more {KINDS[self.kind]} after {self.windows} windows than after the "
            f"first, about {phrases.significant(self.grown_bytes / self.steps / 2**10)} KiB a step"
        )


def leaks(study: Study) -> list[Leak]:
    """The fastest growing set of each configuration that leaks in at least half of its sets."""
    by_work: dict[str, list[Leak | None]] = {}
    for record in study.records:
        if len(record.windows) >= LEAST_WINDOWS:
            by_work.setdefault(record.run_id, []).append(leak(record))
    found = []
    for known in by_work.values():
        sure = [one for one in known if one is not None]
        if 2 * len(sure) >= len(known):
            found.append(max(sure, key=lambda one: one.grown_bytes / one.steps))
    return found


def leak(record: RunRecord) -> Leak | None:
    """How a record's memory grew; None where it did not, or where it cannot be known."""
    windows = sorted(record.windows, key=lambda w: w.turn)
    for kind in KINDS:
        held = [bytes_held for w in windows if (bytes_held := w.state.get(kind)) is not None]
        if len(held) < max(LEAST_WINDOWS, len(windows)):
            continue
        grew = sum(after > before for before, after in pairwise(held)) / (len(held) - 1)
        if grew >= LEAST_SHARE and held[-1] - held[0] >= LEAST_BYTES:
            steps = sum(w.steps + record.plan.settle_steps for w in windows[1:])
            return Leak(record=record, kind=kind, grown_bytes=held[-1] - held[0], steps=steps, windows=len(windows))
    return None


def sentence(study: Study) -> str:
    """A sentence after a space for what leaks, the fastest first; empty where nothing does."""
    found = sorted(leaks(study), key=lambda one: -one.grown_bytes / one.steps)
    if not found:
        return ""
    others = f"; so do {phrases.plural(len(found) - 1, 'other configuration')}" if len(found) > 1 else ""
    return f" {found[0].sentence()}{others}."
