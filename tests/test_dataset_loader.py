"""Batches of any dataset: as listed, collated as asked, in processes that end."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.utils.data import Dataset

from ddpm_lab.data.dataset_loader import DatasetLoader


class Squares(Dataset[torch.Tensor]):
    """Sample i is i squared, and a number that its process draws."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index**2), float(torch.rand(()))])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_as_they_are_listed(workers: int) -> None:
    listed = [[3, 1], [2, 2], [0, 5], [4, 4]]
    with closing(DatasetLoader(Squares(), listed, workers=workers)) as loader:
        assert loader.live_workers() == workers
        assert loader.prefetch_batches == 2 * workers
        found = list(loader)
    assert [batch[:, 0].tolist() for batch in found] == [[float(i * i) for i in batch] for batch in listed]
    assert loader.live_workers() == 0


def test_samples_are_collated_as_asked() -> None:
    with closing(DatasetLoader(Squares(), [[1, 2, 3]], workers=1, collate=len)) as loader:
        assert next(loader) == 3


def test_workers_draw_by_the_seed_and_a_loader_draws_nothing_from_the_run() -> None:
    def drawn(seed: int) -> float:
        with closing(DatasetLoader(Squares(), [[1]], workers=1, seed=seed)) as loader:
            return float(next(loader)[0, 1])

    state = torch.get_rng_state()
    assert drawn(0) == drawn(0) != drawn(1)
    assert torch.equal(torch.get_rng_state(), state)
