"""Two ranks that share one GPU over gloo, beside hand-written DDP. ``PARWRAP_TEST_DEVICE=cpu`` runs them on CPUs, to try these tests."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import parwrap
from parwrap.errors import UsageError

DEVICE = os.environ.get("PARWRAP_TEST_DEVICE", "cuda")
STEPS = 12
SETTLED = 36
"""Steps after which nothing is new; weights are compared after the 32nd."""

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def build():
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)]
    return nn.Sequential(*layers).to(DEVICE)


def batches(number=STEPS):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(number):
        yield torch.randn(8, 3, 8, 8, generator=generator).to(DEVICE), torch.randint(4, (8,), generator=generator).to(DEVICE)


def trained(model, forward):
    """The weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_weights_are_bit_for_bit_those_of_ddp_by_hand():
    model = build()
    expected = trained(model, DistributedDataParallel(model))
    model = build()
    actual = parwrap.distributed(trained)(model, model)

    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_sparse_gradients_are_averaged():
    @parwrap.distributed
    def train():
        words = nn.Embedding(4, 2, sparse=True).to(DEVICE)
        optimizer = torch.optim.SGD(words.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            words(torch.tensor([parwrap.rank()], device=DEVICE)).sum().backward()
            optimizer.step()
        return words.weight.grad.to_dense().tolist()

    assert [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]] == train()


class Checkpointed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[1:](checkpoint(self.layers[0], x.requires_grad_(), use_reentrant=True))


@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_autograds_own_thread_runs_a_backward_inside_a_backward():
    expected = parwrap.distributed(trained)(model := build(), model)
    model = Checkpointed(build())
    actual = parwrap.distributed(trained)(model, model)

    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_a_step_in_autograds_own_thread_is_refused():
    with parwrap.distributed():
        weight = nn.Parameter(torch.ones(3, device=DEVICE))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(UsageError, match="steps inside a backward"):
            (weight * (1.0 + parwrap.rank())).sum().backward()


@contextmanager
def synchronizations():
    """The places at which the host waits for the GPU while the block runs."""
    places = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places += [f"{each.filename}:{each.lineno}" for each in said if "synchroniz" in str(each.message)]


@pytest.mark.skipif(DEVICE == "cpu", reason="only GPUs are waited for")
@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_a_regular_step_waits_for_nothing():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with ExitStack() as watched:
            for number, (x, y) in enumerate(list(batches(SETTLED + 8))):
                if number == SETTLED:
                    places = watched.enter_context(synchronizations())
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return places

    assert [] == parwrap.distributed(train)()
