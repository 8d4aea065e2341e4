"""Strong and weak scaling with planted efficiencies and their bands; one rank or several, by records or the prior."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call
from scaled_records import ONE, strong, switched_off, weak

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import stats
from ddpm_lab.explain.bands import S000, Bands, bands
from ddpm_lab.explain.selection import Study
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import cluster, hardware
from ddpm_lab.measure.cluster import Cluster, Place
from ddpm_lab.measure.process import Store
from ddpm_lab.questions import multi_gpu
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.multi_gpu import MEASURE, MULTI, PARAMETERS, PRIOR, SINGLE, Strategy, prior
from ddpm_lab.record import RunRecord


def study(*records: list[RunRecord]) -> Study:
    return make.study([r for part in records for r in part], "multi_gpu")


def rated(*records: list[RunRecord], bands: Bands | None = None) -> str:
    """What is said of the efficiency of the comparison that leads."""
    of = study(*records)
    return answer(replace(of, bands=bands or of.bands)).finding.notes[0]


def test_an_efficiency_is_called_by_its_whole_interval_and_by_the_bands_that_were_asked_for() -> None:
    records, own = strong({8: 6.45}), bands("splendid=80%,rest=0")
    assert "by S000's bands." in rated(records, bands=S000)
    assert "), splendid" in rated(records, bands=own)
    assert "), too few sets, by" in rated(strong({8: 6.45}, count=3))
    assert "Efficiency, by your own bands" in answer(replace(study(records), bands=own)).table()[0]
    for ratio, noise, words in ((2.01, 0.02, "perfect"), (2.5, 0.005, "above 100 %")):
        assert words in rated(strong({2: ratio}, set_noise=noise))


# --- one rank or several ----------------------------------------------------------------------------------------------


def gpus(ratios: dict[int, float], batch: int = 64, **values: Any) -> list[RunRecord]:
    return strong(ratios, base=replace(ONE, global_batch_size=batch), seed=batch, **values)


def ask(*records: list[RunRecord], batch: int = 64, network: str = "seed", device: str = "cuda") -> Strategy:
    return multi_gpu.decide(
        study(*records), network=network, parameters=PARAMETERS[network], batch=batch, device=device
    )


@pytest.mark.parametrize(
    ("parameters", "batches", "answer"),
    [
        (999_999, (128, 512), SINGLE),
        (1_000_000, (127,), SINGLE),
        (4_999_999, (128,), MEASURE),
        (5_000_000, (1,), MEASURE),
        (10_000_000, (63,), SINGLE),
        (10_000_000, (64, 128), MULTI),
    ],
)
def test_the_published_thresholds(parameters: int, batches: tuple[int, ...], answer: str) -> None:
    assert {prior(parameters, batch)[0] for batch in batches} == {answer}


@pytest.mark.parametrize(
    ("ratios", "values", "answer", "ratio"),
    [
        ({2: 0.8, 4: 1.5, 8: 1.2}, {}, MULTI, 1.5),  # one that is faster is enough
        ({2: 0.7, 4: 0.8}, {}, SINGLE, 0.8),  # the best of what is slower
        ({2: 0.5, 4: 1.0}, {"set_noise": 0.05}, stats.INCONCLUSIVE, 1.0),
        ({2: 1.9}, {"count": 2}, stats.INCONCLUSIVE, 1.9),
    ],
)
def test_what_was_measured_overrules_the_prior(
    ratios: dict[int, float], values: dict[str, Any], answer: str, ratio: float
) -> None:
    found = ask(gpus(ratios, batch=16, **values), batch=16)
    assert prior(10_050_819, 16)[0] == SINGLE
    assert (found.answer, found.source, found.measured_batch) == (answer, "measured", 16)
    assert found.ratio == pytest.approx(ratio, rel=0.05)
    assert bool(found.way_out()) == (answer == stats.INCONCLUSIVE)


def test_another_batch_decides_where_it_tells_of_this_one() -> None:
    """What several gain at a batch they gain at a larger one; what they lose, at a smaller one. Else it is measured."""
    for ratio, at, asked, expected in (
        (1.5, 64, 256, MULTI),
        (0.8, 64, 16, SINGLE),
        (1.5, 64, 16, MEASURE),
        (0.8, 16, 512, MEASURE),
    ):
        found = ask(gpus({2: ratio}, batch=at), batch=asked)
        assert (found.answer, found.measured_batch) == (expected, at)
        assert found.way_out().endswith(f"--batch-sizes {asked}")
    for ratio, asked, at, expected in ((1.5, 24, 8, MULTI), (0.8, 16, 32, SINGLE), (1.5, 4, 8, MEASURE)):
        found = ask(gpus({2: ratio}, batch=8), gpus({2: ratio}, batch=32), batch=asked)
        assert (found.answer, found.measured_batch) == (expected, at), "the nearest that tells of it"


def test_records_of_another_network_device_or_step_decide_nothing() -> None:
    records = gpus({2: 0.5})
    others = [ask(), ask(weak({2: 1.9}), switched_off()), ask(records, network="ddpm"), ask(records, device="cpu")]
    for setting in ({"precision": "bf16"}, {"compile": "whole"}, {"channels_last": False}):
        other = [replace(r, config=replace(r.config, **setting)) for r in records]
        others.append(ask([replace(r, baseline_id=other[0].run_id) for r in other]))
    assert {found.source for found in others} == {PRIOR}
    assert all(found.way_out().startswith("ddpm-lab run multi_gpu --network") for found in others)


def test_all_cores_decide_before_fewer() -> None:
    one = RunConfig(global_batch_size=32)
    fewer = strong({2: 0.7}, base=replace(one, threads=1), seed=1)
    for count, expected in ((6, MULTI), (3, SINGLE)):  # three sets are no answer
        found = ask(strong({2: 1.5}, base=one, count=count), fewer, batch=32, network="tiny", device="cpu")
        assert found.answer == expected


# --- asking on this machine ------------------------------------------------------------------------------------------


def here(tmp_path: Path, ratio: float) -> None:
    """Records of this machine."""
    base = RunConfig(global_batch_size=32)
    values: dict[str, Any] = {"baseline_label": "1 rank", "experiment": "multi_gpu", "family": "tiny, batch 32"}
    found = make.sets({"2 ranks": (replace(base, world_size=2), ratio)}, baseline=base, **values)
    Ledger(tmp_path / "trace_output" / "ledger.jsonl").append(make.on(hardware.machine(), found))


@pytest.mark.usefixtures("two_cores")
def test_the_ledger_of_this_machine_decides(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multi_gpu.strategy(output_dir=tmp_path).source == PRIOR
    here(tmp_path, 1.6)
    known = multi_gpu.strategy(parameters=44_332, batch_size=32, output_dir=tmp_path)
    assert (known.network, known.source) == ("tiny", "measured"), "a network is known by its number of parameters"
    ask = ("run", "strategy", "--output-dir", tmp_path)
    code, out, _ = call(*ask)
    assert (code, out.partition(" ")[0]) == (0, "multi")
    (values,) = json.loads(call(*ask, "--json")[1])
    assert (values["answer"], values["ratio"]) == ("multi", pytest.approx(1.6, rel=0.02))
    other = call(*ask, "--device", "cpu", "--batch-size", 64)[1]
    assert f"--batch-sizes 64 --device cpu --output-dir {tmp_path}\n" in other
    monkeypatch.setattr(multi_gpu, "missing_to_explain", lambda: "scipy")
    with pytest.raises(ConfigError, match="scipy"):
        multi_gpu.strategy(output_dir=tmp_path)


def test_the_ranks_of_a_job_are_those_of_all_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that torchrun started, no more of them on a host than it has devices: here four GPUs, and one core."""
    monkeypatch.setattr(hardware, "gpus", lambda: ("Example GPU X",) * 4)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    assert (multi_gpu.several_ranks("cuda"), multi_gpu.several_ranks("cpu")) == (4, 1)
    for device, hosts, places, most in (("cuda", 2, 1, 2), ("cuda", 4, 8, 16), ("cpu", 1, 1, 1)):
        slots = [[Place(n, f"h{h}", None) for n in range(places)] for h in range(hosts)]
        monkeypatch.setattr(cluster, "_current", Cluster(slots, Store("127.0.0.1", 1, "job")))
        assert multi_gpu.several_ranks(device) == most
    with pytest.raises(multi_gpu.NoRanksError, match="1 rank on 1 host"):
        multi_gpu.several_ranks("cpu", needed=True)
