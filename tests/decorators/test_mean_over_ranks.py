"""``mean_over_ranks``: gradients of the mean over all tokens, against one process that has all of them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)]
COUNTS = [[5, 2, 9], [1, 0, 4], [3, 8, 1], [7, 7, 0]]
"""Tokens of three ranks in each of four batches."""


def tokens(batch, rank):
    return torch.randn(COUNTS[batch][rank], 4, generator=torch.Generator().manual_seed(10 * batch + rank), dtype=torch.float64)


def weight():
    return nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))


def losses(w, x):
    return ((x @ w).tanh() - 0.5) ** 2


def stepped(batches):
    """The weight after a step for each of ``batches``, lists of the tokens of one step, in one process."""
    w = weight()
    for batch in batches:
        x = torch.cat(batch)
        (gradient,) = torch.autograd.grad(losses(w, x).mean(), w)
        w = nn.Parameter(w.detach() - 0.5 * gradient)
    return w


def train(batches=range(4)):
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for batch in batches:
        each = losses(w, tokens(batch, parwrap.rank()))
        optimizer.zero_grad()
        parwrap.mean_over_ranks(each.sum(), each.numel()).backward()
        optimizer.step()
    return w


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_hold_different_numbers_of_tokens(size):
    expected = stepped([[tokens(batch, rank) for rank in range(size)] for batch in (0, 2, 3)])

    assert (expected - parwrap.distributed(train)([0, 2, 3])).abs().max() < 1e-12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_split_batches_have_weights_of_their_own(loss):
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    @parwrap.distributed(batch="global", loss=loss)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for (batch,) in DataLoader(TensorDataset(x), batch_size=5):
            each = losses(w, batch)
            optimizer.zero_grad()
            parwrap.mean_over_ranks(each.sum(), each.numel()).backward()
            optimizer.step()
        return w

    assert (stepped([[x[:5]], [x[5:]]]) - train()).abs().max() < 1e-12


def test_nothing_counted_is_no_loss():
    total = torch.ones(1, requires_grad=True).sum() * 0
    parwrap.mean_over_ranks(total, 0).backward()

    assert 2.0 == parwrap.mean_over_ranks(torch.tensor(6.0), torch.tensor(3)).item()
    assert 0.0 == parwrap.mean_over_ranks(total, 0).item()


NO_COUNT = "is not the number of tokens or samples whose losses are in loss_sum. Pass a finite number that is 0 or more."


@pytest.mark.parametrize(
    ("loss_sum", "count", "text"),
    [
        (3.0, 1, "mean_over_ranks takes the sum of this rank's losses, a tensor with one element, not float."),
        (torch.ones(2), 2, "mean_over_ranks takes the sum of this rank's losses, a tensor with one element, not one of shape [2]."),
        (torch.ones(()), -1, f"mean_over_ranks: count=-1 {NO_COUNT}"),
        (torch.ones(()), float("nan"), f"mean_over_ranks: count=nan {NO_COUNT}"),
    ],
)
def test_bad_input(loss_sum, count, text):
    with pytest.raises(UsageError) as refusal:
        parwrap.mean_over_ranks(loss_sum, count)

    assert text == str(refusal.value)
