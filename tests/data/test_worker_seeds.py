"""Workers draw numbers of their own on every rank, and the same ones in a run with the same seed."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import parwrap


class Noise(Dataset):
    """What a worker draws for a sample, from each of the streams, and which one it is."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        worker = get_worker_info()
        return worker.id, [worker.seed, torch.randint(2**60, ()).item(), np.random.randint(2**60), random.getrandbits(60)]


def drawn(**options):
    """What each worker of this rank draws, by worker, in two epochs."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=2, collate_fn=list, **options)
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
    values = {"persistent_workers": True, "generator": torch.Generator().manual_seed(1)}
    runs = []
    for _ in range(2):
        options = {option: torch.Generator().manual_seed(1) if option == "generator" else values[option]} if option else {}
        runs.append(parwrap.distributed(batch=batch, seed=7)(drawn)(**options))
    everyones = [(rank, worker, numbers) for rank, each in enumerate(parwrap.gather(runs[0])) for worker, numbers in each]
    passes = 1 if option == "persistent_workers" else 2

    assert runs[0] == runs[1]
    assert 4 == len({(rank, worker) for rank, worker, _ in everyones})
    assert 4 * passes == len({numbers[0] for _, _, numbers in everyones})
    for stream in (1, 2, 3):
        assert len(everyones) == len({numbers[stream] for _, _, numbers in everyones})
