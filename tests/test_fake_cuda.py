"""What only a GPU's host code does, on a CUDA without a GPU (tests/fake_cuda): that it starts, how, and that it ends.

Kernels compute nothing there, so no value and no speed is looked at.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.config import LOADER_ALONE

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# The lab, with a ledger that keeps what such a GPU says.
LAB = "from ddpm_lab import __main__, ledger; ledger.FAKE_DRIVER = ''; raise SystemExit(__main__.main())"
SYNTHETIC = "synthetic"
UUIDS = ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"]


class Fake:
    """Runs commands where torch finds GPUs that are not there: so many, of a capability such as 90, of equal memory."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        subprocess.run([HERE / "fake_cuda" / "build.sh", sys.executable, folder], check=True)

    def python(self, *words: object, code: int = 0, **gpus: int) -> str:
        """Standard output of a Python that ends with ``code``."""
        environment = os.environ | {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in gpus.items()}
        environment |= {"DDPM_LAB_MEASURING_LOCK": "", "PYTHONPATH": str(HERE.parent)}
        command = [str(self.run), sys.executable, *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def lab(self, *words: object, **how: int) -> str:
        """What a command of the lab prints."""
        return self.python("-c", LAB, *words, **how)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Built anew. Needs a torch with CUDA 13, whose functions it stands for."""
    found = find_spec("torch")
    told = Path(str(found and found.origin)).with_name("version.py").read_text()
    if not re.search(r"^cuda\b.*'13\.", told, re.MULTILINE):
        pytest.skip("the fake CUDA is for a torch that is built for CUDA 13")
    if not shutil.which("g++"):
        pytest.skip("the fake CUDA is compiled with g++")
    return Fake(tmp_path_factory.mktemp("fake_cuda"))


def rows(output: Path) -> list[dict[str, Any]]:
    """Records as they are written: by an own reader, since the ledger's refuses them."""
    return [json.loads(line) for line in (output / "trace_output" / "ledger.jsonl").read_text().splitlines()]


def measured(fake: Fake, output: Path, data: Path | str, *questions: str, **gpus: int) -> list[dict[str, Any]]:
    """Records of questions that are asked of such GPUs, each of which has a finding."""
    size = 32 if data == SYNTHETIC else 8
    words = ("run", *questions, "--preset", "smoke", "--network", "tiny", "--data", data, "--image-size", size)
    found = {
        a["experiment"]: a["finding"] for a in json.loads(fake.lab(*words, "--output-dir", output, "--json", **gpus))
    }
    assert all(found[question] for question in questions)
    return rows(output)


def told(found: Iterable[dict[str, Any]], experiment: str, role: str) -> dict[str, str]:
    """Status by label of an experiment's records of one role."""
    return {r["label"]: r["status"] for r in found if (r["experiment"], r["role"]) == (experiment, role)}


def test_questions_of_one_gpu_and_the_largest_batch_ends_where_memory_does(fake: Fake, tmp_path: Path) -> None:
    questions = ("profile", "amp", "workers", "batch_size", "quality", "multi_gpu")
    one_gpu = measured(fake, tmp_path, SYNTHETIC, *questions, memory_mb=400)
    trained = [r for r in one_gpu if r["config"]["device"] == "cuda" and r["ranks"]]
    assert {r["experiment"] for r in trained} > {"amp", "batch_size", "quality"}
    for record in trained:
        assert record["environment"]["machine"]["gpus"] == ["Fake GPU"]
        assert {(rank["device"], rank["device_uuid"]) for rank in record["ranks"]} == {("cuda:0", UUIDS[0])}
        if record["config"]["workload"] != LOADER_ALONE:
            (rank,) = record["ranks"]
            assert 0 < rank["peak_memory_bytes"] <= rank["peak_reserved_bytes"] <= 400 << 20
        assert {w["backend"] for w in record["witness"]["ranks"]} == {"nccl"}
    candidates = {"amp": ["bf16", "fp16", "tf32"], "workers": ["1 worker"], "batch_size": ["batch 256"]}
    for experiment, labels in candidates.items():
        assert told(one_gpu, experiment, "candidate") == dict.fromkeys(labels, "ok")
        assert set(told(one_gpu, experiment, "baseline").values()) == {"ok"}
    tried = told(one_gpu, "batch_size", "search")
    (end,) = (r for r in one_gpu if r["role"] == "largest")
    assert (end["label"], end["status"]) == ("memory", "ok")
    assert set(tried.values()) == {"ok", "oom"}


def test_compiling(fake: Fake, tmp_path: Path) -> None:
    found = measured(fake, tmp_path, SYNTHETIC, "torch_compile")
    assert told(found, "torch_compile", "candidate") == {"compiled": "ok"}


def test_questions_of_two_gpus(fake: Fake, tmp_path: Path, data: Path) -> None:
    two_gpus = measured(fake, tmp_path, data, "multi_gpu", "exchange", devices=2)
    assert told(two_gpus, "multi_gpu", "candidate") == {"2 GPUs": "ok"}
    assert told(two_gpus, "exchange", "candidate") == {"no exchange (no training)": "ok", "bf16 hook": "ok"}
    for record in (r for r in two_gpus if r["config"]["world_size"] == 2 and r["ranks"]):
        found = [(rank["device"], rank["device_uuid"]) for rank in record["ranks"]]
        assert found == [("cuda:0", UUIDS[0]), ("cuda:1", UUIDS[1])]


@pytest.mark.parametrize(("capability", "status"), [(75, "unsupported"), (80, "ok")])
def test_number_formats_by_capability(fake: Fake, tmp_path: Path, data: Path, capability: int, status: str) -> None:
    found = told(measured(fake, tmp_path, data, "amp", capability=capability), "amp", "candidate")
    assert found == {"bf16": status, "fp16": "ok", "tf32": status}


@pytest.mark.parametrize("how", [{"capability": 70}, {"driver": 12040}])
def test_a_gpu_that_this_torch_cannot_use_is_told(fake: Fake, how: dict[str, int]) -> None:
    items = {item["name"]: item for item in json.loads(fake.lab("check", "--json", **how))["items"]}
    assert not items["NVIDIA GPU"]["present"]
    assert "cannot use Fake GPU" in items["NVIDIA GPU"]["detail"]


def test_training_and_sampling(fake: Fake, tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    words = "--network tiny --image-size 8 --compile off --batch-size 8 --steps 3 --world-size 2"
    fake.lab("train", "--data", data, "--output-dir", run, *words.split(), devices=2)
    (checkpoint,) = (run / "checkpoints").glob("*.pt")
    fake.lab("sample", checkpoint, "--count", 3, "--steps", 3, "--world-size", 2, "--grid", devices=2)
    assert len(list(checkpoint.with_suffix("").glob("*.png"))) == 4


def test_gpu_tests_that_look_at_no_value(fake: Fake) -> None:
    files = [str(file) for file in HERE.glob("test_*.py") if "pytest.mark.calls" in file.read_text()]
    said = fake.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "calls", *files)
    assert re.search(r"\d+ passed", said)
    assert "skipped" not in said
