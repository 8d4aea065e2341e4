"""From settings to something ready to be measured: cores, budgets, and what is refused before a rank starts."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make
from test_packed import write_images

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import OWN, RunConfig
from ddpm_lab.data.synthetic import generate
from ddpm_lab.explain.selection import study
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.plan import Plan
from ddpm_lab.questions import planning, probe
from ddpm_lab.questions.planning import plan_question
from ddpm_lab.record import RunRecord

pytestmark = pytest.mark.usefixtures("two_cores")
Asking = Callable[..., Campaign]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few images, which are prepared beside them, once for each size."""
    return write_images(tmp_path_factory.mktemp("images") / "few", generate(20, 8))


@pytest.fixture
def plan(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Asking:
    """Plan amp on two cores, both free unless a test says otherwise."""
    monkeypatch.setattr(planning, "free_cores", lambda: 2)
    monkeypatch.setattr(planning, "usual_device", lambda device: device or "cpu")

    def plan(name: str = "amp", **settings: Any) -> Campaign:
        usual = {"cache": images.with_name("cache"), "data": str(images), "image_size": 8, "quiet": True}
        return plan_question(name, output_dir=tmp_path, **{**usual, **settings})

    return plan


def base_of(planned: Campaign) -> RunConfig:
    return planned.experiment.families[0].baseline


def sets_of(planned: Campaign, count: int) -> list[RunRecord]:
    """Sets of the first family's primary comparison, as this machine and code would have measured them."""
    family = planned.experiment.families[0]
    rows = {label: (config, 1.5) for label, config in family.candidates if label == family.primary}
    where: dict[str, Any] = {"experiment": planned.experiment.name, "family": family.name}
    where |= {"plan": planned.target.plan, "code_version": planned.instrument.code.key}
    return make.on(hardware.machine(), make.sets(rows, baseline=family.baseline, count=count, turns=1, **where))


def test_wrong_values_are_refused_by_name_and_before_an_image_is_decoded(plan: Asking, tmp_path: Path) -> None:
    wrong: dict[str, list[Any]] = {
        "minutes": [-1, float("nan"), "5", True],
        "resolution": [0, 1, 0.0002, True],
        "cores": [3, 0],
        "sets": [0],
        "seed": [-1],
        "network": ["big"],
        "image_sizes": [[]],
        "oversubscribe": ["false"],
        "skip_bad": ["false"],
        "preset": ["huge"],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}")):
                plan(cache=tmp_path / "images", **{name: value})
    with pytest.raises(ConfigError, match="experiment is 'speed'"):
        plan("speed", cache=tmp_path / "images")
    assert not (tmp_path / "images").exists()


# --- the network -----------------------------------------------------------------------------------------------------


def test_a_cpu_measures_the_smallest_network_and_a_gpu_the_published_one(
    plan: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    for measured, fastest in (("settings_of", {"kernels": "aten"}), ("formats_of", {})):  # which would measure
        monkeypatch.setattr(probe, measured, lambda *_, fastest=fastest, **__: fastest)
    assert [base_of(plan(*name)).network for name in ((), ("peers",))] == ["tiny", "seed"]
    assert base_of(plan("peers")).kernels == "aten", "as train would choose here"
    monkeypatch.setattr(hardware, "gpus", lambda: [hardware.Gpu("A", "GPU-1", 1 << 36)])
    monkeypatch.setattr("ddpm_lab.training.setting.gpu_trouble", lambda: "")
    assert [base_of(plan(device="cuda", **n)).network for n in ({}, {"network": "tiny"})] == ["seed", "tiny"]


@pytest.mark.parametrize("name", ["amp", "peers", "search"])
def test_sets_of_smoke_are_no_sets_of_an_answer(name: str, plan: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose number of turns every further one would have, and which hide no others when they are the latest."""
    for measured in ("settings_of", "formats_of"):
        monkeypatch.setattr(probe, measured, lambda *_, **__: {})
    smoke, quick = (plan(name, preset=preset).target.plan for preset in ("smoke", "quick"))
    assert smoke.key != quick.key
    late = make.environment(date="2026-02-01T00:00:00+00:00")
    whole, tried = make.sets({}, plan=quick), make.sets({}, plan=smoke, environment=late)
    assert list(study([*whole, *tried], "amp").records) == whole


# --- cores -----------------------------------------------------------------------------------------------------------


def busy(monkeypatch: pytest.MonkeyPatch, free: int = 1) -> list[int]:
    """Others take cores; returns a list that grows by each look for free ones."""
    looked: list[int] = []

    def free_cores() -> int:
        looked.append(free)
        return free

    monkeypatch.setattr(planning, "free_cores", free_cores)
    return looked


def test_threads_are_as_many_as_cores_are_free_or_asked_for(plan: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {c.threads for c in plan().experiment.configurations} == {0}, "all that there are"
    looked = busy(monkeypatch)
    planned = plan(image_sizes=[8, 16])
    assert {(c.threads, c.image_size) for c in planned.experiment.configurations} == {(1, 8), (1, 16)}
    assert looked == [1], "once a question"
    one, both = plan(cores=1), plan(cores=2)
    assert [base_of(planned).threads for planned in (one, both)] == [1, 0]
    assert (one.on_cores, looked) == (None, [1]), "what was asked for is kept"
    assert {c.threads for c in plan("search").experiment.configurations} == {1}
    assert base_of(plan(preset="smoke")).threads == 0, "what calls nothing needs no look"
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    plan()
    assert looked == [1, 1]


def test_cores_are_chosen_once_a_question(plan: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its last set at first, and by what was shown from then on; of several answers that with all cores leads."""
    one, both = plan(cores=1), plan(cores=2)
    looked = busy(monkeypatch, free=2)
    one.ledger.append(make.on(make.GPUS, sets_of(one, 1)))
    one.ledger.append([dataclasses.replace(r, code_version="other") for r in sets_of(one, 1)])
    assert (base_of(plan()).threads, looked) == (0, [2]), "of another machine, and of other code"
    one.ledger.append(sets_of(one, 4))
    assert (base_of(plan()).threads, looked) == (1, [2])
    both.ledger.append(sets_of(both, 4))
    assert base_of(plan()).threads == 0
    one.renewed().look()
    assert base_of(plan()).threads == 1, "that is the answer that was shown"
    both.renewed().look()
    assert (base_of(plan()).threads, looked) == (0, [2])
    assert (plan("batch_size"), looked)[1] == [2, 2], "another question chooses its own"
    busy(monkeypatch, free=1)
    other = [base_of(plan(**of)).threads for of in ({"network": "seed"}, {"global_batch_size": 4}, {})]
    assert other == [1, 1, 0], "and so do another network and batch"


def test_sets_that_others_disturbed_choose_fewer_cores_and_too_few_are_no_answer(
    plan: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed again, a question is then answered beside a process that no short look for free cores meets."""
    both, looked = plan(cores=2), busy(monkeypatch, free=2)
    both.ledger.append([make.windowed(r, others_cores=2.0) for r in sets_of(both, 1)])
    assert (base_of(plan()).threads, looked) == (1, [2])
    both.ledger.append(sets_of(both, 3))
    assert (base_of(plan()).threads, looked) == (0, [2]), "it was interrupted"
    both.renewed().look()
    assert (base_of(plan()).threads, looked) == (0, [2, 2])
    searched = [dataclasses.replace(r, experiment="recommendation") for r in sets_of(both, 4)]
    both.ledger.append([make.windowed(r, others_cores=2.0) for r in searched])
    assert base_of(plan("search")).threads == 1, "by the sets that measure again what it found"


def test_a_cpu_compiles_a_network_in_the_format_that_is_faster_for_it(plan: Asking) -> None:
    def precision(network: str, **settings: Any) -> str:
        return base_of(plan("torch_compile", network=network, **settings)).precision

    seed = plan(network="seed")
    seed.ledger.append(sets_of(seed, 6))
    assert (precision("seed"), precision("tiny")) == ("bf16", "fp32")
    for preset, later in (("smoke", "bf16"), ("quick", "fp32")):  # what was compiled first stays, of smoke nothing does
        compiled = plan("torch_compile", network="seed", precision="fp32", preset=preset)
        compiled.ledger.append(sets_of(compiled, 1))
        assert precision("seed") == later
    other = plan("torch_compile", network="tiny", precision="bf16")
    other.ledger.append(sets_of(other, 1))
    assert (precision("seed"), precision("tiny")) == ("fp32", "bf16"), "each network its own"
    campaign, here = plan(), hardware.machine()
    for ratio, expected in ((0.5, "fp32"), (1.6, "bf16")):  # and so does each training of the user's
        own = RunConfig(workload=OWN, options=(("make", f"mine:{expected}"),))
        rows = make.sets({"bf16": (dataclasses.replace(own, precision="bf16"), ratio)}, baseline=own)
        campaign.ledger.append(make.on(here, [dataclasses.replace(r, code_version=expected) for r in rows]))
        instrument: Any = SimpleNamespace(code=SimpleNamespace(key=expected))
        assert planning.compiled_in(own.work_name, Plan(), instrument, campaign.ledger) == expected
