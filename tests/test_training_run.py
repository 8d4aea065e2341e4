"""A training run: what is due when, going on, and every way to end."""

import dataclasses
import errno
import json
import math
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from test_checkpoint import made

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.measure import hardware, others
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.others import CoreWatch
from ddpm_lab.output import Progress
from ddpm_lab.processor import favours_bf16
from ddpm_lab.training import setting, training_run
from ddpm_lab.training.checkpoint import CheckpointError, read, write
from ddpm_lab.training.run_folder import RunFailed, RunFolder, checkpoints_in
from ddpm_lab.training.stopping import Stop, Stopped
from ddpm_lab.training.training_run import Outcome, Schedule, plan_training, train

pytestmark = pytest.mark.usefixtures("two_cores")
CONFIG = RunConfig(workload=TRAINING, purpose="quality", image_size=8, world_size=2, global_batch_size=8)


Hook = Callable[[str, int], Any]


class Ranks:
    """What a group of ranks answers, without ranks; ``hook`` is asked before each of its calls."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.calls = hook, list[tuple[str, int]]()

    def __call__(self, config: RunConfig, **_: Any) -> "Ranks":
        self.config = dataclasses.replace(config, options=())
        path = config.option("checkpoint", "")
        self.step = read(Path(path)).step if path else 0
        return self

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def witness(self) -> list[dict[str, Any]]:
        return [{"data_sha256": self.hook("images", i) or self.config.data_sha256} for i in range(2)]

    def finish(self) -> None:
        pass

    def advance(self, steps: int, limit: float, _stage: str) -> list[dict[str, Any]]:
        assert limit >= 60
        losses = [self.hook("loss", i) or 1 / i for i in range(self.step + 1, self.step + steps + 1)]
        self.step += steps
        self.calls.append(("advance", steps))
        return [{"losses": losses, "seconds": 0.1 * steps}, {"losses": losses, "seconds": 0.2 * steps}]

    def ask(self, command: str, limit: float, _stage: str, *, count: int) -> None:
        assert limit >= 60
        self.calls.append((command, count))

    def call(self, method: str, limit: float, **arguments: Any) -> list[Any]:
        assert limit >= 60
        self.calls.append((method, self.step))
        if problem := self.hook(method, self.step):
            return [problem, None]
        if method == "save":
            write(Path(arguments["path"]), made(self.config, self.step))
        return [{"loss": 0.5} if method == "held_out_loss" else None, None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Put a stand-in in the place of the group."""

    def use(hook: Hook = lambda *_: None) -> "Ranks":
        group = Ranks(hook)
        monkeypatch.setattr(training_run, "Group", group)
        return group

    return use


NEVER: dict[str, Any] = {"sample_every": 0, "evaluate_every": 0}


def run(folder: Path, steps: int, *, config: RunConfig = CONFIG, **times: int) -> Outcome:
    how: dict[str, Any] = {"threads": 1, "stop": Stop(), "progress": Progress("train", quiet=True)}
    return train(config, Schedule(steps=steps, **times), folder, **how)


def steps_in(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in reversed(checkpoints_in(folder / "checkpoints"))]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def trained(group: Ranks) -> int:
    """Steps that the ranks were asked for."""
    return sum(steps for name, steps in group.calls if name == "advance")


# --- what is done when -----------------------------------------------------------------------------------------------


