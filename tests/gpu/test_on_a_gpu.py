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
from torch.utils.data import DataLoader

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


def of_all_ranks(draw):
    """What each rank draws, in one tensor."""
    drawn = [torch.empty_like(draw) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, draw)
    return torch.stack(drawn).cpu()


@pytest.mark.skipif(DEVICE == "cpu", reason="the loader draws on the CPU's stream too")
@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_ranks_draw_the_same_outside_training_passes_and_each_its_own_inside():
    @parwrap.distributed
    def train():
        torch.manual_seed(5)
        model = nn.Linear(4, 1).to(DEVICE)
        torch.optim.SGD(model.parameters(), lr=0.1)
        before = torch.rand(8, device=DEVICE)
        inside = []
        for x in DataLoader(torch.ones(8, 4), batch_size=2):
            inside.append(torch.rand(8, device=DEVICE))
            model(x.to(DEVICE)).sum().backward()
        after = torch.rand(8, device=DEVICE)
        return [of_all_ranks(drawn) for drawn in (before, *inside, after)]

    before, *inside, after = train()
    shared = torch.Generator(DEVICE).manual_seed(5)
    own = [torch.Generator(DEVICE).manual_seed(5 + rank) for rank in range(2)]

    for drawn in (before, after):
        assert torch.equal(drawn, torch.rand(8, generator=shared, device=DEVICE).cpu().expand(2, 8))
    for drawn in inside:
        assert torch.equal(drawn, torch.stack([torch.rand(8, generator=each, device=DEVICE).cpu() for each in own]))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs are for GPUs")
@pytest.mark.ranks(2, timeout=240, fresh=True)
def test_a_replayed_cuda_graph_draws_other_dropout_in_each_step_and_on_each_rank():
    @parwrap.distributed
    def train():
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(DEVICE)
        nn.init.zeros_(model[0].weight), nn.init.ones_(model[0].bias)
        compiled = torch.compile(model, mode="reduce-overhead")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kept = []
        for _ in range(2):
            for x in DataLoader(torch.ones(32, 64), batch_size=2):
                optimizer.zero_grad()
                y = compiled(x.to(DEVICE))
                y.sum().backward()
                kept.append(y.detach().clone())
                optimizer.step()
            with torch.no_grad():
                compiled(torch.ones(2, 64, device=DEVICE))
        return torch.stack([of_all_ranks(y) for y in kept])

    drawn = train().flatten(0, 1)  # of 8 batches a rank and epoch
    assert 2 * 2 * 8 == len(drawn) == len({tuple(y.flatten().tolist()) for y in drawn})
    assert {0.0, 2.0} == set(drawn.flatten().tolist())


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
