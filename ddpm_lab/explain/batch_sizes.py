"""The largest batch that fits, why no more, and the sizes that were compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import Comparison, comparisons, families
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

EXPERIMENT = "batch_size"
CAVEAT = "Equal images in other batches are not equal training."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is known of batch sizes for one piece of work: how the search ended, its tries, and rows of comparisons."""

    family: str
    end: RunRecord | None
    tries: tuple[RunRecord, ...]
    rows: tuple[Comparison, ...]

    @property
    def largest(self) -> int:
        """The largest global batch size that fits; 0 where none is known."""
        return self.end.config.global_batch_size if self.end and self.end.status == "ok" else 0

    def words(self) -> str:
        """Such as "the largest batch that fits is 512 images (576 images are out of memory)"."""
        if self.end is None:
            return "the largest batch that fits was not found"
        if not self.largest:
            return f"no batch fits ({self.end.reason})"
        images = phrases.plural(self.largest, "image")
        if self.end.label == "memory":
            return f"the largest batch that fits is {images} ({self.end.reason})"
        return f"a batch of {images} fits, where the search ended ({self.end.reason})"


def sizes(study: Study) -> list[Sizes]:
    """All pieces of work whose batch sizes a study holds; of other searches only where it compares nothing."""
    searched = {r.family: r.config for r in study.records if r.role == "largest"}
    found = [_sizes(study, rows[0].config, rows[0].family, rows) for rows in families(comparisons(study))]
    return found or [_sizes(study, config, family, ()) for family, config in searched.items()]


def _sizes(study: Study, base: RunConfig, family: str, rows: Sequence[Comparison]) -> Sizes:
    same = [r for r in study.records if r.config.differences(base).keys() <= {"global_batch_size"}]
    ends = [r for r in same if r.role == "largest"]
    tries = {r.config.global_batch_size: r for r in same if r.role == "search"}
    return Sizes(
        family=family,
        end=ends[-1] if ends else None,
        tries=tuple(tries[batch] for batch in sorted(tries)),
        rows=tuple(sorted((r for r in rows if r.sets and r.role != "twin"), key=lambda r: r.batch)),
    )


def sentence(study: Study) -> str:
    """The largest batch of each piece of work, and that speed is not all there is to a size; after a space."""
    found = sizes(study)
    each = [f"{f'with {s.family} ' if len(found) > 1 else ''}{s.words()}" for s in found]
    return f" {phrases.begun('; '.join(each))}. {CAVEAT}" if each else ""
