"""What is said when ranks train in different steps of a pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import LockstepError


def stops_early(rank):
    """Rank ``rank`` leaves its first pass after a batch, and trains on in its second one."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 2)), 2)
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if parwrap.rank() == rank:
                break


@pytest.mark.ranks(2, fresh=True)
def test_the_error_says_in_which_backward_of_a_pass_each_of_two_ranks_is():
    own, others = [(2, 1), (1, 2)][parwrap.rank()]
    here = rf"rank {parwrap.rank()} is in backward {own} of its pass over the loader at test_same_step\.py:\d+"
    said = rf"different steps \({here}, the other rank in backward {others}\):"
    with pytest.raises(LockstepError, match=said):
        parwrap.distributed(stops_early)(1)


@pytest.mark.ranks(3, fresh=True)
def test_of_more_ranks_it_says_the_average():
    own = [2, 2, 1][parwrap.rank()]
    said = rf"rank {parwrap.rank()} is in backward {own} of its pass .*, the ranks on average in backward 1\.667\)"
    with pytest.raises(LockstepError, match=said):
        parwrap.distributed(stops_early)(2)
