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
from scaled_records import ONE, strong, switched_off, weak

from ddpm_lab.config import NETWORKS, RunConfig
from ddpm_lab.explain import decisions
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import cluster, hardware
from ddpm_lab.measure.cluster import Cluster, Place
from ddpm_lab.measure.process import Store
from ddpm_lab.plan import Plan
from ddpm_lab.questions import strategy
from ddpm_lab.questions.strategy import MEASURE, MULTI, PARAMETERS, PRIOR, SINGLE, Strategy, prior
from ddpm_lab.record import RunRecord


def gpus(ratios: dict[int, float], batch: int = 64, **values: Any) -> list[RunRecord]:
    return strong(ratios, base=replace(ONE, global_batch_size=batch), seed=batch, **values)


def ask(*records: list[RunRecord], batch: int = 64, network: str = "seed", device: str = "cuda") -> Strategy:
    studies = [make.study([r for part in records for r in part])] if records else []
    return strategy.decide(studies, network=network, parameters=PARAMETERS[network], batch=batch, device=device)


# --- the rule --------------------------------------------------------------------------------------------------------


def test_the_published_thresholds() -> None:
    for parameters, batches, answer in (
        (999_999, (128, 512), SINGLE),
        (1_000_000, (127,), SINGLE),
        (1_000_000, (128,), MEASURE),
        (4_999_999, (128,), MEASURE),
        (5_000_000, (1,), MEASURE),
        (9_999_999, (64, 512), MEASURE),
        (10_000_000, (63,), SINGLE),
        (10_000_000, (64, 128), MULTI),
    ):
        assert {prior(parameters, batch)[0] for batch in batches} == {answer}


def test_every_network_has_its_count() -> None:
    """The counts themselves are those of ``test_unet``, which builds the networks."""
    unet = pytest.importorskip("ddpm_lab.diffusion.unet")
    import torch  # noqa: PLC0415 - the module under test must not need it

    with torch.device("meta"):
        counted = {name: unet.count_parameters(unet.build_network(name)) for name in NETWORKS}
    assert counted == PARAMETERS


# --- the records -----------------------------------------------------------------------------------------------------


def test_without_records_the_prior_speaks_and_says_so() -> None:
    for found in (ask(), ask(weak({2: 1.9}), switched_off())):
        assert (found.answer, found.source) == (MULTI, PRIOR)
        assert "ddpm-lab run multi_gpu --network seed --batch-sizes 64" in found.text()


def test_what_was_measured_overrules_the_prior() -> None:
    faster, slower = ask(gpus({2: 1.3}, batch=16), batch=16), ask(gpus({2: 0.7, 4: 0.8}))
    assert prior(10_050_819, 16)[0] == SINGLE
    assert (faster.answer, faster.source, faster.measured_batch) == (MULTI, "measured", 16)
    assert faster.ratio == pytest.approx(1.3, rel=0.02)
    some = ask(gpus({2: 0.8, 4: 1.5, 8: 1.2}))
    assert some.answer == MULTI, "one that is faster is enough"
    assert some.ratio == pytest.approx(1.5, rel=0.02)
    assert (slower.answer, slower.source) == (SINGLE, "measured")
    assert slower.ratio == pytest.approx(0.8, rel=0.02), "the best of what is slower"
    assert [s.partition(":")[0] for s in slower.speeds] == ["1 GPU", "2 GPUs", "4 GPUs"]


def test_where_all_ranks_are_as_fast_as_one_the_answer_is_one_and_without_an_answer_the_prior_is_silent() -> None:
    quiet: dict[str, Any] = {"set_noise": 0.002, "turn_noise": 0.001}
    for records, answer in (
        (gpus({2: 1.0}, **quiet), SINGLE),
        (gpus({2: 1.0, 4: 0.8}, **quiet), SINGLE),
        (gpus({2: 0.5, 4: 1.0}, set_noise=0.05), decisions.INCONCLUSIVE),
        (gpus({2: 1.0}, set_noise=0.05), decisions.INCONCLUSIVE),
        (gpus({2: 1.9}, count=2), decisions.INCONCLUSIVE),
        # A repeated baseline that differs by more than the ranks gain leaves no answer.
        (gpus({2: 1.15}, twin_ratio=1.2), decisions.INCONCLUSIVE),
        (gpus({2: 1.9}, twin_ratio=1.2), MULTI),
    ):
        found = ask(records)
        assert (found.answer, found.source) == (answer, "measured")
        assert ("to resolve 2 %" in found.text()) == (answer == decisions.INCONCLUSIVE)


def test_the_nearest_batch_is_named_where_this_one_was_not_measured() -> None:
    both = (gpus({2: 0.7}, batch=32), gpus({2: 1.7}, batch=256))
    low, high = ask(*both, batch=64), ask(*both, batch=128)
    assert (low.answer, low.source) == (SINGLE, "measured at batch 32, the nearest to 64")
    assert (high.answer, high.source) == (MULTI, "measured at batch 256, the nearest to 128")


