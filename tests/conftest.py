"""Fixtures of the tests that start real rank groups."""

import contextlib
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from planted_gpus import Card, Plant, nvml

from ddpm_lab.__main__ import main
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import prepare, read_manifest
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import CodeVersion, Loaded, code_version
from ddpm_lab.measure.group import Group, Limits
from ddpm_lab.measure.sets import Instrument, Member, Work, measure_alone
from ddpm_lab.plan import Plan
from ddpm_lab.questions import planning
from ddpm_lab.record import RunRecord

# One thread for what tests compute themselves: two that wait for each other make no progress beside a busy neighbour.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's store says on the terminal what tests of lost connections make happen. Read when torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Tests measure side by side.
os.environ.setdefault("DDPM_LAB_MEASURING_LOCK", "")

# Threads that wait for others of their rank while another test has the cores would burn them: ten times slower.
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
if BESIDE_OTHERS:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Properties are no speed claims either, and a busy machine fails none of them.
settings.register_profile("lab", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lab")

BUSY = "lab_workloads:busy"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """Ranks of tests that run side by side take a core each, and not all that there are."""
    real = Group.__init__

    def made(group: Group, config: RunConfig, **given: Any) -> None:
        real(group, config, **given | {"threads": config.threads or 1})

    with pytest.MonkeyPatch.context() as patch:
        if BESIDE_OTHERS:
            patch.setattr(Group, "__init__", made)
        yield


@pytest.fixture
def short_plan() -> Plan:
    """A set that costs a second."""
    return Plan(turns=2, window_seconds=0.05, warmup_steps=5)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of comparisons that cost two seconds."""
    monkeypatch.setattr(planning, "Plan", partial(Plan, turns=4, window_seconds=0.05))


@pytest.fixture
def instrument(tmp_path: Path) -> Instrument:
    """An instrument for the busy workload, with short limits."""
    return Instrument(
        code=code_of(BUSY),
        cache=tmp_path / "cache",
        usable_cores=hardware.usable_cores(),
        data_name="none",
        limits=Limits(build_seconds=60, window_seconds=3),
    )


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line here; returns its exit code, standard output and standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code: Any = main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cores and no GPU."""
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)


@pytest.fixture
def multiplying_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are chosen as on a processor that multiplies bf16, whatever this one does."""
    from ddpm_lab.questions import probe  # noqa: PLC0415 - after the number of threads is set
    from ddpm_lab.training import setting  # noqa: PLC0415

    for module in (probe, setting):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(setting, "favours_bf16", lambda: True)


@pytest.fixture
def never_waiting() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes a context in which the host fails when it waits for the GPU."""
    import torch  # noqa: PLC0415 - after the number of threads is set

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            # Torch calls the mode a prototype each time it is set, also when it is set back.
            warnings.filterwarnings("ignore", message="Synchronization debug mode", category=UserWarning)
            try:
                torch.cuda.set_sync_debug_mode("error")
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture
def machine_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Sixteen cores, and the files, above all of cgroups, that the test puts here instead of the machine's own."""
    files: dict[str, str] = {}
    real = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        name = str(path)
        if name in files:
            return files[name]
        if name.startswith(("/sys/fs/cgroup", "/proc/self/cgroup")):
            raise FileNotFoundError(name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    yield files
    monkeypatch.undo()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Makes an NVML with the given cards the one that is read; with none at all, there is no binding."""

    def plant(*cards: Card | None, driver: str | None = "600.1") -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml(*cards, driver=driver) if cards else None)
        forget()

    def forget() -> None:
        for cached in (hardware._nvml, hardware.gpu_handle, hardware._nvidia, hardware._ask_torch):
            cached.cache_clear()

    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield plant
    forget()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic images, prepared at 8x8 pixels; nothing may be written there."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    prepare("synthetic", folder, image_size=8)
    return folder


@pytest.fixture(scope="session")
def synthetic(data: Path) -> RunConfig:
    """A small run on the synthetic images."""
    return RunConfig(data=str(data), data_sha256=read_manifest(data).content_hash, image_size=8, global_batch_size=8)


@pytest.fixture(scope="session")
def inception(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of torch-fidelity's Inception with random weights, of which nothing vanishes on the way."""
    pytest.importorskip("torchmetrics", reason="make fid")
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", reason="make fid")
    import torch  # noqa: PLC0415 - after the number of threads is set

    class Blank(module.FeatureExtractorInceptionV3):  # type: ignore[misc, name-defined]
        """The architecture alone: there is no file of weights yet."""

        def load_state_dict(self, *_: Any, **__: Any) -> None:
            """Keep what torch has drawn."""

    path = tmp_path_factory.mktemp("inception") / "random.pth"
    torch.save({}, path)
    torch.manual_seed(0)
    network = Blank("random", ["2048"], feature_extractor_weights_path=str(path))
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    torch.save(network.state_dict(), path)
    return str(path)


def code_of(workload: str) -> CodeVersion:
    """The code of a workload of the tests, which loads no module beside its own."""
    module = workload.partition(":")[0]
    return code_version(Loaded({module: str(Path(__file__).with_name(f"{module}.py"))}))


def done_alone(
    cache: Path, config: RunConfig, work: Work, *, role: str = "quality", plan: Plan | None = None
) -> RunRecord:
    """The record of a group on its own that does a work."""
    code = code_of(config.workload) if config.workload.startswith("lab_workloads:") else code_version()
    instrument = Instrument(code=code, cache=cache, usable_cores=hardware.usable_cores(), data_name="none")
    member, where = Member(role, "alone", config), {"experiment": "test", "family": "alone"}
    return measure_alone(instrument, plan=plan or Plan(), member=member, work=work, **where)


def busy_config(world_size: int = 1, **options: Any) -> RunConfig:
    """A busy run with planted options."""
    values = tuple({"micro_steps": 20, **options}.items())
    return RunConfig(workload=BUSY, world_size=world_size, global_batch_size=8, oversubscribe=True, options=values)


def alive(pids: list[int]) -> list[int]:
    """Those of ``pids`` that still run; a zombie has ended, whoever should have collected it."""
    states = {process.pid: process.info["status"] for process in psutil.process_iter(["status"])}
    return [pid for pid in pids if states.get(pid, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE]


def marked(variable: str, value: str) -> list[psutil.Process]:
    """All that still run, wherever they are, with this value of a variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value:
                found.append(process)
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that replaces the golden texts under ``tests/data/`` by what is made now."""
    parser.addoption("--update-golden", action="store_true", help="replace the golden texts under tests/data/")


def pytest_collection_finish() -> None:
    """Let the collector of garbage look less often: what was imported is much, and stays."""
    gc.set_threshold(20_000, 20, 50)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the tests marked ``chaos`` tried, and how it ended, as a table."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    rows = [value for r in reports for name, value in r.user_properties if name == "chaos"]
    if rows:
        terminalreporter.section("attacks")
        for attack, tried, result in [("attack", "tried", "result"), ("---", "---:", "---"), *sorted(rows)]:
            terminalreporter.write_line(f"| {attack} | {tried} | {result} |")
