"""Whether a call may be cut into parts, module by module."""

import functools
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parwrap.strategies.data_parallel.batch_split_check import Untried, why_not_in_parts
from parwrap.strategies.data_parallel.scatter_gather import merged, sizes_of
from parwrap.strategies.data_parallel.sharded_outputs import in_whole

X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
WORDS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 0, 1], [2, 3, 4], [5, 6, 7]])
IMAGES = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A layer, and what is made of what it gives.

    Args:
        make: it, from the module, the layer's output and the other arguments.
    """

    def __init__(self, make=lambda net, out: out):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 3), make

    def forward(self, x, *others):
        return self.make(self, self.layer(x), *others)


class Words(nn.Module):
    """A model of words, by default one that takes ``[words, batch]``."""

    def __init__(self, **options):
        super().__init__()
        self.words, self.memory = nn.Embedding(8, 2), nn.LSTM(2, 3, 2, dropout=0.5, **options)

    def forward(self, words):
        return self.memory(self.words(words))[0]


def reason(module, *given, loss=None, merge=None):
    sizes = sizes_of(len(given[0]), 2)
    weights = {"mean": [size / sum(sizes) for size in sizes], "sum": [1.0, 1.0], None: None}[loss]
    merge = merge or functools.partial(merged, sizes=sizes, weights=weights, join=in_whole, who="Net")
    return why_not_in_parts(module, (given, {}), sizes, merge, loss)


def drop_layer(net, out):
    return out if random.random() < 0.5 else out * np.random.rand()


def drop_path(net, out):
    return out * (0.8 + torch.rand(len(out), 1)).floor_()


def forces(net, out):
    x = torch.ones(len(out), 4).requires_grad_()
    (grad,) = torch.autograd.grad(net.layer(x).sum(), x, create_graph=True)
    return out, grad


def attend(net, out):
    return F.scaled_dot_product_attention(*[out[:, None]] * 3, dropout_p=0.5)


PARTS = {
    "layer": (Net(), X),
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.AlphaDropout(), nn.Dropout1d()), X),
    "noise": (Net(lambda net, out: out + torch.randn_like(out)), X),
    "gumbel": (Net(lambda net, out: F.gumbel_softmax(out)), X),
    "drop path": (Net(drop_path), X),
    "layer drop": (Net(drop_layer), X),
    "attention with dropout": (Net(attend), X),
    "encoder": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), IMAGES),
    "recurrent": (Words(batch_first=True), WORDS),
    "batch norm": (nn.Sequential(nn.Conv1d(4, 2, 1), nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)), IMAGES),
    "batch norm without statistics": (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)).double(), X.double()),
    "a backward inside": (Net(forces), X),
    "a constant": (Net(lambda net, out: (out, 3, 2.5, True, "name", None, net.layer.weight.sum())), X),
    "infinite": (Net(lambda net, out: out.masked_fill(torch.tensor([False, True, False]), float("-inf"))), X),
    "a table made at first": (Net(lambda net, out: setattr(net, "table", torch.arange(3)) or out + net.table), X),
    "labels": (Net(lambda net, out, y: F.cross_entropy(out, y, reduction="none")), X, Y),
    "half": (nn.Linear(4, 3).bfloat16(), X.bfloat16()),
}


@pytest.mark.parametrize("name", PARTS)
def test_modules_whose_parts_give_what_the_whole_does(name):
    assert reason(*PARTS[name]) is None


MIXED = "its outputs for parts of the batch differ from those for the whole batch: it mixes samples, or the first dimension of "
NUMBER = (
    "it returns a number for the whole batch, such as a loss or a count. If it is a loss that is always the mean or the sum over the "
    "samples"
)
PARTED = "its outputs for parts of the batch cannot be combined (Net returned "
LEFT = "it changes {}, and changes it differently for a part of the batch"


def leaves(net, out):
    net.kept = out.mean()
    return out


def queues(net, out):
    net.queue.append(len(out))
    return out


class Changes(Net):
    def forward(self, x):
        return super().forward(x.add_(1))


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 2, max_norm=0.1)

    def forward(self, words):
        return self.words(words)


def with_queue():
    net = Net(queues)
    net.queue = deque()
    return net


class Named(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = len(self["out"])


WHOLE = {
    "sequence first": (nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8), 1, enable_nested_tensor=False), IMAGES, MIXED),
    "recurrent": (Words(), WORDS, MIXED),
    "hidden states": (nn.GRU(6, 2, 2, batch_first=True), IMAGES[:4], MIXED),
    "centred": (Net(lambda net, out: out - out.mean(0)), X, MIXED),
    "similarities": (Net(lambda net, out: out @ out.T), X[:4], MIXED),
    "mixup": (Net(lambda net, out: out + out[torch.randperm(len(out))]), X, MIXED),
    "list of samples": (Net(lambda net, out, *others: torch.stack([each.mean() for each in others])), X[:2], *IMAGES[:, :2], MIXED),
    "unequal beyond the first": (
        Net(lambda net, out: out[:, : len(out)]),
        X,
        PARTED + "tensors of shape [3, 3] and [2, 2] f",
    ),
    "other structure": (
        Net(lambda net, out: [out] * len(out)),
        X,
        PARTED + "outputs of different struct",
    ),
    "a class of its own": (Net(lambda net, out: Named(out=out)), X, None),
    "text": (
        Net(lambda net, out: str(out.sum().item())),
        X,
        PARTED + "a str that differs betw",
    ),
    "unbatched": (
        nn.Conv1d(4, 2, 1),
        X[:4],
        "it fails on a part of the batch (RuntimeError: Given groups=1, weight of size [2, 4, 1],",
    ),
    "loss": (Net(lambda net, out, y: F.cross_entropy(out, y)), X, Y, NUMBER),
    "loss of nothing": (Net(lambda net, out: {"loss": out.sum() * 0}), X, NUMBER),
    "count": (Net(lambda net, out: (out, (out == out).all(1).sum())), X[:4], NUMBER),
    "length": (Net(lambda net, out: (out, len(out))), X[:4], NUMBER),
    "attribute": (Net(leaves), X, LEFT.format("kept")),
    "queue": (with_queue(), X, LEFT.format("queue")),
    "weights": (Embeds(), torch.arange(8), LEFT.format("words.weight")),
    "input": (Changes(), X, "it changes its input in place, but each part of the batch is a copy"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_modules_whose_parts_do_not_and_why(name):
    module, *given, expected = WHOLE[name]
    found = reason(module, *given)

    assert found is None if expected is None else found.startswith(expected)


@pytest.mark.parametrize(
    ("make", "loss", "expected"),
    [
        (torch.mean, "mean", None),
        (torch.sum, "sum", None),
        (torch.zeros_like, "mean", None),
        (torch.sum, "mean", "a number that it returns for the whole batch is not the mean over the samples, although loss='mean' says so"),
        (torch.max, "sum", "a number that it returns for the whole batch is not the sum over the samples, although loss='sum' says so"),
    ],
)
def test_what_a_loss_is_said_to_be_is_looked_at(make, loss, expected):
    module = Net(lambda net, out: {"loss": make(out.square().mean(1)).sum()})
    if expected is None:
        assert reason(module, X, loss=loss) is None
    else:
        assert expected == reason(module, X, loss=loss)


def test_nothing_of_a_trial_stays():
    net = with_queue()
    net.norm, net.log = nn.BatchNorm1d(3), []
    net.make = lambda net, out: (net.log.append(1), queues(net, net.norm(out)), torch.rand(1), random.random(), np.random.rand())[1]
    before = {name: each.clone() for name, each in net.state_dict().items()}
    x = X.clone()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    reason(net, x)

    assert (deque(), []) == (net.queue, net.log)
    assert all(torch.equal(before[name], each) for name, each in net.state_dict().items())
    assert torch.equal(X, x)
    assert net.training
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.rand(2).unique().numel() == 2


def test_a_batch_that_fails_as_a_whole_tells_nothing_of_parts():
    found = reason(nn.Linear(3, 3), X)

    assert isinstance(found, Untried)
    assert found.startswith("it cannot be checked on a copy (RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x4 and 3x3))")


def test_a_batch_that_does_not_fit_is_left_to_the_caller():
    def too_large(net, out):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        reason(Net(too_large), X)
