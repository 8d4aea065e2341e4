"""A user's training from its file to an answer: what is refused, left out, told, and what is measured of it."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import own_modules
import pytest
import records as make
import setups
from conftest import Call

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import OWN, OWN_LOADER, RunConfig
from ddpm_lab.explain.table import plain
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.questions import experiments
from ddpm_lab.questions.ask import answer, ask
from ddpm_lab.training.setting import FOR_OWN, Images, Own, Setup, check_name, look_at

WHOLE = Own(
    name="mine:make",
    place="mine.py, line 32",
    options=(("parameters", 314), ("samples", 64), ("sample", "(float32 3x8x8, int64)")),
    offers=("training", "dataset", "loss", "held_out_loss", "eager"),
)
STEPPING = dataclasses.replace(
    WHOLE, options=(*WHOLE.options, ("number_format", "own")), offers=("training", "dataset", "held_out_loss", "eager")
)
BATCHES = dataclasses.replace(WHOLE, offers=("training", "loss", "eager"))
COMPILING = dataclasses.replace(WHOLE, offers=WHOLE.offers[:-1])
LOOP = Own(name="mine:loop", options=(("number_format", "own"),))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that one works in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "gpus", tuple)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("mine", None)


def setup(own: Own, preset: str = "quick") -> Setup:
    return setups.setup(preset, images=Images(folder="", sha256=own.sha256, name="64 samples"), own=own)


# What is refused before anything starts


def test_what_means_nothing_beside_it_is_refused_in_a_sentence(call: Call, here: Path) -> None:
    own_modules.write(here)
    for question, options, words in (
        ("claims", [], "the experiment claims"),
        ("amp", ["--data", "photos"], "data is 'photos'"),
        ("amp", ["--workload", "nowhere:make"], "there is no module 'nowhere'"),
        ("amp", ["--workload", "mine.py:make"], "such as mine:make, without .py"),
    ):
        code, _, said = call("run", question, "--workload", "mine:make", *options, "--output-dir", here / "out")
        assert (code, said.count("\n"), words in said) == (2, 1, True)
    assert not (here / "out" / "trace_output" / "ledger.jsonl").exists()


# What is left out, and why


def test_every_configuration_is_the_users_and_names_it() -> None:
    for question in FOR_OWN:
        asked = ask(question, setup(WHOLE, "full"))
        assert all("own" not in reason for _, _, reason in asked.left_out)
        assert asked.families or asked.profiles
        for config in asked.configurations:
            assert config.workload in (OWN, OWN_LOADER)
            assert (config.work_name, config.data_sha256) == ("mine:make", WHOLE.sha256)
            assert (config.optimizer.clip_norm, config.channels_last) == (None, False)
        assert all("mine:make" in f.name for f in asked.families)


def test_numbers_of_workers_are_shown_to_learn_the_same() -> None:
    trials = ask("workers", setup(WHOLE)).trials
    assert [t.config.loader_workers for t in trials] == [0, 2, 1]
    assert {(t.config.workload, t.config.option("images", 0), t.config.option("draws", 1)) for t in trials} == {
        (OWN, 20 * trials[0].config.global_batch_size, 0)
    }


def test_on_a_gpu_its_questions_set_out_from_torchs_own_tf32_and_bf16_has_to_be_faster_than_that() -> None:
    for question in FOR_OWN:
        for own, usual in ((WHOLE, "bf16" if question == "torch_compile" else "tf32"), (STEPPING, "fp32")):
            asked = ask(question, setups.setup(gpus=2, images=setup(own).images, own=own))
            baselines = [f.baseline for f in asked.families if f.baseline.workload == OWN]
            assert {c.precision for c in (*baselines, *(c for _, _, c in asked.profiles))} <= {usual}
    (family,) = ask("amp", setups.setup(gpus=1, images=setup(WHOLE).images, own=WHOLE)).families
    assert (family.baseline_label, [label for label, _ in family.candidates]) == ("tf32", ["bf16", "fp16", "fp32"])
    found = ask("search", setups.setup(gpus=1, images=setup(WHOLE).images, own=WHOLE)).space
    assert found is not None
    assert found.baseline.precision == "tf32"


def test_its_figures_lie_beside_those_of_the_labs_trainer() -> None:
    files = [answer(make.study([make.record(config)], "amp")).file for config in (RunConfig(), setup(WHOLE).config())]
    assert files == ["03_amp", "03_amp_mine_make"]


def test_what_it_does_not_offer_is_left_out_with_the_reason() -> None:
    for own, question, reason in (
        (STEPPING, "amp", "mine:make has a step of its own, whose number format is its own too"),
        (BATCHES, "workers", "mine:make gives ready batches and no dataset"),
        (COMPILING, "torch_compile", "mine:make compiles by itself"),
        *((LOOP, question, "mine:loop does its own steps, in which nothing can be set") for question in FOR_OWN[1:]),
    ):
        asked = ask(question, setup(own))
        assert asked.families == ()
        assert reason in asked.left_out[0][2]
        assert [c.work_name for c in asked.configurations] == [own.name]


@pytest.mark.parametrize("own", [WHOLE, STEPPING, BATCHES, COMPILING])
def test_a_search_varies_what_can_be_set_and_sets_out_from_the_code_as_it_is(own: Own) -> None:
    found = ask("search", setup(own, "full")).space
    assert found is not None
    assert found.baseline == setup(own).config(global_batch_size=found.baseline.global_batch_size)
    varied = {name: [v.key for v in values] for name, values in found.settings.items() if len(values) > 1}
    assert varied["memory"] == ["nchw", "channels_last"]
    assert varied.get("compile") == (None if own is COMPILING else ["off", "whole"])
    assert ("compiled" in dict(found.left_out)) == (own is COMPILING)
    assert varied.get("precision") == (None if own is STEPPING else ["fp32", "bf16"])
    assert varied.get("loader") == (None if own is BATCHES else ["files-0", "files-1", "files-2"])
    assert len(found.cells) == math.prod(map(len, varied.values()))


# From a file to an answer


@pytest.fixture
def looked(here: Path, instrument: Instrument) -> Callable[..., Own]:
    def looked(more: str = "", function: str = "make") -> Own:
        own_modules.write(here, more)
        check_name("profile", name := f"mine:{function}")
        return look_at(name, instrument, device="cpu", seed=0)[0]

    return looked


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused_with_its_name_and_line(looked: Callable[..., Own]) -> None:
    made = "\ndef make():\n    return "
    for more, words in (
        ("import nothing_like_this\n", "ModuleNotFoundError: No module named 'nothing_like_this' (mine.py, line 42)"),
        ("def broken(:\n", "SyntaxError: invalid syntax (mine.py, line 42)"),
        (f"{made}[1]\n", "mine:make (mine.py, line 43) returned list"),
        ("\ndef loss(model, batch):\n    return model(batch[9])\n", "list index out of range (mine.py, line 44)"),
        ("\ndef make(settings):\n    return 1\n", "takes 1 arguments: write it to take none, or (config, context)"),
        (f"{made}Training(model=Net(), data=[data()[:5]], loss=loss)\n", "8 in 1 steps, rank 0 used 5"),
    ):
        with pytest.raises(ConfigError, match="workload 'mine:make' cannot be measured: ") as refusal:
            looked(more)
        assert words in str(refusal.value)


@pytest.mark.slow
def test_what_is_looked_at_is_what_was_written(looked: Callable[..., Own]) -> None:
    found = looked()
    assert dataclasses.replace(found, offers=WHOLE.offers) == WHOLE
    assert set(found.offers) == set(WHOLE.offers)
    assert looked("\ndef loop():\n    while True:\n        yield 1.0\n", "loop") == LOOP


@pytest.mark.slow
@pytest.mark.alone
def test_from_a_file_to_an_answer(call: Call, here: Path) -> None:
    """Speeds, a left-out question, and quality, of a file in the folder one works in; an edit is measured again."""
    own_modules.write(
        here,
        "\ndef batches(config, context):\n    ready = data()[: config.rank_batch_size]\n"
        "    return Training(model=Net(), data=[ready], loss=loss)\n",
    )
    out = here / "out"
    asked = ("--preset", "smoke", "--workload", "mine:make", "--output-dir", out, "--json")
    code, said, _ = call("run", "amp", *asked, "--seeds", "1")
    assert code == 0, said
    assert json.loads(said)[0]["measured_sets"] > 0
    study = experiments.run("amp", preset="smoke", workload="mine:make", output_dir=out, seeds=1, quiet=True).study
    assert study.measured_sets == 0, "all is measured"
    assert {r.config.work_name for r in (*study.records, *study.trials)} == {"mine:make"}
    assert {r.status for r in study.trials} == {"ok"}
    assert "tiny" not in answer(study).finding.claim + plain(answer(study).table())
    own_modules.write(here, width=12)
    code, said, _ = call("run", "amp", *asked)
    assert json.loads(said)[0]["measured_sets"] == 1
    own_modules.write(here, "\ndef make():\n    return Training(model=Net(), data=[data()[:8]], loss=loss)\n")
    code, said, _ = call("run", "workers", *asked[:-1])
    assert (code, "mine:make gives ready batches and no dataset" in said) == (1, True)