def test_threads_follow_the_free_cores(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks: eight free cores are four threads for each, and one of eight, of which half is theirs, two."""
    monkeypatch.setattr(others, "usable_cores", lambda: 8)
    free = iter([None, 5, 8, None, 9, 1, 8])
    monkeypatch.setattr(CoreWatch, "free", lambda *_, **__: next(free, None))
    for threads, compiling, counts in ((0, "off", [2, 4, 2, 4]), (1, "off", []), (0, "whole", [])):
        group = ranks()
        config = dataclasses.replace(CONFIG, threads=threads, compile=compiling)
        run(tmp_path / f"{threads}-{compiling}", 60, config=config, **NEVER)
        assert [count for method, count in group.calls if method == "set_threads"] == counts


def test_chunks_last_a_second_and_end_where_something_is_due(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    group = ranks()
    outcome = run(tmp_path, 29, save_every=10, sample_every=7, evaluate_every=12, keep=2)
    done = [(name, value) for name, value in group.calls if name not in ("advance", "held_out_loss")]
    assert done == [
        *(("samples", 7), ("save", 10), ("samples", 14), ("save", 20), ("samples", 21), ("samples", 28)),
        *(("save", 29), ("samples", 29)),
    ]
    assert max(steps for name, steps in group.calls if name == "advance") <= 5
    assert [r["step"] for r in logged(tmp_path)] == list(range(1, 30))
    assert steps_in(tmp_path) == [20, 29]
    assert [r["step"] for r in logged(tmp_path) if "held_out_loss" in r] == [12, 24, 29]
    assert (outcome.held_out_loss, outcome.checkpoint) == (0.5, tmp_path / "checkpoints" / "step-00000029.pt")


def test_slow_steps_are_saved_by_the_clock(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of four minutes, in chunks of five after the first; it stays until the next checkpoint."""
    now = [0.0]

    def passes(what: str, _: int) -> None:
        now[0] += 240 * (what == "loss")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    group = ranks(passes)
    run(tmp_path, 8, save_every=1000, **NEVER)
    assert [value for name, value in group.calls if name == "save"] == [6, 8]
    assert steps_in(tmp_path) == [8]


def test_the_same_command_goes_on(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    def end(what: str, step: int) -> None:
        if (what, step) == ("loss", 18):
            raise KeyboardInterrupt

    ranks(end)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 30, save_every=7, **NEVER)
    assert steps_in(tmp_path) == [7, 14]
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 17, "lo')  # killed while it wrote
    group = ranks()
    run(tmp_path, 30, save_every=7, **NEVER)
    assert (trained(group), steps_in(tmp_path)) == (16, [21, 28, 30])
    assert [r["step"] for r in logged(tmp_path)] == list(range(1, 31))
    group = ranks()
    assert run(tmp_path, 30).step == 30
    assert group.calls == [], "there is nothing left to do"


def test_when_samples_show_objects_is_said_once(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks make 40 images/s, and the first chunk of one step says nothing of the speed."""
    told = list[str]()
    monkeypatch.setattr(Progress, "stay", lambda _, text: told.append(text))
    monkeypatch.setattr(training_run, "OBJECTS", {"tiny": 4_843})
    for size, batch, steps, more in (
        *((32, 8, 20, ": give --steps 606 or more"), (32, 8, 606, ""), (32, 8, 620, None)),
        *((8, 8, 20, None), (32, 24, 20, None)),  # of such images and batches it is not known
    ):
        ranks()
        told.clear()
        config = dataclasses.replace(CONFIG, image_size=size, global_batch_size=batch)
        run(tmp_path / f"{size}-{batch}", steps, config=config, save_every=600, **NEVER)
        said = [text for text in told if "showed objects after some 4,843 images" in text]
        assert [text.partition("step 606, in 2 min")[2] for text in said] == ([] if more is None else [more])


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_what_ends_a_run_leaves_the_last_good_checkpoint(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    def fail(what: str, step: int) -> None:
        if (what, step) == ("loss", 7):
            raise GroupFailed("oom", "rank 1: OutOfMemoryError", "  the traceback\n")

    ranks(lambda what, step: math.nan if what == "loss" and step >= 13 else None)
    with pytest.raises(RunFailed, match=r"step 13: .*step-00000010\.pt"):
        run(tmp_path / "nan", 30, save_every=5, **NEVER)
    assert steps_in(tmp_path / "nan") == [5, 10]
    assert [r["step"] for r in logged(tmp_path / "nan")] == list(range(1, 13))
    ranks(lambda what, number: "0" * 64 if (what, number) == ("images", 1) else None)
    with pytest.raises(RunFailed, match="rank 1 sees other images"):
        run(tmp_path / "images", 30)
    ranks(fail)
    with pytest.raises(RunFailed, match=r"^rank 1: OutOfMemoryError; .*step-00000005.*\nthe traceback"):
        run(tmp_path / "oom", 30, save_every=5, **NEVER)
    ranks(lambda what, step: "a.pt: File too large" if (what, step) == ("save", 10) else None)
    with pytest.raises(RunFailed, match=r"^a\.pt: File too large; .*step-00000005"):
        run(tmp_path / "disk", 30, save_every=5, **NEVER)


def test_an_unreadable_checkpoint_is_set_aside(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    ranks()
    run(tmp_path, 20, save_every=5, **NEVER)
    newest = tmp_path / "checkpoints" / "step-00000020.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    group = ranks()
    run(tmp_path, 22, save_every=5, keep=1, **NEVER)
    assert trained(group) == 7, "from step 15"
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000020.pt.unreadable", "step-00000022.pt"]


def test_a_checkpoint_that_cannot_be_read_now_stays_where_it_is(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks()
    run(tmp_path, 10, save_every=5, **NEVER)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    for error, told in ((OSError(errno.ESTALE, "Stale file handle"), CheckpointError), (MemoryError(), MemoryError)):
        monkeypatch.setattr(zipfile.ZipFile, "namelist", lambda *_, error=error: _raise(error))
        with pytest.raises(told):
            run(tmp_path, 12, save_every=5, **NEVER)
        monkeypatch.undo()
        ranks()
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == names


def test_a_log_that_cannot_be_read_now_stays_as_it_is(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks()
    run(tmp_path, 10, save_every=5, **NEVER)
    before = (tmp_path / "log.jsonl").read_bytes()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: _raise(OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(RunFailed, match="Stale file handle"):
        run(tmp_path, 12, save_every=5, **NEVER)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def _raise(error: BaseException) -> NoReturn:
    raise error


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    ranks()
    (tmp_path / "config.toml").write_text("# mine\n")
    with pytest.raises(ConfigError, match=r"holds config\.toml of something else"):
        run(tmp_path, 3, **NEVER)
    assert (tmp_path / "config.toml").read_text() == "# mine\n"


def test_a_run_that_learns_something_else_is_refused(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks()
    run(tmp_path, 5, **NEVER)
    before = (tmp_path / "config.toml").read_text()
    group = ranks()
    others: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed is 1, and was 0"),
        ({"data_sha256": "ab"}, "data_sha256 is 'ab'.* and the images as they were"),
        ({"optimizer": OptimizerConfig(clip_norm=2.0)}, r"optimizer\.clip_norm is 2\.0, and was 1\.0"),
    ]
    for settings, words in others:
        with pytest.raises(ConfigError, match=words):
            run(tmp_path, 10, config=dataclasses.replace(CONFIG, **settings))
    assert (group.calls, (tmp_path / "config.toml").read_text()) == ([], before)
    slower = OptimizerConfig(learning_rate=1e-4)
    told = list[str]()
    monkeypatch.setattr(Progress, "done", lambda _, text: told.append(text))
    run(tmp_path, 6, config=dataclasses.replace(CONFIG, precision="bf16", world_size=1, optimizer=slower))
    assert "the learning rate is 0.0001 from here on, and was 0.0002" in told


# --- from a file and the command line to a run ----------------------------------------------------------------------

Plan = Callable[..., tuple[RunConfig, Schedule]]


@pytest.fixture
def plan(tmp_path: Path, data: Path) -> Plan:
    """A run as planned on two cores and no GPU."""

    def plan(text: str = "", schedule: dict[str, Any] | None = None, **flags: Any) -> tuple[RunConfig, Schedule]:
        (tmp_path / "a.toml").write_text(f"image_size = 8\ndata = '{data}'\n{text}")
        given = {name.replace("__", "."): value for name, value in flags.items()}
        times = {"steps": 10} if schedule is None else schedule
        return plan_training(given, times, file=tmp_path / "a.toml", cache=tmp_path)[:2]

    return plan


def test_defaults_then_the_file_then_the_command_line_and_back_to_a_file(tmp_path: Path, plan: Plan) -> None:
    config, schedule = plan()
    assert (config.workload, config.device, config.network, config.global_batch_size) == (TRAINING, "cpu", "seed", 16)
    usual = "bf16" if favours_bf16() else "fp32"
    assert (config.precision, config.kernels, config.loader) == (usual, "fused", "packed")
    assert plan(compile="whole")[0].kernels == plan(channels_last=False)[0].kernels == "aten"
    assert len(config.data_sha256) == 64
    assert schedule == Schedule(steps=10)
    text = "seed = 4\nprecision = 'fp32'\n[optimizer]\nlearning_rate = 1e-3\nclip_norm = 'none'\n"
    text += "[train]\nsteps = 99\nsave_every = 7\n"
    config, schedule = plan(text, {"steps": 5}, precision="bf16", optimizer__learning_rate=2e-3)
    assert (config.seed, config.precision) == (4, "bf16")
    assert (config.optimizer.learning_rate, config.optimizer.clip_norm) == (2e-3, None)
    assert schedule == Schedule(steps=5, save_every=7)
    with RunFolder(tmp_path) as folder:
        folder.write_settings(config, {"steps": 5, "save_every": 7})
    said = list[str]()
    again = plan_training({}, {}, file=tmp_path / "config.toml", cache=tmp_path, progress=said.append)
    assert said == [read_manifest(Path(config.data)).describe()], "how many images there are"
    assert again[:2] == (config, schedule), "what ran can be run again"


def test_on_one_gpu_a_compiled_step_is_launched_as_graphs(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "_check_machine", lambda *_: None)
    monkeypatch.setattr(setting, "least_capability", lambda: (9, 0))
    monkeypatch.setattr(setting, "missing_to_compile", lambda _: "")

    def mode(text: str = "", **flags: Any) -> str:
        return plan(text, None, **{"device": "cuda", "world_size": 1, **flags})[0].compile_mode

    assert mode() == mode(compile="whole") == "reduce-overhead"
    for without in ({"accumulation": 2}, {"world_size": 2}, {"compile": "regional"}, {"compile": "off"}):
        assert mode(**without) == "default"
    assert mode("compile_mode = 'default'") == "default"
    for memory, loader in ((2**30, "resident"), (2**10, "packed")):  # the images take 12 kB
        gpu = SimpleNamespace(memory_bytes=memory)
        monkeypatch.setattr(hardware, "gpus", lambda gpu=gpu: [gpu])
        assert plan(device="cuda", world_size=1)[0].loader == loader


BAD: list[tuple[str, dict[str, Any] | None, dict[str, Any], str]] = [
    ("", {"steps": 0}, {}, "steps is 0"),
    ("", None, {"world_size": 4}, "4 CPU ranks need 4 cores"),
    ("loader = 'files'\nloader_workers = 3", None, {}, "loader_workers is 3"),
    ("", None, {"device": "cuda", "network": "tiny"}, "no GPU is visible"),
    ("[train]\nmagic = 1", None, {}, "'magic'"),
    ("workload = 'os:system'", None, {}, "workload"),
    ("world_size = 2\n[exchange]\nenabled = false", None, {}, "exchange.enabled"),
    (f"data_sha256 = '{'0' * 64}'", None, {}, "data_sha256 names: give those with --data"),
]


def test_bad_settings_are_refused(plan: Plan) -> None:
    for text, schedule, flags, words in BAD:
        with pytest.raises(ConfigError, match=words) as caught:
            plan(text, schedule, **flags)
        assert "\n" not in str(caught.value)


# --- the folder ----------------------------------------------------------------------------------------------------


def test_one_run_at_a_time_keeps_its_newest_checkpoints_and_clears_what_is_half_written(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        with pytest.raises(ConfigError, match="another run works in"), RunFolder(tmp_path):
            pass
        for step in (5, 10, 99_999_999, 100_000_000, 20):
            folder.checkpoint(step).touch()
        for name in ("checkpoints/mine.pt", "checkpoints/a.pt.17.partial", "samples/a.png.17.partial"):
            (tmp_path / name).touch()
        folder.keep(3)
    with RunFolder(tmp_path):
        names = {p.name for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(".")}
    assert names == {"step-100000000.pt", "step-99999999.pt", "step-00000020.pt", "mine.pt"}


# --- signals -------------------------------------------------------------------------------------------------------


def test_the_first_signal_is_noted_a_repeat_is_not_and_the_second_ends() -> None:
    for first, second in ((signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)):
        before = signal.getsignal(first)
        with Stop() as stop:
            stop.gentle = True
            os.kill(os.getpid(), first)
            assert stop.number == first
            if first == signal.SIGTERM:  # a scheduler sends it to all, who pass it on
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped) as caught:
                os.kill(os.getpid(), second)
        assert caught.value.number == second
        assert signal.getsignal(first) == before
    with Stop(), pytest.raises(Stopped):  # before there is anything to save
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_a_finalizer_which_drops_what_is_raised_ends_the_run_all_the_same() -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    before = sys.unraisablehook
    with Stop(), pytest.raises(Stopped):
        time.sleep(5 * bool(Finalized()))
    assert sys.unraisablehook is before