def test_records_of_another_network_device_or_step_decide_nothing() -> None:
    records = gpus({2: 0.5})
    assert ask(records).source == "measured"
    assert ask(records, network="ddpm").source == PRIOR
    assert ask(records, device="cpu").source == PRIOR
    settings: tuple[dict[str, Any], ...] = ({"precision": "bf16"}, {"compile": "whole"}, {"channels_last": False})
    for setting in settings:  # the question is about fp32, eager; in bf16 the same ranks may well be slower
        other = [replace(r, config=replace(r.config, **setting)) for r in records]
        other = [replace(r, baseline_id=other[0].run_id) for r in other]
        assert ask(other).source == PRIOR
        assert ask(gpus({2: 1.7}), other).answer == ask(other, gpus({2: 1.7})).answer == MULTI
    ranks = RunConfig(world_size=4, global_batch_size=32, oversubscribe=True)
    shared = make.sets({"4 ranks": (ranks, 1.7)}, experiment="multi_gpu", mechanism_only=["4 ranks"])
    assert ask(shared, network="tiny", batch=32, device="cpu").source == PRIOR, "they have no speed"


# --- asking on this machine ------------------------------------------------------------------------------------------


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)


def here(tmp_path: Path, ratio: float | None, **values: Any) -> None:
    """Records of this machine; without a ratio those of one rank alone."""
    base = RunConfig(global_batch_size=32)
    tried = {} if ratio is None else {"2 ranks": (replace(base, world_size=2), ratio)}
    values = {"baseline_label": "1 rank", "experiment": "multi_gpu", "family": "tiny, batch 32", **values}
    found = make.sets(tried, baseline=base, **values)
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
    day = make.environment(date="2026-01-04T10:00:00+00:00")
    here(tmp_path, plan=Plan(window_seconds=0.4), seed=1, environment=day, **later)
    found = strategy.strategy(output_dir=tmp_path)
    assert (found.answer, found.sets, found.source) == (answer, sets, "measured" if sets else PRIOR)
    assert len(found.speeds) == (2 if sets else 1)


def test_the_ranks_of_a_job_are_those_of_all_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that torchrun started, no more of them on a host than it has devices: here four GPUs, and one core."""
    monkeypatch.setattr(hardware, "gpus", lambda: ("Example GPU X",) * 4)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    assert (strategy.most_ranks("cuda")[0], strategy.most_ranks("cpu")[0]) == (4, 1)
    for device, (hosts, places), most, words in (
        ("cuda", (2, 1), 2, "this job has room for 2 ranks on 2 hosts"),
        ("cuda", (4, 8), 16, "this job has room for 16 ranks on 4 hosts"),
        ("cpu", (1, 1), 1, "this job has room for 1 rank on 1 host"),
    ):
        slots = [[Place(n, f"h{h}", None) for n in range(places)] for h in range(hosts)]
        monkeypatch.setattr(cluster, "_current", Cluster(slots, Store("127.0.0.1", 1, "job")))
        assert strategy.most_ranks(device) == (most, words)
    with pytest.raises(strategy.NoRanksError, match=words):
        strategy.several_ranks("cpu")


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--batch-size 0", ["batch_size", "0", "at least 1"]),
        ("--parameters 0", ["parameters", "0", "at least 1"]),
        ("--network seed --parameters 7", ["--parameters", "--network"]),
        ("--device cuda", ["'cuda'", "no GPU is visible"]),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, call: Call, arguments: str, words: list[str]) -> None:
    code, out, err = call("strategy", *arguments.split(), "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []


@pytest.mark.usefixtures("two_cores")
def test_the_command_prints_answer_and_values(tmp_path: Path, call: Call) -> None:
    here(tmp_path, 1.6)
    code, out, _ = call("strategy", "--output-dir", tmp_path)
    assert code == 0
    assert out.startswith("multi for tiny (44,332 parameters), batch 32, fp32: 2 ranks")
    assert "\n  1 rank: 3," in out
    values = json.loads(call("strategy", "--output-dir", tmp_path, "--json")[1])
    assert values["answer"] == "multi"
    assert values["ratio"] == pytest.approx(1.6, rel=0.02)
    other = call("strategy", "--output-dir", tmp_path, "--device", "cpu", "--batch-size", 64)[1]
    assert f"run multi_gpu --network tiny --batch-sizes 64 --device cpu --output-dir {tmp_path}\n" in other
    empty = json.loads(call("strategy", "--output-dir", tmp_path, "--json", "--network", "seed")[1])
    assert (empty["source"], empty["ratio"], empty["sets"]) == (PRIOR, None, 0)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("missing", "said"), [("torch", "multi"), ("scipy", "scipy, which is not installed here")])
def test_weighing_needs_scipy_and_no_torch(tmp_path: Path, missing: str, said: str) -> None:
    here(tmp_path, 1.6)
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from ddpm_lab.checks import ConfigError\n"
        "from ddpm_lab.measure import hardware\n"
        "hardware.gpus, hardware.usable_cores = tuple, lambda: 2\n"
        "from ddpm_lab.questions.strategy import strategy\n"
        "try:\n"
        f"    print(strategy(device='cpu', output_dir={str(tmp_path)!r}).answer)\n"
        "except ConfigError as error:\n"
        "    print(str(error).removeprefix('weighing records needs ').partition(':')[0])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == said
