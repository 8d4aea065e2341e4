"""A user's training: what the lab sets is what runs, and from its file to an answer."""

import dataclasses
import importlib
import itertools
import json
import os
import random
import runpy
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import own_modules
import pytest
import records as make
import setups
import torch
from conftest import Call
from fresh_processes import advance, context, seen
from torch.nn.functional import cross_entropy

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import OWN, OWN_LOADER, OptimizerConfig, RunConfig
from ddpm_lab.diffusion.step import allow_tf32
from ddpm_lab.explain.table import plain
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.questions import experiments
from ddpm_lab.questions.ask import answer, ask
from ddpm_lab.training.own import described, images_of, moved
from ddpm_lab.training.own import own as own_training
from ddpm_lab.training.setting import FOR_OWN, Images, Own, Setup, check_name, look_at
from ddpm_lab.workload import call_maker, named, place_of

Make = Callable[..., Any]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Write a module and make the training of one of its functions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that is written twice within a second

    def made(more: str = "", function: str = "make", *, rank: int = 0, ranks: int = 1, **settings: Any) -> Any:
        own_modules.write(tmp_path, more)
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        torch.backends.cudnn.benchmark = False
        return own_training(config(function, world_size=ranks, **settings), context(rank, ranks))

    yield made
    sys.modules.pop("mine", None)
    allow_tf32(False)


def config(function: str = "make", **settings: Any) -> RunConfig:
    return RunConfig(**{**Own(name=f"mine:{function}").settings(), "global_batch_size": 8, **settings})


def test_it_is_the_loop_that_the_user_would_have_written(made: Make) -> None:
    """The same losses as five lines of torch on the same batches; the lab's clipping is not the user's."""
    workload = made(optimizer=OptimizerConfig(clip_norm=1e-3, ema_every=1))
    batches = list(itertools.islice(made().batches(), 20))
    mine = sys.modules["mine"]
    torch.manual_seed(0)
    model = mine.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    assert advance(workload, 20) == pytest.approx(expected, rel=1e-6)
    assert workload.held_out_loss(draws=1)["loss"] < expected[0]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"channels_last": True, "loader_workers": 1}])
def test_the_label_is_what_ran(made: Make, settings: dict[str, Any]) -> None:
    label = config(**settings)
    with closing(made(**settings)) as workload:
        losses = advance(workload, 3)
        found = seen(workload, steps=3)
    assert all(0 < loss < 5 for loss in losses)
    assert mismatches(label, [found]) == []
    assert found["images"] == 24
    assert found["offers"] == ["dataset", "loss", "held_out_loss", "eager"]
    others: list[dict[str, Any]] = [{"precision": "fp32" if "precision" in settings else "bf16"}]
    others += [{"channels_last": not label.channels_last}, {"loader_workers": 2}, {"global_batch_size": 16}]
    for other in others:
        assert mismatches(dataclasses.replace(label, **other), [found]), other


def test_every_sample_is_used_once_an_epoch_whatever_the_ranks_and_workers(made: Make) -> None:
    def epoch(**settings: Any) -> list[float]:
        with closing(made(**settings)) as workload:
            return [float(x) for images, _ in itertools.islice(workload.batches(), 8) for x in images[:, 0, 0, 0]]

    one = epoch()
    assert len(set(one)) == 64
    assert one == epoch(loader_workers=2)
    # Without a group there is no exchange to wrap; the batches alone are asked for.
    off = dataclasses.replace(config().exchange, enabled=False)
    halves = [zip(*[iter(epoch(ranks=2, rank=rank, exchange=off))] * 4, strict=True) for rank in (0, 1)]
    assert [x for pair in zip(*halves, strict=True) for part in pair for x in part] == one
    assert one != epoch(seed=1)


def test_a_dataset_is_opened_by_each_worker_for_itself(made: Make) -> None:
    text = """
import os

class Lazy(torch.utils.data.Dataset):
    pid = None

    def __len__(self):
        return 64

    def __getitem__(self, i):
        self.pid = self.pid or os.getpid()
        return torch.full((3, 8, 8), float(self.pid)), 0

def make_lazy():
    return Training(model=Net(), data=Lazy(), loss=loss)
"""
    with closing(made(text, "make_lazy", loader_workers=1)) as workload:
        images, _ = next(workload.batches())
        assert images[0, 0, 0, 0] != os.getpid(), "who forks it has not opened it"


