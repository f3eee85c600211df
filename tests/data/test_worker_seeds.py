"""Workers draw numbers of their own on every rank, and the same ones in a run with the same seed."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import parwrap


class Noise(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return noise()


class NoiseStream(IterableDataset):
    def __init__(self, sharding):
        self.sharding = sharding

    def __iter__(self):
        if self.sharding:
            get_worker_info().num_workers  # noqa: B018
        return (noise() for _ in range(16))


def noise():
    """What a worker draws for a sample, from each of the streams, and its seed."""
    return [torch.initial_seed(), torch.randint(2**60, ()).item(), np.random.randint(2**60), random.getrandbits(60)]


def drawn(dataset, **options):
    """What the workers of this rank draw in two epochs."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list, **options)
    seen = []
    for _ in range(2):
        for batch in loader:
            seen += batch
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
@pytest.mark.parametrize("option", ["", "persistent_workers", "generator"])
def test_no_two_workers_draw_the_same_and_a_second_run_draws_it_again(batch, option):
    runs = []
    for _ in range(2):
        options = {"": {}, "persistent_workers": {option: True}, "generator": {option: torch.Generator().manual_seed(1)}}[option]
        runs.append(parwrap.distributed(batch=batch, seed=7)(drawn)(Noise(), shuffle=True, **options))
    everyones = [numbers for each in parwrap.gather(runs[0]) for numbers in each]
    passes = 1 if option == "persistent_workers" else 2

    assert runs[0] == runs[1]
    assert 4 * passes == len({numbers[0] for numbers in everyones})
    for stream in (1, 2, 3):
        assert len(everyones) == len({numbers[stream] for numbers in everyones})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharding", [False, True])
def test_so_it_is_for_streams_but_that_ranks_that_read_the_same_samples_draw_the_same_for_them(sharding):
    runs = [parwrap.distributed(seed=7)(drawn)(NoiseStream(sharding)) for _ in range(2)]
    everyones = [numbers for each in parwrap.gather(runs[0]) for numbers in each]

    assert runs[0] == runs[1]
    assert (8 if sharding else 4) == len({numbers[0] for numbers in everyones})
    for stream in (1, 2, 3):
        assert len(everyones) == len({numbers[stream] for numbers in everyones})
