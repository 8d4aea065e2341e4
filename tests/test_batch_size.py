"""The largest batch: the search finds what was planted, keeps clear of main memory, and is told with its reason."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.measure import alone, hardware
from ddpm_lab.measure.sets import Member
from ddpm_lab.plan import Family
from ddpm_lab.questions.batch_size import CAVEAT, sentence
from ddpm_lab.record import RunRecord

CUDA = RunConfig(device="cuda", global_batch_size=128)
CPU = RunConfig(global_batch_size=8)
MIB = 2**20


class Machine:
    """Fits ``fits`` images, and keeps every try in a ledger of its own."""

    def __init__(self, base: RunConfig, fits: int, *, most: int = 65_536, status: str = "oom") -> None:
        most = max(most, base.global_batch_size)
        self.family = Family(name="f", baseline=base, baseline_label="base", candidates=(), search_up_to=most)
        self.fits, self.status = fits, status
        self.fixed = self.each = 0  # bytes of a rank
        self.records, self.tried = list[RunRecord](), list[int]()
        self.left = math.inf if base.device == "cpu" else 1e9

    def attempt(self, member: Member) -> RunRecord:
        batch, ranks = member.config.global_batch_size, member.config.world_size
        assert batch % ranks == 0
        self.tried.append(batch)
        peak = self.fixed + self.each * batch // ranks
        rank = dataclasses.replace(make.rank_record(0), peak_memory_bytes=None, peak_rss_bytes=peak)
        how: dict[str, Any] = {"status": "ok"} if batch <= self.fits else {"status": self.status, "reason": "no room"}
        how |= {"set_id": "", "baseline_id": "", "role": member.role, "label": member.label}
        how |= {"stages": {"start": 1.0, "warmup": batch / 100}, "ranks": (rank,) * ranks}
        self.records.append(make.record(member.config, **how))
        return self.records[-1]

    def search(self) -> RunRecord | None:
        return alone.largest_batch(self.family, self.records, self.attempt, lambda: self.left)

    def found(self) -> tuple[int, str]:
        ended = self.search()
        assert ended is not None
        assert (ended.role, bool(ended.reason)) == ("largest", True)
        return ended.config.global_batch_size if ended.status == "ok" else 0, ended.label


@given(fits=st.integers(0, 20_000), first=st.integers(1, 300), ranks=st.integers(1, 8))
def test_the_planted_limit_is_found_to_a_sixteenth_and_nothing_is_tried_twice(
    fits: int, first: int, ranks: int
) -> None:
    planted = Machine(dataclasses.replace(CUDA, world_size=ranks, global_batch_size=first * ranks), fits)
    found, limit = planted.found()
    assert limit == "memory"
    assert found <= fits < found + max(ranks, found / alone.PARTS)
    assert len(set(planted.tried)) == len(planted.tried)
    # Doubling or halving to the limit, and four halvings of what is left.
    assert len(planted.tried) <= abs(math.log2((first * ranks) / max(fits, 1))) + 7
    tried = list(planted.tried)
    assert planted.found() == (found, limit)
    least = min(n for n in tried if n > fits)
    assert planted.tried == [*tried, least], "another process may have had the memory that was missing"
    planted.fits = 4 * least
    assert planted.found()[0] >= 2 * least


def test_a_cap_a_budget_and_a_failure_end_it_with_their_reason() -> None:
    full = Machine(CUDA, 1200)
    assert full.found() == (1152, "memory")
    assert full.tried == [128, 256, 512, 1024, 2048, 1536, 1280, 1152, 1216], "doubled, and then the gap is halved"
    assert Machine(CUDA, 10**6, most=1000).found() == (1000, "cap")
    slow = Machine(CUDA, 10**6)
    slow.left = 40.0  # a try takes a second and 10 ms an image; it may take half of what is left
    assert slow.found() == (1024, "time")
    slow.left = math.inf
    assert slow.found() == (8192, "time"), "with more time it goes on, to the longest try"
    assert slow.tried == [128 * 2**i for i in range(7)]
    for status, found, tries in (("crashed", 256, 2), ("refused", 288, 1)):  # what may pass is tried again
        failing = Machine(CUDA, 300, status=status)
        assert failing.found() == failing.found() == (found, "failure")
        assert failing.tried.count(512) == tries
    crashing = Machine(CUDA, 0, status="crashed")
    assert (crashing.search(), crashing.tried) == (None, [128])


@given(
    available=st.integers(2500, 50_000),
    fixed=st.integers(0, 500),
    each=st.floats(0.2, 40),
    ranks=st.sampled_from([1, 2, 3]),
)
def test_a_cpu_is_filled_to_four_fifths_and_never_beyond(available: int, fixed: int, each: float, ranks: int) -> None:
    base = dataclasses.replace(CPU, world_size=ranks, global_batch_size=ranks)
    planted = Machine(base, 10**9)
    planted.fixed, planted.each = fixed * MIB // ranks, int(each * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "available_bytes", lambda: available * MIB)
        found, limit = planted.found()
    room = alone.MEMORY_SHARE * available * MIB

    def needs(batch: int) -> int:
        return ranks * (planted.fixed + planted.each * batch // ranks)

    assert all(needs(batch) <= room for batch in planted.tried[1:])
    if limit == "memory":
        assert needs(found + max(ranks, found // alone.PARTS)) > room - MIB
    else:
        assert limit == "time", "a planted try takes 10 ms an image"


def test_what_control_groups_leave_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max": 900, "current": 600, "limit_in_bytes": 900, "usage_in_bytes": 600}
    for name, size in sizes.items():
        (tmp_path / f"memory.{name}").write_text(f"{size * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 * MIB}\ntotal_inactive_file {150 * MIB}\n")
    monkeypatch.setattr(hardware, "cgroup_levels", lambda _: [tmp_path / "none", tmp_path])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4000 * MIB))
    assert hardware.available_bytes() == 400 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.available_bytes() == 450 * MIB, "as version 1 has it"
    (tmp_path / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert hardware.available_bytes() == 4000 * MIB


FAMILY = "tiny, 1 GPU, fp32"


def searched(limit: str = "memory", fits: int = 1152, base: RunConfig = CUDA, family: str = FAMILY) -> RunRecord:
    """How a search ended, as the measuring half leaves it."""
    values: dict[str, Any] = {"experiment": "batch_size", "family": family, "set_id": "", "baseline_id": ""}
    values |= {"status": "ok" if fits else "oom", "reason": "no room", "role": "largest", "label": limit}
    return make.record(dataclasses.replace(base, global_batch_size=fits or 128), **values)


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