BAD = {
    "5": "DEF) returned int",
    "Training(model=7, data=data(), loss=loss)": "model is int",
    "Training(model=Net(), data=7, loss=loss)": "data is int",
    "Training(model=(D := torch.nn.parallel.DistributedDataParallel).__new__(D), data=data(), loss=loss)": "is wrapped",
    "loss=loss, optimizer=torch.optim.SGD(Net().parameters())": "DEF): the optimizer holds none",
    "loss=lambda model, batch: model(batch[0])": "BODY) returned float32 8x10",
    "loss=lambda model, batch: loss(model, batch).detach()": "BODY) returned float32 without a gradient",
    "loss=lambda model, batch: loss(model, batch).item()": "backward()",
    "step=lambda model, batch: None": "BODY) returned nothing",
    "Training(model=Net(), data=[1, 2], loss=loss)": "a batch is int",
}


def test_what_is_no_training_is_told_with_its_name_and_line(made: Make, tmp_path: Path) -> None:
    for given, words in BAD.items():
        text = f"Training(model=Net(), data=data(), {given})" if "=" in given.partition("(")[0] else given
        with pytest.raises((TypeError, ValueError)) as refusal:
            advance(made(f"\n\ndef bad():\n    return {text}\n", "bad"), 1)
        line = own_modules.line_of(tmp_path / "mine.py", "def bad")
        assert words.replace("DEF", str(line)).replace("BODY", str(line + 1)) in str(refusal.value)
        assert "mine:bad" in str(refusal.value)


def test_a_training_that_is_not_the_same_is_refused_and_a_larger_learning_rate_scales_the_users(made: Make) -> None:
    usual = config().optimizer
    workload = made(optimizer=dataclasses.replace(usual, learning_rate=4 * usual.learning_rate))
    assert workload.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    advance(workload, 1)
    label = config(options=(("make", "mine:make"), ("parameters", 999), ("samples", 64), ("sample", "float32 3")))
    parameters, sample = mismatches(label, [seen(workload, steps=1)])
    assert "(mine.py, line 32)" in parameters
    assert "parameters 999 when it was looked at, 314 in rank 0" in parameters
    assert "sample float32 3 when it was looked at, (float32 3x8x8, int64) in rank 0" in sample


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch, where a compiled model has a hook
@pytest.mark.parametrize(
    "given",
    [
        "model=torch.compile(Net(), backend='eager', fullgraph=True), loss=loss",
        "model=Net(), loss=torch.compile(loss, backend='eager')",
    ],
)
def test_what_compiles_by_itself_offers_no_eager_step(made: Make, given: str) -> None:
    workload = made(f"\n\ndef compiled():\n    return Training({given}, data=data())\n", "compiled")
    advance(workload, 1)
    assert not mismatches(config("compiled"), [seen(workload, steps=1)])
    assert workload.witness()["offers"] == ["dataset", "loss"]


ORDINARY = """
def ready(config, context):
    images, labels = data().tensors
    size = config.rank_batch_size
    batches = [(images[i : i + size], labels[i : i + size]) for i in range(0, 32, size)]
    return Training(model=Net(), data=batches, loss=loss)

def once():
    return Training(model=Net(), data=iter([data()[:8]] * 3), loss=loss)

def last():
    return Training(model=Net().to(memory_format=torch.channels_last), data=data(), loss=loss)

def autocasting():
    def inner(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)
    return Training(model=Net(), data=data(), loss=inner)

def short():
    subset = torch.utils.data.Subset(data(), range(60))
    return Training(model=Net(), data=torch.utils.data.DataLoader(subset, batch_size=8), loss=loss)

class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 8
    def __iter__(self):
        return (data()[i : i + 8] for i in range(0, 64, 8))

def ragged():
    return Training(model=Net(), data=[data()[:8], data()[:4]], loss=loss)

def stream():
    return Training(model=Net(), data=Stream(), loss=loss)

def samples():
    return Training(model=Net(), data=[(torch.zeros(8), torch.zeros(1))] * 16, loss=loss)

class Encoded(dict):  # of which it is known only as drawn how many images it holds
    def to(self, device):
        return self
    @property
    def images(self):
        return torch.stack(self["rows"][0])

def encoded():
    collate = lambda rows: Encoded(rows=tuple(zip(*rows)))
    own = lambda model, batch: model(batch.images).square().mean()
    return Training(model=Net(), data=data(), loss=own, collate=collate)

class Linear(Net):
    def forward(self, images):
        return self.last(images.mean((2, 3)).repeat(1, 3)[:, :8])

def linear():
    return Training(model=Linear(), data=data(), loss=loss)
"""


