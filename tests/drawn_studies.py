"""Studies of every kind that figures are drawn of, by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import planted_search
import records as make
import scaled_records

from ddpm_lab.config import LOADER_ALONE, RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import LEVERS
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")
FILES = RunConfig(loader="files")
REASON = "the process ended with signal 9 while it was building the network; the kernel log may say more " * 3


def amp(**values: Any) -> Study:
    return make.study(make.sets({"bf16": (BF16, 1.62)}, **values))


def workers(count: int, *more: RunRecord) -> Study:
    """So many numbers of workers, each 0.5 times the baseline's speed faster than the one before, and a failure."""
    tried = {f"{n} workers": (replace(FILES, loader_workers=n), 1 + 0.5 * n) for n in range(1, count + 1)}
    lost = {"99 workers": (replace(FILES, loader_workers=99), "crashed", REASON)}
    values: dict[str, Any] = {"baseline_label": "0 workers", "experiment": "workers", "failures": lost}
    return make.study([*make.sets(tried, baseline=FILES, **values), *more])


def loader() -> Study:
    alone = replace(FILES, workload=LOADER_ALONE)
    values: dict[str, Any] = {"experiment": "workers", "family": "loader alone, batch 32", "step_seconds": 0.001}
    two = {"2 workers": (replace(alone, loader_workers=2), 1.8)}
    return workers(2, *make.sets(two, baseline=alone, baseline_label="0 workers", **values))


def compiled() -> Study:
    """Stages and counters as the measuring half leaves them, and three cold compiles."""
    config = RunConfig(compile="whole")
    counted = {"compiled_frames": 2, "graphs": 3, "graph_breaks": 1, "recompiles": 0}
    stages = {"start": 0.03, "build": 1.2, "warmup": 0.25, "steady": 3.7, "teardown": 0.04}
    records = make.sets({"compiled": (config, 1.3)}, baseline_label="eager", experiment="torch_compile", stages=stages)
    warm = {**stages, "compile": 1.6}
    records = [
        replace(r, stages=warm, compile_cache="warm", witness={"ranks": [counted]}) if r.role == "candidate" else r
        for r in records
    ]
    values = {"experiment": "torch_compile", "baseline_id": RunConfig().run_id, "label": "compiled"}
    return make.study(records + make.cold(config, [31.0, 34.0, 36.0], **values))


def batches() -> Study:
    """A search that ended for lack of memory, and sets."""
    sizes = {n: RunConfig(global_batch_size=n) for n in (8, 16, 32, 64, 128, 256, 512, 1024, 768)}
    reason = "1,024 images would need about 19.3 GiB, 80 % of the 21.2 GiB available may be used"
    values: dict[str, Any] = {"experiment": "batch_size", "family": "tiny, 1 rank, fp32"}
    rank = replace(make.rank_record(0), peak_rss_bytes=700 << 20)
    found = [
        make.record(c, role="search", label=f"batch {n}", set_id="", baseline_id="", ranks=(rank,), **values)
        for n, c in sizes.items()
    ]
    found[-2] = replace(found[-2], status="oom", ranks=())
    found.append(replace(found[-1], role="largest", label="memory", reason=reason))
    larger = {f"batch {n}": (c, 1 + 0.1 * i) for i, (n, c) in enumerate(sizes.items()) if 8 < n <= 512}
    return make.study(found + make.sets(larger, baseline=sizes[8], baseline_label="batch 8", **values))


def wordy() -> Study:
    """Names of hardware, families and labels as long as they come."""
    machine = replace(
        make.GPUS,
        cpu="Example Platinum Processor 8480C with 56 cores and a long name @ 2.00GHz",
        gpus=("Example Data Centre GPU X100 80GB HBM3 with NVLink and a long name",) * 8,
    )
    label = "a label that nobody would choose, with bf16 autocast, channels last and fused optimizer"
    records = make.sets(
        {label: (BF16, 1.2)},
        baseline_label="an equally long name of a baseline in full precision, eager, without any fusing",
        family="a family of runs with a very long name, such as learning rate 0.0002 and betas 0.9 and 0.99, " * 2,
        failures={f"{label}, again": (RunConfig(seed=9), "crashed", REASON)},
        data_name="1,281,167 images from a/folder-with-a-very-long-name-that-goes-on-and-on",
    )
    return make.study(make.on(machine, records))


