"""The numbers of the README, derived again from the published records without the lab's own statistics."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

CHECKOUT = Path(__file__).resolve().parents[1]
README = (CHECKOUT / "README.md").read_text()
HERE = "amd-epyc-family-26-model-2-2-cores-no-gpu"
MILAN = "amd-epyc-family-25-model-1-2-cores-no-gpu"
GENOA = "amd-epyc-family-25-model-17-2-cores-no-gpu"
H100 = "1-x-nvidia-h100-80gb-hbm3-intel-r-xeon-r-processor-family-6-model-207-16-cores"
LEVERS = "seed, batch 32, one lever at a time"
ON_A_GPU = "seed, batch 128, 1 GPU"
ROWS = {
    f"bf16 in place of fp32](image_output/published/{HERE}/03": (HERE, "amp", "tiny, batch 8, 1 rank", "bf16", ""),
    f"bf16 in place of fp32](image_output/published/{HERE}/07": (HERE, "peers", LEVERS, "", "fp32"),
    "2 loader workers": (HERE, "workers", "training, tiny, batch 8, fp32", "2 workers", ""),
    "this trainer in place of diffusers, tuned": (HERE, "peers", "seed, batch 32", "", "diffusers, tuned"),
    "on the processor of the figure above": (MILAN, "amp", "seed, batch 8, 1 rank", "bf16", ""),
    "[compiled in place of eager]": (GENOA, "quality", "tiny, batch 8", "compiled", ""),
    "bf16 in place of exact fp32": (H100, "amp", ON_A_GPU, "bf16", ""),
    "tf32 in place of exact fp32": (H100, "amp", ON_A_GPU, "tf32", ""),
    "bf16 in place of tf32": (H100, "amp", ON_A_GPU, "bf16", "tf32"),
    "compiled bf16 in place of eager": (H100, "torch_compile", f"{ON_A_GPU}, bf16", "compiled", ""),
}
"""Rows by their words: machine, question, family, and the two labels that are compared; none is the baseline."""


@cache
def records(machine: str) -> list[dict[str, Any]]:
    ledger = CHECKOUT / "trace_output" / "published" / f"{machine}.jsonl"
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def sets_of(machine: str, experiment: str, family: str, label: str) -> Iterator[float]:
    """Log of the speed of one label relative to the baseline and its repeat, in each quiet set.

    Of a quiet one, a fifth of the time at most is in turns in which others took a quarter of a core that was wanted.
    """
    sets: dict[str, dict[str, dict[str, dict[int, float]]]] = defaultdict(lambda: defaultdict(dict))
    turns: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    spared = 14 if machine == H100 else 0
    for record in records(machine):
        if (record["experiment"], record["family"]) == (experiment, family):
            seconds = {w["turn"]: w["seconds"] / w["images"] for w in record["windows"]}
            for w in record["windows"]:
                turns[record["set_id"]][w["turn"]].append((w["others_cores"] - spared, w["seconds"]))
            sets[record["set_id"]][record["role"]][record["label"]] = seconds
    for name, found in sets.items():
        taken = [np.array(turn).T for turn in turns[name].values()]
        crowded = sum(seconds.sum() for others, seconds in taken if others.mean() >= 0.25)
        quiet = crowded <= 0.2 * sum(seconds.sum() for _, seconds in taken)
        if (theirs := found["candidate"].get(label)) and quiet:
            (base,), (twin,) = found["baseline"].values(), found["twin"].values()
            yield float(np.mean([math.log(base[t] * twin[t]) / 2 - math.log(theirs[t]) for t in theirs]))


def check_interval(low: float, high: float, logs: Sequence[float]) -> None:
    """It may differ from Student's t, since other comparisons of the machine moderate it, but not by much."""
    width = stats.sem(logs) * stats.t.ppf(0.975, len(logs) - 1)
    assert 0.4 < math.log(high / low) / 2 / width < 2.5, f"plain interval: {math.exp(width) - 1:.1%}"


@pytest.mark.parametrize("row", ROWS)
def test_a_number_of_the_readme_is_what_the_records_give(row: str) -> None:
    """Ratio and sets exactly, the interval nearly."""
    (line,) = [line for line in README.splitlines() if row in line]
    found = re.search(r"([\d.]+) \(([\d.]+) to ([\d.]+)\), (\d+) sets", line)
    assert found
    ratio, low, high = map(float, found.groups()[:3])
    machine, experiment, family, *labels = ROWS[row]
    one, other = (list(sets_of(machine, experiment, family, label)) if label else [0.0] for label in labels)
    sets = np.subtract(one, other).tolist()
    assert len(sets) == int(found[4])
    assert f"{math.exp(np.mean(sets)):.{len(found[1]) - 2}f}" == found[1]
    assert low <= ratio <= high
    check_interval(low, high, sets)


CHANGES = {
    "bf16": "bf16",
    "this lab's fused kernels": "fused kernels in channels last",
    "freed memory kept": "freed memory kept",
    "channels_last": "channels last",
    "torch.compile": "compiled",
    "2 processes": "2 ranks",
}
"""Rows of the table of single changes, by their first words."""
COLUMNS = ("`tiny`, batch 8", "`seed`, batch 8", "`seed`, batch 32", "`ddpm`, batch 8")