def test_ordinary_trainings_are_taken_or_told_the_way_out(made: Make) -> None:
    for function, words in (
        ("ready", []),
        ("last", []),
        ("stream", []),
        ("short", []),
        ("encoded", []),
        ("autocasting", ["or give a step in place of a loss"]),
        ("ragged", ["the last one too (drop_last=True); samples need a Dataset"]),
    ):
        workload = made(ORDINARY, function)
        advance(workload, 9)  # an epoch, and what begins the next
        found = mismatches(config(function), [seen(workload, steps=9)])
        assert [line.rpartition(", ")[2] for line in found] == words
        assert ("dataset" in workload.witness()["offers"]) == (function in ("last", "encoded", "autocasting"))
    with pytest.raises(TypeError, match="give single samples as a Dataset"):
        advance(made(ORDINARY, "samples"), 1)
    small = made(ORDINARY, "short", global_batch_size=16)
    advance(small, 1)
    (line,) = mismatches(config("short", global_batch_size=16), [seen(small, steps=1)])
    assert "16 images a step on a rank, 16 in 1 steps, rank 0 used 8" in line, "at once, not after a search for more"
    advance(computed := made(ORDINARY, "linear", precision="bf16"), 1)
    assert computed.witness()["precision"] == "bf16", "where no convolution is computed"
    with pytest.raises(RuntimeError, match=r"the batches of mine:once \(mine.py, line \d+\) ended after 3: give"):
        advance(made(ORDINARY, "once"), 4)


def test_the_held_out_loss_changes_nothing_and_draws_alike(made: Make) -> None:
    noisy = """
import random

import numpy as np

def noisy():
    model = nn.Sequential(Net(), nn.BatchNorm1d(10), nn.Dropout(0.5))
    model[1].eval()
    return Training(
        model=model, data=data(), loss=loss,
        held_out_loss=lambda model: (
            model(data()[:8][0] + torch.randn(8, 3, 8, 8)).mean() + 100 * model.training
            + np.random.rand() + random.random()
        ),
    )
"""
    looked, alone = made(noisy, "noisy"), made(noisy, "noisy")
    frozen = [module.training for module in looked.network.modules()]
    found: list[float] = []
    for batch in itertools.islice(alone.batches(), 4):
        torch.manual_seed(len(found))
        loss = float(alone.step(batch))
        states = random.getstate(), str(np.random.get_state())
        first, second = (looked.held_out_loss(draws=1) for _ in range(2))
        assert first == second, "whatever has been drawn"
        assert states == (random.getstate(), str(np.random.get_state()))
        found.append(first["loss"])
        torch.manual_seed(len(found) - 1)
        assert float(looked.step(batch)) == loss
    assert len(set(found)) == 4
    assert max(found) < 50, "all in eval mode"
    assert [module.training for module in looked.network.modules()] == frozen
    assert len(set(frozen)) == 2


@pytest.mark.parametrize("given", ["loss=loss", "step=lambda model, batch: loss(model, batch)"])
def test_kernels_are_chosen_as_the_code_has_it_and_a_step_keeps_its_number_format(made: Make, given: str) -> None:
    makes = "\n\ndef mine():\n    torch.backends.cuda.matmul.allow_tf32 = True\n    return Training("
    workload = made(f"{makes}model=Net(), data=data(), {given}, held_out_loss=lambda model: 0.0)\n", "mine")
    workload.held_out_loss(draws=1)
    assert torch.backends.cuda.matmul.allow_tf32 is ("step" in given)
    assert not torch.backends.cudnn.benchmark


