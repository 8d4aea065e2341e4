"""What is said of batch sizes: the largest that fits, why no more, and the speed of each."""

import dataclasses
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions.batch_size import CAVEAT, sentence
from ddpm_lab.record import RunRecord

BASE = RunConfig(device="cuda", global_batch_size=128)
FAMILY = "tiny, 1 GPU, fp32"


def of(batch: int, base: RunConfig = BASE) -> RunConfig:
    return dataclasses.replace(base, global_batch_size=batch)


def searched(limit: str = "memory", reason: str = "no room", fits: int = 1152, base: RunConfig = BASE) -> RunRecord:
    """How a search ended, as the measuring half leaves it."""
    values: dict[str, Any] = {"experiment": "batch_size", "family": FAMILY, "set_id": "", "baseline_id": ""}
    values |= {"status": "ok" if fits else "oom", "reason": reason}
    return make.record(of(fits or 128, base), role="largest", label=limit, **values)


def measured(**values: Any) -> list[RunRecord]:
    """A size twice as large takes 1.5 times as many images a second."""
    larger = {f"batch {n}": (of(n), 1.5 ** (i + 1)) for i, n in enumerate((256, 512, 1024))}
    values |= {"baseline": BASE, "baseline_label": "batch 128", "experiment": "batch_size", "family": FAMILY}
    return make.sets(larger, **values)


def study(*records: RunRecord) -> Study:
    return make.study(make.on(make.GPUS, records), "batch_size")


@pytest.mark.parametrize(
    ("limit", "fits", "words"),
    [
        ("memory", 1, "The largest batch that fits is 1 image (no room)"),
        ("cap", 512, "A batch of 512 images fits, where the search ended (no room)"),
        ("failure", 512, "A batch of 512 images fits, where the search ended (no room)"),
        ("memory", 0, "No batch fits (no room)"),
    ],
)
def test_a_limit_that_is_not_memory_is_not_called_the_largest_that_fits(limit: str, fits: int, words: str) -> None:
    assert sentence(study(searched(limit, fits=fits))) == f"{words}. {CAVEAT}"


def test_the_last_search_counts_and_other_work_does_not() -> None:
    bf16 = dataclasses.replace(BASE, precision="bf16")
    other = dataclasses.replace(searched(fits=64, base=bf16), family="tiny, 1 GPU, bf16")
    found = sentence(study(searched("time", fits=512), searched(), other, *measured()))
    assert "largest batch that fits is 1,152 images" in found
    assert "64 images" not in found, "of which nothing is compared"
    both = sentence(study(searched(), other))
    assert all(f"with {name}" in both.lower() for name in (FAMILY.lower(), "tiny, 1 gpu, bf16"))
