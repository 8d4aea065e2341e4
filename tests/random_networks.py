"""Networks in which every parameter takes part."""

from torch import nn


def randomise(module: nn.Module) -> None:
    """Give every parameter a random value, gains, biases and layers that start at zero too."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
