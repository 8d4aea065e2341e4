"""One rank or several: the published thresholds where nothing is measured, and the records as soon as there are any."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call
from test_scaling import lost, study, weak

from ddpm_lab.config import NETWORKS, RunConfig
from ddpm_lab.explain import decisions
from ddpm_lab.explain import strategy as explained
from ddpm_lab.explain.strategy import MEASURE, MULTI, PRIOR, SINGLE, Strategy, prior
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import cluster, hardware
from ddpm_lab.measure.cluster import Cluster, Place
from ddpm_lab.measure.process import Store
from ddpm_lab.plan import Plan
from ddpm_lab.questions import experiments, strategy
from ddpm_lab.record import RunRecord

ONE = RunConfig(device="cuda", network="seed", global_batch_size=64)


def gpus(ratios: dict[int, float], batch: int = 64, **values: Any) -> list[RunRecord]:
    base = replace(ONE, global_batch_size=batch)
    shared = {f"{n} GPUs": (replace(base, world_size=n), ratio) for n, ratio in ratios.items()}
    values = {"family": f"seed, batch {batch}", "seed": batch, **values}
    found = make.sets(shared, baseline=base, baseline_label="1 GPU", experiment="multi_gpu", **values)
    return make.on(make.GPUS, found)


def ask(*records: list[RunRecord], batch: int = 64, network: str = "seed", device: str = "cuda") -> Strategy:
    return explained.strategy(
        [study(*records)] if records else [],
        network=network,
        parameters=explained.PARAMETERS[network],
        batch=batch,
        device=device,
    )


# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "batches", "answer"),
    [
        (258_000, (512,), SINGLE),
        (999_999, (128,), SINGLE),
        (1_000_000, (127,), SINGLE),
        (1_000_000, (128,), MEASURE),
        (4_999_999, (128,), MEASURE),
        (5_000_000, (1,), MEASURE),
        (9_999_999, (64, 512), MEASURE),
        (10_000_000, (63,), SINGLE),
        (10_000_000, (64, 128), MULTI),
    ],
)
def test_the_published_thresholds(parameters: int, batches: tuple[int, ...], answer: str) -> None:
    assert {prior(parameters, batch)[0] for batch in batches} == {answer}


def test_every_network_has_its_count() -> None:
    """The counts themselves are those of ``test_unet``, which builds the networks."""
    unet = pytest.importorskip("ddpm_lab.diffusion.unet")
    import torch  # noqa: PLC0415 - the module under test must not need it

    assert set(explained.PARAMETERS) == set(NETWORKS)
    with torch.device("meta"):
        counted = {name: unet.count_parameters(unet.build_network(name)) for name in NETWORKS}
    assert counted == explained.PARAMETERS


# --- the records -----------------------------------------------------------------------------------------------------


def test_without_records_the_prior_speaks_and_says_so() -> None:
    for found in (ask(), ask(weak({2: 1.9}), lost())):
        assert (found.answer, found.source) == (MULTI, PRIOR)
        assert "ddpm-lab strategy --network seed --batch-size 64 --ranks multi" in found.text()


def test_what_was_measured_overrules_the_prior() -> None:
    faster, slower = ask(gpus({2: 1.3}, batch=16), batch=16), ask(gpus({2: 0.7, 4: 0.8}))
    assert prior(10_050_819, 16)[0] == SINGLE
    assert (faster.answer, faster.source, faster.measured_batch) == (MULTI, "measured", 16)
    assert faster.ratio == pytest.approx(1.3, rel=0.02)
    some = ask(gpus({2: 0.8, 4: 1.5, 8: 1.2}))
    assert some.answer == MULTI, "one that is faster is enough"
    assert "4 GPUs" in some.reason
    assert (slower.answer, slower.source) == (SINGLE, "measured")
    assert slower.ratio == pytest.approx(0.8, rel=0.02), "the best of what is slower"
    assert [s.partition(":")[0] for s in slower.speeds] == ["1 GPU", "2 GPUs", "4 GPUs"]


@pytest.mark.parametrize("records", [gpus({2: 1.0}, set_noise=0.05), gpus({2: 1.9}, count=2)])
def test_without_an_answer_the_prior_is_silent(records: list[RunRecord]) -> None:
    found = ask(records)
    assert (found.answer, found.source) == (decisions.INCONCLUSIVE, "measured")


def test_where_all_ranks_are_as_fast_as_one_the_answer_is_one() -> None:
    quiet: dict[str, Any] = {"set_noise": 0.002, "turn_noise": 0.001}
    for found in (ask(gpus({2: 1.0}, **quiet)), ask(gpus({2: 1.0, 4: 0.8}, **quiet))):
        assert (found.answer, found.source) == (SINGLE, "measured")
    assert ask(gpus({2: 0.5, 4: 1.0}, set_noise=0.05)).answer == decisions.INCONCLUSIVE


def test_a_twin_that_differs_by_more_than_the_ranks_gain_leaves_no_answer() -> None:
    assert ask(gpus({2: 1.15}, twin_ratio=1.2)).answer == decisions.INCONCLUSIVE
    assert ask(gpus({2: 1.9}, twin_ratio=1.2)).answer == MULTI


def test_the_nearest_batch_is_named_where_this_one_was_not_measured() -> None:
    both = (gpus({2: 0.7}, batch=32), gpus({2: 1.7}, batch=256))
    low, high = ask(*both, batch=64), ask(*both, batch=128)
    assert (low.answer, low.source) == (SINGLE, "measured at batch 32, the nearest to 64")
    assert (high.answer, high.source) == (MULTI, "measured at batch 256, the nearest to 128")


def test_records_of_another_network_or_device_decide_nothing() -> None:
    records = gpus({2: 0.5})
    assert ask(records).source == "measured"
    assert ask(records, network="ddpm").source == PRIOR
    assert ask(records, device="cpu").source == PRIOR


@pytest.mark.parametrize(
    "setting", [{"precision": "bf16"}, {"precision": "tf32"}, {"compile": "whole"}, {"channels_last": False}]
)
def test_records_of_another_step_decide_nothing(setting: dict[str, Any]) -> None:
    """The question is about fp32, eager; in bf16 the same ranks may well be slower."""
    other = [replace(r, config=replace(r.config, **setting)) for r in gpus({2: 0.5})]
    other = [replace(r, baseline_id=other[0].run_id) for r in other]
    assert ask(other).source == PRIOR
    assert ask(gpus({2: 1.7}), other).answer == ask(other, gpus({2: 1.7})).answer == MULTI


def test_what_has_no_speed_decides_nothing() -> None:
    ranks = RunConfig(world_size=4, global_batch_size=32, oversubscribe=True)
    records = make.sets({"4 ranks": (ranks, 1.7)}, experiment="multi_gpu", mechanism_only=["4 ranks"])
    assert ask(records, network="tiny", batch=32, device="cpu").source == PRIOR


# --- asking on this machine ------------------------------------------------------------------------------------------


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)


def here(tmp_path: Path, ratio: float | None, batch: int = 32, **values: Any) -> None:
    """Records of this machine; without a ratio those of one rank alone."""
    base = RunConfig(global_batch_size=batch)
    found = make.sets(
        {} if ratio is None else {"2 ranks": (replace(base, world_size=2), ratio)},
        baseline=base,
        baseline_label="1 rank",
        experiment="multi_gpu",
        family=f"tiny, batch {batch}",
        **values,
    )
    Ledger(tmp_path / "trace_output" / "ledger.jsonl").append(make.on(hardware.machine(), found))


@pytest.mark.usefixtures("two_cores")
def test_the_ledger_of_this_machine_decides(tmp_path: Path) -> None:
    assert strategy.strategy(output_dir=tmp_path).source == PRIOR
    here(tmp_path, 1.6)
    found = strategy.strategy(output_dir=tmp_path)
    assert (found.network, found.batch, found.answer, found.source) == ("tiny", 32, MULTI, "measured")
    same = strategy.strategy(parameters=44_332, batch_size=32, output_dir=tmp_path)
    assert same.source == "measured", "a network is known by its number of parameters"
    other = strategy.strategy(parameters=44_333, batch_size=32, output_dir=tmp_path)
    assert (other.network, other.source) == (None, PRIOR)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("later", "answer", "sets"),
    [
        ({"ratio": None}, MULTI, 6),
        ({"ratio": 0.5, "count": 1}, MULTI, 6),
        ({"ratio": 0.5, "count": 3}, MULTI, 6),
        ({"ratio": 0.5}, SINGLE, 6),
        ({"ratio": 1.0, "count": 7, "set_noise": 0.05}, decisions.INCONCLUSIVE, 7),
        ({"ratio": None, "code_version": "code-2"}, SINGLE, 0),
    ],
)
def test_what_is_measured_later_in_less_time_hides_nothing(
    tmp_path: Path, later: dict[str, Any], answer: str, sets: int
) -> None:
    """Sets of several plans are never pooled: the last that can decide does, and other code decides nothing."""
    here(tmp_path, 1.6)
    here(
        tmp_path,
        plan=Plan(window_seconds=0.4),
        seed=1,
        environment=make.environment(date="2026-01-04T10:00:00+00:00"),
        **later,
    )
    found = strategy.strategy(output_dir=tmp_path)
    assert (found.answer, found.sets, found.source) == (answer, sets, "measured" if sets else PRIOR)
    assert len(found.speeds) == (2 if sets else 1)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("mode", "ratio", "world_sizes"),
    [("single", 1.6, [1]), ("multi", 0.5, [2]), ("auto", 1.6, [2]), ("auto", 0.5, [1]), ("auto", None, [1])],
)
def test_auto_measures_several_unless_the_answer_is_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    ratio: float | None,
    world_sizes: list[int],
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(experiments, "measure", lambda name, **settings: asked.update(settings, name=name))
    if ratio is not None:
        here(tmp_path, ratio)
    strategy.measure(strategy.strategy(output_dir=tmp_path), mode, output_dir=tmp_path, preset="smoke")
    assert asked == {
        "name": "multi_gpu",
        "network": "tiny",
        "device": "cpu",
        "global_batch_sizes": [32],
        "world_sizes": world_sizes,
        "scaling": "strong",
        "lost_scaling": False,
        "output_dir": tmp_path,
        "preset": "smoke",
    }


def test_several_ranks_where_there_is_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call) -> None:
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    code, out, err = call("strategy", "--ranks", "multi", "--output-dir", tmp_path)
    assert (code, out) == (1, "")
    assert err == "ddpm-lab: --ranks multi needs two ranks, and this machine has 1 usable core: use --ranks single\n"
    asked: dict[str, Any] = {}
    monkeypatch.setattr(experiments, "measure", lambda _, **settings: asked.update(settings))
    large = strategy.strategy(network="seed", batch_size=64, output_dir=tmp_path)
    assert large.answer == MULTI
    strategy.measure(large, "auto", output_dir=tmp_path)
    assert asked["world_sizes"] == [1], "auto takes what there is"


@pytest.mark.parametrize(
    ("device", "layout", "most", "words"),
    [
        ("cuda", (2, 1), 2, "this job has room for 2 ranks on 2 hosts"),
        ("cuda", (4, 8), 16, "this job has room for 16 ranks on 4 hosts"),
        ("cpu", (2, 1), 2, "this job has room for 2 ranks on 2 hosts"),
        ("cpu", (1, 1), 1, "this job has room for 1 rank on 1 host"),
    ],
)
def test_the_ranks_of_a_job_are_those_of_all_its_hosts(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: tuple[int, int], most: int, words: str
) -> None:
    """Places that torchrun started, no more of them on a host than it has devices: here four GPUs, and one core."""
    monkeypatch.setattr(hardware, "gpus", lambda: ("Example GPU X",) * 4)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    hosts, places = layout
    slots = [[Place(n, f"h{h}", None) for n in range(places)] for h in range(hosts)]
    alone = strategy.most_ranks(device)[0]
    monkeypatch.setattr(cluster, "_current", Cluster(slots, Store("127.0.0.1", 1, "job")))
    assert strategy.most_ranks(device) == (most, words)
    assert alone == (4 if device == "cuda" else 1)
    if most > 1:
        assert strategy.several_ranks(device) == (most if device == "cuda" else 2)
    else:
        with pytest.raises(strategy.NoRanksError, match=words):
            strategy.several_ranks(device)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--batch-size 0", ["batch_size", "0", "at least 1"]),
        ("--parameters 0", ["parameters", "0", "at least 1"]),
        ("--parameters 7000000 --ranks auto", ["7,000,000", "--network"]),
        ("--network seed --parameters 7", ["--parameters", "--network"]),
        ("--ranks double", ["double"]),
        ("--device cuda", ["'cuda'", "no GPU is visible"]),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, call: Call, arguments: str, words: list[str]) -> None:
    code, out, err = call("strategy", *arguments.split(), "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.usefixtures("two_cores")
def test_the_command_prints_answer_and_values(tmp_path: Path, call: Call) -> None:
    here(tmp_path, 1.6)
    code, out, _ = call("strategy", "--output-dir", tmp_path)
    assert code == 0
    assert out.startswith("multi for tiny (44,332 parameters), batch 32, fp32: 2 ranks")
    assert "  1 rank: 3," in out
    values = json.loads(call("strategy", "--output-dir", tmp_path, "--json")[1])
    assert values["answer"] == "multi"
    assert values["ratio"] == pytest.approx(1.6, rel=0.02)
    other = call("strategy", "--output-dir", tmp_path, "--device", "cpu", "--batch-size", 64)[1]
    assert (
        f"ddpm-lab strategy --network tiny --batch-size 64 --device cpu --output-dir {tmp_path} --ranks multi" in other
    )
    empty = json.loads(call("strategy", "--output-dir", tmp_path, "--json", "--network", "seed")[1])
    assert (empty["source"], empty["ratio"], empty["sets"]) == (PRIOR, None, 0)


@pytest.mark.parametrize(("missing", "said"), [("torch", "multi\n"), ("scipy", "scipy, which is not installed here\n")])
def test_weighing_needs_scipy_and_no_torch(tmp_path: Path, missing: str, said: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from ddpm_lab.checks import ConfigError\n"
        "from ddpm_lab.questions.strategy import strategy\n"
        "try:\n"
        f"    print(strategy(network='seed', batch_size=64, device='cpu', output_dir={str(tmp_path)!r}).answer)\n"
        "except ConfigError as error:\n"
        "    print(str(error).removeprefix('weighing records needs ').partition(':')[0])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == said
