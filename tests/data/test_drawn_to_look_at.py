"""What is evaluated in the midst of a training pass are the same samples on all ranks, also where a script draws them there."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset, random_split

import parwrap
from trained_on import Setup

DRAWS = {
    "permutation": lambda data: DataLoader(Subset(data, torch.randperm(30)[:6].tolist()), batch_size=3),
    "tensor": lambda data: DataLoader(Subset(data, torch.randperm(30)[:6]), batch_size=3),
    "split": lambda data: DataLoader(random_split(data, [6, 24])[0], batch_size=3),
    "sampler": lambda data: DataLoader(data, batch_size=3, sampler=SubsetRandomSampler(np.random.choice(30, 6, replace=False).tolist())),
    "another length": lambda data: DataLoader(Subset(data, torch.rand(30).gt(0.6).nonzero().flatten().tolist()), batch_size=3),
    "workers": lambda data: DataLoader(Subset(data, torch.randperm(30)[:6].tolist()), batch_size=3, num_workers=1),
    "shuffled": lambda data: DataLoader(data, batch_size=3, shuffle=True),
}


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_samples_drawn_in_a_training_pass_to_be_evaluated_are_the_same_on_all_ranks(size):
    with parwrap.distributed(seed=1):
        setup, evaluated = Setup(), TensorDataset(torch.arange(30.0))
        for name, draw in DRAWS.items():
            seen = []
            for step, batch in enumerate(DataLoader(range(24), batch_size=2, shuffle=True)):
                setup.step(batch)
                if step % 2:
                    loader = draw(evaluated)
                    with torch.no_grad():
                        seen.append([x.tolist() for (x,) in loader])

            assert [seen] * size == parwrap.gather(seen), name
            assert 1 < len({str(each) for each in seen}), name


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*ran fewer batches")
def test_a_rank_that_leaves_the_pass_lets_the_others_evaluate():
    with parwrap.distributed(seed=1):
        setup, evaluated = Setup(), TensorDataset(torch.arange(30.0))
        for step, batch in enumerate(DataLoader(range(24), batch_size=2, shuffle=True)):
            if parwrap.rank() == 1 and step == 3:
                break
            setup.step(batch)
            if step % 2:
                with torch.no_grad():
                    assert 6 == sum(len(x) for (x,) in DRAWS["permutation"](evaluated))
        parwrap.barrier()