def test_batches_of_any_form_are_counted_moved_and_described() -> None:
    Pair = namedtuple("Pair", ["images", "name"])
    batch = {"pair": Pair(torch.rand(4, 3, 2, 2), "x"), "labels": [torch.arange(4)], "nothing": None}
    assert (images_of(batch), images_of(("no", {"tensor": torch.tensor(1.0)}))) == (4, None)
    there = moved(batch, torch.device("cpu"), channels_last=True)
    assert isinstance(there["pair"], Pair)
    assert there["pair"].images.is_contiguous(memory_format=torch.channels_last)
    assert described(batch) == "pair: (float32 4x3x2x2, str), labels: (int64 4), nothing: nothing"


# How a user's function is called, and where a sentence says that it is written


def test_a_maker_takes_nothing_or_both_and_has_a_place(tmp_path: Path) -> None:
    label, here = config(), context()
    assert call_maker(lambda: 7, "mine:make", label, here) == 7
    assert call_maker(lambda config, context: (config, context), "mine:make", label, here) == (label, here)
    for function in (lambda _a: None, lambda _a, _b, _c: None):
        with pytest.raises(TypeError, match=r"mine:make takes [13] arguments"):
            call_maker(function, "mine:make", label, here)
    file = tmp_path / "mine.py"
    file.write_text("import functools\n\ndef make():\n    return 1\n\n@functools.cache\ndef kept():\n    return 2\n")
    there = runpy.run_path(str(file))
    assert named("mine:make", there["make"]) == "mine:make (mine.py, line 3)"
    assert place_of(there["kept"]) in ("mine.py, line 6", "mine.py, line 7")
    assert named("mine:len", len) == "mine:len"


# --- from a file to an answer ---

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
    trials = [t.config for t in ask("workers", setup(WHOLE)).trials]  # which show that they learn the same
    assert [c.loader_workers for c in trials] == [0, 2, 1]
    images = 20 * trials[0].global_batch_size
    assert {(c.workload, c.option("images", 0), c.option("draws", 1)) for c in trials} == {(OWN, images, 0)}
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


# From a file to an answer


@pytest.fixture
def looked(here: Path, instrument: Instrument) -> Callable[..., Own]:
    def looked(more: str = "", function: str = "make") -> Own:
        own_modules.write(here, more)
        check_name("profile", name := f"mine:{function}")
        return look_at(name, instrument, device="cpu", seed=0)[0]

    return looked


@pytest.mark.slow
def test_what_is_looked_at_is_what_was_written(looked: Callable[..., Own]) -> None:
    found = looked()
    assert dataclasses.replace(found, offers=WHOLE.offers) == WHOLE
    assert set(found.offers) == set(WHOLE.offers)
    assert looked("\ndef loop():\n    while True:\n        yield 1.0\n", "loop") == LOOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "held_out", "seeds", "words"),
    [
        ("loss", "lambda model: 1 / 0", 1, "ZeroDivisionError"),
        ("loss", "lambda model: None", 1, "held_out_loss returned nothing: let it return a number"),
        ("loss", "lambda model: torch.inf", 1, "a loss is inf after the first step"),
        ("lambda *given: loss(*given) * torch.nan", "None", None, "a loss is nan after the first step"),
    ],
)
def test_a_loss_that_would_fail_after_minutes_of_measuring_is_refused_before(
    here: Path, loss: str, held_out: str, seeds: int | None, words: str
) -> None:
    given = f"Training(model=Net(), data=data(), loss={loss}, held_out_loss={held_out})"
    own_modules.write(here, f"\ndef bad():\n    return {given}\n")
    with pytest.raises(ConfigError, match=words):
        experiments.run("amp", preset="smoke", workload="mine:bad", output_dir=here / "out", seeds=seeds, quiet=True)
    assert not [*here.rglob("ledger.jsonl")]


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
    assert len({r.set_id for r in study.records if r.windows}) == 1, "all is measured"
    assert {r.config.work_name for r in (*study.records, *study.trials)} == {"mine:make"}
    assert {r.status for r in study.trials} == {"ok"}
    assert "tiny" not in answer(study).finding.claim + plain(answer(study).table())
    own_modules.write(here, width=12)
    code, said, _ = call("run", "amp", *asked)
    assert json.loads(said)[0]["measured_sets"] == 1
    own_modules.write(here, "\ndef make():\n    return Training(model=Net(), data=[data()[:8]], loss=loss)\n")
    code, said, _ = call("run", "workers", *asked[:-1])
    assert (code, "mine:make gives ready batches and no dataset" in said) == (1, True)
