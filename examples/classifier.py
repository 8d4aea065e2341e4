"""A plain torchvision classifier, measured by the lab: ddpm-lab run amp --workload examples.classifier:make."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from torchvision import datasets, models, transforms

from ddpm_lab.workload import Training

SHAPE, CLASSES = (3, 32, 32), 10


def loss(model: Any, batch: Any) -> Tensor:
    """Mean loss of a batch, which lies on the device of the model."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def make() -> Training:
    """Yours would read files: datasets.CIFAR10(folder, transform=transforms.ToTensor())."""
    model = models.resnet18(num_classes=CLASSES)
    train = datasets.FakeData(5_000, SHAPE, CLASSES, transforms.ToTensor())
    kept = datasets.FakeData(200, SHAPE, CLASSES, transforms.ToTensor(), random_offset=5_000)
    images, labels = default_collate([kept[i] for i in range(len(kept))])

    def held_out_loss(model: Any) -> Tensor:
        device = next(model.parameters()).device
        return loss(model, (images.to(device), labels.to(device)))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Training(model=model, data=train, loss=loss, optimizer=optimizer, held_out_loss=held_out_loss)
