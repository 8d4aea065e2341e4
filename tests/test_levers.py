"""The settings that change how a step is computed: each is witnessed, and none changes what is learned."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from fresh_processes import advance, context, seen

from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.diffusion.unet import NETWORKS
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.plan import ATTENTION, FUSED_PARTS
from ddpm_lab.training.train import Trainer

LEVERS: list[dict[str, Any]] = [
    {"channels_last": False},
    {"implementation": "plain", "channels_last": False},
    *({"kernels": "fused", "options": (("without", part),)} for part in FUSED_PARTS),
    {"read_loss": True},
    {"optimizer": OptimizerConfig(adam="foreach", ema_every=2)},
    {"optimizer": OptimizerConfig(adam="loop", ema_every=2)},
    {"optimizer": OptimizerConfig(ema="loop", ema_every=2)},
]


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    return dataclasses.replace(synthetic, network="seed", optimizer=OptimizerConfig(ema_every=2))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed network, a quarter as wide and a level less deep: all of its code in little time."""
    narrow = dataclasses.replace(NETWORKS["seed"], width=16, multipliers=(1, 2), heads=1)
    monkeypatch.setitem(NETWORKS, "seed", narrow)


def trained(config: RunConfig, steps: int) -> tuple[Trainer, list[float]]:
    trainer = Trainer(config, context())
    return trainer, advance(trainer, steps)


def check_levers(config: RunConfig, levers: list[dict[str, Any]]) -> None:
    reference, plain = trained(config, 4)
    without = seen(reference)
    for lever in levers:
        pulled = dataclasses.replace(config, **lever)
        trainer, losses = trained(pulled, 4)
        assert losses == pytest.approx(plain, rel=1e-4)
        assert mismatches(pulled, [seen(trainer)]) == []
        assert lever.get("implementation") or mismatches(pulled, [without]) != [], "the label says that it was pulled"
        for mine, others in ((trainer.parameters, reference.parameters), (trainer.averages, reference.averages)):
            for a, b in zip(mine, others, strict=True):
                assert float((a.reshape(b.shape) - b).detach().abs().max()) < 2e-4  # Adam's first steps are 2e-4 each


def test_fused_kernels_are_witnessed_and_change_no_loss(config: RunConfig) -> None:
    check_levers(config, [{"kernels": "fused"}])


@pytest.mark.slow
def test_every_other_lever_too(config: RunConfig) -> None:
    check_levers(config, LEVERS)


@pytest.fixture
def attention() -> Iterator[None]:
    """Afterwards torch may use all kernels again."""
    yield
    for name in ATTENTION:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled=True)


@pytest.mark.usefixtures("attention")
def test_the_kernel_of_attention_is_chosen_and_witnessed(config: RunConfig) -> None:
    """Torch's choice among kernels of CPUs obeys the same flags."""
    _, plain = trained(config, 2)
    for name, runs in (("math", 0), ("flash", 1)):
        chosen = dataclasses.replace(config, options=(("attention", name),))
        trainer, losses = trained(chosen, 2)
        q = torch.ones(1, 1, 64, 32)
        assert torch._fused_sdp_choice(q, q, q) == runs
        assert losses == pytest.approx(plain, rel=1e-4)
        assert mismatches(chosen, [seen(trainer)]) == []
        assert mismatches(config, [seen(trainer)]) == [f"the label says attention , rank 0 ran with {name}"]


@pytest.mark.gpu
@pytest.mark.calls
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["aten", "fused"])
@pytest.mark.parametrize("loader", ["packed", "resident"])
def test_on_a_gpu_a_step_does_not_synchronise(
    config: RunConfig, loader: str, kernels: str, never_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    on_gpu = dataclasses.replace(config, device="cuda", precision="bf16", loader=loader, kernels=kernels)
    trainer = Trainer(on_gpu, context(device="cuda:0"))
    batches = trainer.batches()
    for _ in range(3):
        trainer.step(next(batches))
    with never_waiting():
        for _ in range(3):
            trainer.step(next(batches))


# Dynamo looks at the gradient of what flows from block to block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_compiled_block_by_block(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without C++, which takes a minute to compile and is none of the lab's.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    eager = trained(config, 3)[1]
    pulled = dataclasses.replace(config, compile="regional")
    trainer, losses = trained(pulled, 3)
    assert losses == pytest.approx(eager, rel=1e-4)
    found = seen(trainer)
    assert mismatches(pulled, [found]) == []
    assert trainer.witness()["graphs"] == found["graphs"], "reading it compiles nothing"
    assert found["graph_breaks"] == 0
    assert mismatches(dataclasses.replace(config, compile="whole"), [found])
