"""Trainings of users, written to a folder as they would write them."""

from pathlib import Path

TRAINING = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ddpm_lab.workload import Training


class Net(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.last = nn.Linear(width, 10)

    def forward(self, images):
        return self.last(torch.relu(self.first(images)).mean((2, 3)))


def data():
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (64,), generator=draw)
    images = torch.randn(64, 3, 8, 8, generator=draw) + labels[:, None, None, None] / 5
    return TensorDataset(images, labels)


def loss(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


def make():
    model = Net()
    held_out = data()[:16]
    return Training(
        model=model,
        data=data(),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        held_out_loss=lambda model: loss(model, held_out),
    )
"""


def write(folder: Path, more: str = "", *, name: str = "mine", width: int = 8) -> Path:
    """A module with the function ``make``, and ``more`` beside it."""
    file = folder / f"{name}.py"
    file.write_text(TRAINING.replace("{width}", str(width)) + more)
    return file


def line_of(file: Path, text: str) -> int:
    """The number of the first line that holds a text."""
    return next(i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)
