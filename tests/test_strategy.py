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

from ddpm_lab.checks import ConfigError
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


QUIET: dict[str, Any] = {"set_noise": 0.002, "turn_noise": 0.001}


@pytest.mark.parametrize(
    ("ratios", "values", "answer", "ratio"),
    [
        ({2: 1.3}, {}, MULTI, 1.3),
        ({2: 0.8, 4: 1.5, 8: 1.2}, {}, MULTI, 1.5),  # one that is faster is enough
        ({2: 0.7, 4: 0.8}, {}, SINGLE, 0.8),  # the best of what is slower
        ({2: 1.0}, QUIET, SINGLE, 1.0),
        ({2: 1.0, 4: 0.8}, QUIET, SINGLE, 1.0),
        ({2: 0.5, 4: 1.0}, {"set_noise": 0.05}, decisions.INCONCLUSIVE, 1.0),
        ({2: 1.9}, {"count": 2}, decisions.INCONCLUSIVE, 1.9),
        # A repeated baseline that differs by more than the ranks gain leaves no answer.
        ({2: 1.15}, {"twin_ratio": 1.2}, decisions.INCONCLUSIVE, None),
        ({2: 1.9}, {"twin_ratio": 1.2}, MULTI, None),
    ],
)
def test_what_was_measured_overrules_the_prior(
    ratios: dict[int, float], values: dict[str, Any], answer: str, ratio: float | None
) -> None:
    found = ask(gpus(ratios, batch=16, **values), batch=16)
    assert prior(10_050_819, 16)[0] == SINGLE
    assert (found.answer, found.source, found.measured_batch) == (answer, "measured", 16)
    assert ratio is None or found.ratio == pytest.approx(ratio, rel=0.05)
    assert [s.partition(":")[0] for s in found.speeds] == ["1 GPU", *(f"{n} GPUs" for n in ratios)]
    assert ("--resolution 2%" in found.text()) == (answer == decisions.INCONCLUSIVE)


def test_the_nearest_batch_is_named_where_this_one_was_not_measured() -> None:
    both = (gpus({2: 0.7}, batch=32), gpus({2: 1.7}, batch=256))
    for batch, answer, nearest in ((64, SINGLE, 32), (128, MULTI, 256)):
        found = ask(*both, batch=batch)
        assert (found.answer, found.measured_batch) == (answer, nearest)
        assert f"batch {nearest}" in found.source


def test_records_of_another_network_device_or_step_decide_nothing() -> None:
    records = gpus({2: 0.5})
    assert {ask(records, network="ddpm").source, ask(records, device="cpu").source} == {PRIOR}
    settings: tuple[dict[str, Any], ...] = ({"precision": "bf16"}, {"compile": "whole"}, {"channels_last": False})
    for setting in settings:  # the question is about fp32, eager; in bf16 the same ranks may well be slower
        other = [replace(r, config=replace(r.config, **setting)) for r in records]
        other = [replace(r, baseline_id=other[0].run_id) for r in other]
        assert ask(other).source == PRIOR
        assert ask(gpus({2: 1.7}), other).answer == ask(other, gpus({2: 1.7})).answer == MULTI


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
    for parameters, network, source in ((44_332, "tiny", "measured"), (44_333, None, PRIOR)):
        known = strategy.strategy(parameters=parameters, batch_size=32, output_dir=tmp_path)
        assert (known.network, known.source) == (network, source), "a network is known by its number of parameters"


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
    for device, hosts, places, most in (("cuda", 2, 1, 2), ("cuda", 4, 8, 16), ("cpu", 1, 1, 1)):
        slots = [[Place(n, f"h{h}", None) for n in range(places)] for h in range(hosts)]
        monkeypatch.setattr(cluster, "_current", Cluster(slots, Store("127.0.0.1", 1, "job")))
        assert strategy.most_ranks(device)[0] == most
    with pytest.raises(strategy.NoRanksError, match="1 rank on 1 host"):
        strategy.several_ranks("cpu")


@pytest.mark.usefixtures("two_cores")
def test_the_command_prints_answer_and_values(tmp_path: Path, call: Call) -> None:
    here(tmp_path, 1.6)
    code, out, _ = call("run", "strategy", "--output-dir", tmp_path)
    assert (code, out.partition(" ")[0]) == (0, "multi")
    (values,) = json.loads(call("run", "strategy", "--output-dir", tmp_path, "--json")[1])
    assert (values["answer"], values["ratio"]) == ("multi", pytest.approx(1.6, rel=0.02))
    (empty,) = json.loads(call("run", "strategy", "--output-dir", tmp_path, "--json", "--network", "seed")[1])
    assert (empty["source"], empty["ratio"], empty["sets"]) == (PRIOR, None, 0)
    other = call("run", "strategy", "--output-dir", tmp_path, "--device", "cpu", "--batch-size", 64)[1]
    assert f"--batch-sizes 64 --device cpu --output-dir {tmp_path}\n" in other
    for wrong, word in (
        ("--batch-size 0", "batch_size"),
        ("--parameters 0", "parameters"),
        ("--device cuda", "no GPU"),
    ):
        code, out, err = call("run", "strategy", *wrong.split(), "--output-dir", tmp_path)
        assert (code, out, word in err) == (2, "", True)


@pytest.mark.usefixtures("two_cores")
def test_weighing_needs_scipy_and_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(tmp_path, 1.6)
    monkeypatch.setattr(strategy, "missing_to_explain", lambda: "scipy")
    with pytest.raises(ConfigError, match="scipy"):
        strategy.strategy(output_dir=tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from ddpm_lab.measure import hardware\n"
        "hardware.gpus, hardware.usable_cores = tuple, lambda: 2\n"
        "from ddpm_lab.questions.strategy import strategy\n"
        f"print(strategy(device='cpu', output_dir={str(tmp_path)!r}).answer)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "multi"
