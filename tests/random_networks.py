"""Networks in which every parameter takes part, what they are given, and how far results are apart."""

import torch
from torch import Tensor, nn


def randomise(module: nn.Module) -> None:
    """Give every parameter a random value, gains, biases and layers that start at zero too."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)


def inputs(
    count: int = 2, height: int = 32, width: int = 32, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Images (N, 3, H, W) and timesteps (N,)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, height, width, generator=generator, dtype=dtype)
    return x, torch.randint(0, 1000, (count,), generator=generator)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    exact = expected.detach().double()
    return float((actual.detach().double() - exact).norm() / exact.norm().clamp(min=1e-30))
