"""GPUs are read as they are: those that are visible, by NVML, by an old binding of it, or by nvidia-smi."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpm_lab.measure import hardware
from ddpm_lab.measure.hardware import Gpu

CARDS = tuple(Gpu(name, f"GPU-{uuid}", 80 << 30) for name, uuid in (("A", "aa11"), ("B", "ab22"), ("C", "cc33")))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "ABC"),
        ("0", "A"),
        ("2,0", "CA"),
        ("GPU-cc33,GPU-aa11", "CA"),
        ("GPU-c", "C"),
        ("GPU-a", ""),  # fits two
        ("", ""),
        ("-1", ""),
        ("0,-1,2", "A"),  # the list ends where it is wrong, as for CUDA
        ("1, 2", "BC"),
        ("7", ""),
    ],
)
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, value: str | None, names: str) -> None:
    monkeypatch.setattr(hardware, "_nvidia", lambda: (CARDS, "600.1"))
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert "".join(g.name for g in hardware.gpus()) == names
    machine = hardware.machine()
    assert machine.gpus == tuple(names)
    assert machine.driver == ("600.1" if names else None)
    assert machine.torch == "2.15"
    assert hardware.environment().gpu_uuids == tuple(g.uuid for n in names for g in CARDS if g.name == n)


def test_a_torch_without_cuda_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_nvidia", lambda: (CARDS, "600.1"))
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.gpus() == ()
    assert hardware.machine().driver is None


def test_without_the_nvml_binding_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Card X, GPU-1, 81559, 600.1'\necho 'Card Y, GPU-2, 1024, 600.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hardware._nvidia.cache_clear()
    try:
        gpus, driver = hardware._nvidia()
        assert [(g.name, g.uuid, g.memory_bytes) for g in gpus] == [
            ("Card X", "GPU-1", 81559 << 20),
            ("Card Y", "GPU-2", 1 << 30),
        ]
        assert driver == "600.1"
        hardware._nvidia.cache_clear()
        tool.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
        assert hardware._nvidia() == ((), None)
    finally:
        hardware._nvidia.cache_clear()


def old_nvml(gpus: list[dict[str, Any] | None], migs: dict[str, dict[str, Any]], driver: bytes | None) -> Any:
    """NVML as an old binding shows it: bytes instead of str, and an error for whatever is not known."""

    def by_index(index: int) -> dict[str, Any]:
        handle = gpus[index]
        if handle is None:
            raise RuntimeError("NVML_ERROR_NO_PERMISSION")
        return handle

    def by_uuid(uuid: object) -> dict[str, Any]:
        if not isinstance(uuid, bytes):
            raise TypeError("bytes expected")
        return migs[uuid.decode()]

    def driver_version() -> bytes:
        if driver is None:
            raise RuntimeError("NVML_ERROR_UNKNOWN")
        return driver

    def shut_down() -> None:
        calls.append("shutdown")
        raise RuntimeError("NVML_ERROR_UNKNOWN")

    calls: list[str] = []
    return SimpleNamespace(
        calls=calls,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=shut_down,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: handle["name"],
        nvmlDeviceGetUUID=lambda handle: handle["uuid"],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=handle["total"]),
        nvmlSystemGetDriverVersion=driver_version,
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes an NVML with the given GPUs, MIG devices and driver the one that is read."""

    def make(*gpus: dict[str, Any] | None, driver: bytes | None = b"600.1", **migs: dict[str, Any]) -> Any:
        found = old_nvml(list(gpus), {f"MIG-{uuid}": device for uuid, device in migs.items()}, driver)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        return found

    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    caches = (hardware._nvidia, hardware._mig_device)
    for cached in caches:
        cached.cache_clear()
    yield make
    for cached in caches:
        cached.cache_clear()


def test_an_old_nvml_binding_is_read(nvml: Callable[..., Any]) -> None:
    nvml({"name": b"Card X", "uuid": b"GPU-1", "total": 1 << 30}, {"name": "Card Y", "uuid": "GPU-2", "total": 2 << 30})
    assert hardware.gpus() == (Gpu("Card X", "GPU-1", 1 << 30), Gpu("Card Y", "GPU-2", 2 << 30))
    assert hardware.machine().driver == "600.1"
    json.dumps(dataclasses.asdict(hardware.environment()))


def test_what_nvml_does_not_know_is_none_and_the_rest_is_kept(nvml: Callable[..., Any]) -> None:
    seen = nvml({"name": "Shared", "uuid": "GPU-1"}, None, {"total": 1 << 30}, driver=None)
    # The second belongs to somebody else's job: CUDA does not count it.
    assert hardware.gpus() == (Gpu("Shared", "GPU-1", None), Gpu("NVIDIA GPU", None, 1 << 30))
    assert hardware.machine().driver is None
    assert hardware.environment().gpu_uuids == ("GPU-1",)
    assert seen.calls.count("init") == seen.calls.count("shutdown") > 0


@pytest.mark.parametrize("value", ["GPU-2", "GPU-", "nonsense", "1"])
def test_a_gpu_without_a_readable_uuid_can_be_chosen_by_number(
    nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    nvml({"name": "A", "uuid": "GPU-1", "total": 1}, {"name": "B", "total": 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [g.name for g in hardware.gpus()] == {"1": ["B"], "GPU-": ["A"]}.get(value, [])


def test_a_mig_device_is_the_one_gpu(nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": b"Card X", "uuid": b"GPU-1", "total": 8 << 30}
    nvml(card, known={"name": b"Card X MIG 1g", "uuid": b"MIG-known", "total": 1 << 30})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-known,MIG-other")
    assert hardware.gpus() == (Gpu("Card X MIG 1g", "MIG-known", 1 << 30),)
    for unknown in ("MIG-other", "MIG-GPU-1/3/0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", unknown)
        assert hardware.gpus() == (Gpu("NVIDIA GPU", unknown, None),)
        assert hardware.machine().gpus == ("NVIDIA GPU",)
        assert hardware.environment().gpu_uuids == (unknown,)


def test_a_sentence_of_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card = "Card X, GPU-1, [N/A], 600.1"
    found = (Gpu("Card X", "GPU-1", None),)
    said = {"No devices were found": (), card: found, f"{card}\nUnable to read the second card": found}
    try:
        for line, gpus in said.items():
            tool.write_text(f"#!/bin/sh\necho '{line}'\n")
            tool.chmod(0o755)
            hardware._nvidia.cache_clear()
            assert hardware._nvidia()[0] == gpus
    finally:
        hardware._nvidia.cache_clear()