def scaling(ranks: tuple[int, ...], batches: tuple[int, ...], device: str = "cuda", *, weak: bool = True) -> Study:
    """Strong scaling, and weak with a family of the same experiment that scales nothing."""
    found = []
    for batch in batches:
        base = replace(scaled_records.ONE, device=device, global_batch_size=batch)
        found += scaled_records.strong({n: n**0.7 for n in ranks}, base, seed=batch)
        found += scaled_records.weak({n: n**0.95 for n in ranks}, base, seed=batch) if weak else []
    return make.study([*found, *(scaled_records.switched_off(base) if weak else [])])


def machine() -> Study:
    """Everything that is known of a machine with GPUs, in as many families as a figure may meet."""
    found = scaling((2, 4, 8), (32, 64, 128, 256, 512), weak=False)
    return replace(found, records=tuple(make.with_state(found.records, **make.GPU_STATE)))


def trained() -> Study:
    micro, large = RunConfig(accumulation=2), RunConfig(global_batch_size=64)
    speeds = {"bf16": (BF16, 1.6), "2 micro-batches of a long name": (micro, 0.6), "batch 64": (large, 1.2)}
    losses = {"bf16": (BF16, 0.0), "2 micro-batches of a long name": (micro, 0.001), "batch 64": (large, 0.05)}
    timed = make.study(make.sets(speeds, experiment="quality"), "quality")
    return replace(timed, trials=tuple(make.trials(losses, seeds=8)))


def two_families() -> Study:
    """A question with trials in two families, one verdict that is worse."""
    found, trials = [], []
    for size in (16, 32):
        base = RunConfig(global_batch_size=size)
        pair = replace(base, world_size=2)
        values: dict[str, Any] = {"baseline_label": "1 rank", "experiment": "multi_gpu", "family": f"batch {size}"}
        found += make.sets({"2 ranks": (pair, 1.5)}, baseline=base, **values)
        trials += make.trials({"2 ranks": (pair, 0.03 if size == 32 else 0.0)}, baseline=base)
    return replace(make.study(found), trials=tuple(trials))


def levers() -> Study:
    rows = {"fp32": (RunConfig(), 0.6), "every loss read": (replace(BF16, read_loss=True), 0.9)}
    family = f"seed, batch 32{LEVERS}"
    timed = make.sets(rows, baseline=BF16, baseline_label="as by default", experiment="peers", family=family)
    made = make.trials({"every loss read": (rows["every loss read"][0], 0.0)}, baseline=BF16)
    return replace(make.study(timed), trials=tuple(made))


def with_fids() -> Study:
    of = trained()
    return replace(of, trials=tuple(make.with_fid(r, 123.4) if r.config.seed == 0 else r for r in of.trials))


def searched() -> Study:
    """A search whose winner was tried."""
    config = replace(planted_search.BASE, precision="bf16", world_size=2)
    judged = make.trials({"bf16, 2 ranks": (config, 0.0)}, baseline=planted_search.BASE)
    return planted_search.study(planted_search.searched(), trials=tuple(judged))


STUDIES: dict[str, Callable[[], Study]] = {
    "resolved": amp,
    "all failed": lambda: make.study(make.sets({}, failures={"bf16": (BF16, "crashed", REASON)})),
    "12 configurations": lambda: workers(12),
    "loader": loader,
    "wordy": wordy,
    "machine": machine,
    "strong and weak, two CPU ranks": lambda: scaling((2,), (32,), "cpu"),
    "strong and weak, many ranks": lambda: scaling((2, 4, 8, 16, 32, 64), (64, 512)),
    "compiled, costs": compiled,
    "batch sizes": batches,
    "profile": lambda: make.study([make.time_budget()]),
    "recommendation": lambda: make.study([*amp().records, *compiled().records], "recommendation"),
    "recommendation, searched": searched,
    "quality": trained,
    "quality, with FIDs": with_fids,
    "two families, learned": two_families,
    "levers, learned": levers,
    "nothing": lambda: replace(amp(), records=()),
}
