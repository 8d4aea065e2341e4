"""What is freed comes back without page faults once a process was told to keep it, and is seen to do so."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.group import Group
from ddpm_lab.measure.witness import mismatches

PROGRAM = """
import json, resource, sys
import torch
from ddpm_lab.measure.freed_memory import freed_memory_seen, keep_freed_memory

def faults():
    # Blocks that one step frees before it takes others, as a network's activations are.
    def step():
        blocks = [torch.ones(size * 2**18) for size in (33, 40, 48)]
        del blocks[1]
        return torch.ones(36 * 2**18).sum()
    for _ in range(5):  # until every block has found its place
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

told = [freed_memory_seen(), faults()]
if "keep" in sys.argv:
    keep_freed_memory()
print(json.dumps([*told, freed_memory_seen(), faults()]))
"""
PAGES = (33 + 40 + 48 + 36) * 2**20 // os.sysconf("SC_PAGE_SIZE")


def run(*arguments: str, **environment: str) -> tuple[str, int, str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    seen, faults, after, left = json.loads(done.stdout)
    return str(seen), int(faults), str(after), int(left)


@pytest.mark.slow
def test_what_is_freed_is_kept_when_told() -> None:
    before, faults, after, left = run("keep")
    if before != "default":
        pytest.skip("something else than the C library's own malloc runs here, which keeps what is freed")
    assert after == "kept"
    assert faults > PAGES // 4 > 20 * left


@pytest.mark.slow
def test_a_rank_keeps_it_says_so_and_learns_the_same(synthetic: RunConfig) -> None:
    hashes = []
    kept = dataclasses.replace(synthetic, freed_memory="kept")
    for config in (synthetic, kept):
        with Group(config, threads=1, modules={}, environment={}) as group:
            group.advance(3, 120)
            witness = group.witness()
            hashes.append(group.call("weights_sha256", 60))
            group.finish()
        assert mismatches(config, witness) == []
    assert hashes[0] == hashes[1]
    assert mismatches(kept, [w | {"freed_memory": "default"} for w in witness]) != []