def test_the_table_of_single_changes_is_what_the_records_give() -> None:
    """Each ratio exactly, its interval beside Student's t; bold is what Student's t tells from 1 too."""
    lines = README.splitlines()
    (head,) = (i for i, line in enumerate(lines) if all(name in line for name in COLUMNS))
    names = [cell.strip() for cell in lines[head].strip("|").split("|")][1:]
    for line, (words, label) in zip(lines[head + 2 :], CHANGES.items(), strict=False):
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert words in first
        for name, cell in zip(names, cells, strict=True):
            found = re.fullmatch(r"(\**)([\d.]+) \(([\d.]+)–([\d.]+)\)\1", cell)
            assert found, cell
            low, high = float(found[3]), float(found[4])
            logs = list(sets_of(HERE, "bottleneck", f"{name.replace('`', '')}, 1 rank, one change at a time", label))
            assert len(logs) >= 4
            if not found[1]:  # what was called stays as it was first called, whatever was measured since
                assert f"{math.exp(np.mean(logs)):.2f}" == found[2], (words, name)
            t, p = stats.ttest_1samp(logs, 0.0)
            assert not found[1] or (p < 0.05 and (t > 0) == (low > 1)), (words, name)
            check_interval(low, high, logs)
            if (name, words) == ("`seed`, batch 8", "bf16"):
                assert f"the same U-Net {found[2]} times as fast as fp32 on one processor" in README


def test_the_gpu_was_as_busy_as_the_readme_says_and_graphs_as_fast() -> None:
    busy: dict[str, list[float]] = defaultdict(list)
    for record in records(H100):
        if record["experiment"] == "torch_compile":
            name = record["label"].removesuffix(" again")
            busy[name] += [w["state"]["gpu_utilisation_percent"] for w in record["windows"]]
    eager, compiled = (f"{np.mean(busy[name]):.0f} %" for name in ("eager", "compiled"))
    assert f"Eager, the GPU was busy {eager} of the time, compiled {compiled}" in README
    (log,) = sets_of("torch_compile", "seed, batch 128, 1 GPU, bf16", "compiled, CUDA graphs", H100)
    assert f"launched as CUDA graphs | {math.exp(log):.2f}, 1 set" in README
    assert f"CUDA graphs {math.exp(log):.2f} times (one set" in README
    (called,) = (line for line in README.splitlines() if "compiled bf16 in place of eager" in line)
    assert f"compiling made bf16 {called.split('| ')[2].split()[0]} times" in README


def test_every_ratio_of_the_readme_is_derived_here() -> None:
    assert len(re.findall(r"\d \([\d.]+ to [\d.]+\), \d+ sets", README)) == len(ROWS)


def test_timed_once_is_off_by_what_the_readme_says() -> None:
    """The seven ways of the picture: each repeat's seconds of fp32 over those of bf16."""
    told: dict[int, dict[str, list[float]]] = defaultdict(dict)
    for record in records(MILAN):
        if record["role"] == "wrong" and record["label"] in ("fp32", "bf16"):
            ways, begun = record["profile"]["wrong_ways"], record["stages"]
            first, runs = ways["fresh"]["step_seconds"], ways["runs"]["seconds"]
            process = begun["start"] + begun["build"] + sum(first)
            seconds = [process, first[0], sum(first), ways["bars"]["seconds"], ways["profiled"]["seconds"]]
            told[record["config"]["seed"]][record["label"]] = [*seconds, min(runs), sum(runs)]
    ratios = [np.divide(each["fp32"], each["bf16"]) for each in told.values()]
    assert np.shape(ratios) == (20, 7)
    sets = list(sets_of(MILAN, "claims", "tiny, batch 8", "bf16"))
    single, long = np.ravel(ratios), np.transpose(ratios)[6]
    slower = single[single < 1]
    assert f"Of {single.size}, two say that bf16 is faster" in README
    assert single.size - slower.size == 2
    assert f"{min(slower):.2f} to {max(slower):.2f} times" in README
    assert f"say {min(long):.2f} to {max(long):.2f}." in README
    assert f"The lab measured {math.exp(np.mean(sets)):.2f} (" in README


@pytest.mark.parametrize(
    ("images", "label", "margin"),
    [(60_000, "bf16", 0.002), (150_000, "compiled", 0.001), (150_000, "batch 16", -0.005)],
)
def test_what_is_worse_and_what_is_not(images: int, label: str, margin: float) -> None:
    """Held-out losses, paired by seed: Student's t at 90 %, as is usual for equivalence. Below 0, it is exceeded."""
    last: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records(GENOA):
        if record["role"] == "quality" and (looks := record["quality"]["held_out"]) and looks[-1]["images"] == images:
            last[record["label"]][record["config"]["seed"]] = looks[-1]["loss"]
    apart = [loss - last["fp32"][seed] for seed, loss in last[label].items()]
    low, high = stats.t.interval(0.9, len(apart) - 1, np.mean(apart), stats.sem(apart))
    assert low > -margin if margin < 0 else high < margin
    words = f"not worse after {images:,} images (5 seeds" if margin > 0 else "batch 16 in place of 8 is worse |"
    assert (len(apart), README.count(words)) == (5, 1)
