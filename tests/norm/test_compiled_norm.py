"""Compiled models under ``sync_bn``, against one process that has the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from parwrap.norm.compiled_norm import scopes
from parwrap.norm.exchange import Alone
from parwrap.ranks.group import alone

SHAPES = {nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4, 3, 3)}


class Net(nn.Module):
    def __init__(self, kind=nn.BatchNorm1d, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = kind(4, **options, dtype=torch.float64), kind(4, **options, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(*SHAPES[kind], dtype=torch.float64))

    def forward(self, x):
        return self.second(self.first(x * self.scale).tanh())


def cut(whole, sizes):
    return whole.split(sizes)[parwrap.rank()].clone()


def numbers(net, forward, batches):
    """What steps on ``batches`` leave: outputs, and gradients of inputs and weights, and the buffers."""
    found = []
    for x in batches:
        x.requires_grad_()
        net.zero_grad()
        out = forward(x)
        out.pow(3).sum().backward()
        found.append((out.detach(), x.grad, [p.grad.clone() for p in net.parameters()]))
    return found, [buffer.clone() for buffer in net.buffers()]


def differences(compiled, kind=nn.BatchNorm1d, sizes=((4, 4),) * 2, **options):
    """How far outputs, gradients and running statistics are off those of one process."""
    torch.manual_seed(1)
    whole = [torch.randn(sum(each), *SHAPES[kind], dtype=torch.float64) for each in sizes]
    net = Net(kind, **options)
    expected = copy.deepcopy(net)
    with alone():
        results, buffers = numbers(expected, expected, [x.clone() for x in whole])
    with parwrap.sync_bn():
        actual, own = numbers(net, compiled(net), [cut(x, each) for x, each in zip(whole, sizes, strict=True)])
    apart = [a - b for a, b in zip(own, buffers, strict=True)]
    for (out, grad, grads), (all_out, all_grad, all_grads), each in zip(actual, results, sizes, strict=True):
        apart += [out - cut(all_out, each), grad - cut(all_grad, each)]
        apart += [a - b for a, b in zip(parwrap.reduce_sum(grads), all_grads, strict=True)]
    return max(each.abs().max().item() for each in apart if each.numel())


def by_aot(**options):
    return lambda net: torch.compile(net, backend="aot_eager", **options)


COMPILED = {
    "inductor": (lambda net: torch.compile(net, fullgraph=True), {}),
    "eager": (lambda net: torch.compile(net, backend="eager"), {}),
    "2d": (by_aot(fullgraph=True), {"kind": nn.BatchNorm2d}),
    "dynamic": (by_aot(dynamic=True), {"sizes": ((4, 4), (2, 5), (0, 4))}),
    "cumulative": (by_aot(), {"momentum": None}),
    "neither": (by_aot(), {"affine": False, "track_running_stats": False}),
}


IN_ONE_GRAPH = pytest.mark.needs_torch(2, 12, why="momentum=None was not compiled in one graph before")
MARKS = {"dynamic": (), "cumulative": (pytest.mark.slow, IN_ONE_GRAPH)}


@pytest.mark.ranks(2, timeout=120, fresh=True)
@pytest.mark.parametrize("how", [pytest.param(each, marks=MARKS.get(each, pytest.mark.slow)) for each in COMPILED])
def test_a_compiled_model_has_the_numbers_of_one_process(how):
    compiled, options = COMPILED[how]

    assert differences(compiled, **options) < 1e-9


@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_what_was_compiled_elsewhere_is_compiled_again_once():
    from torch._dynamo.utils import counters

    norm = nn.BatchNorm1d(1, momentum=1.0)
    compiled = torch.compile(norm, backend="aot_eager")

    def mean():
        compiled(torch.full((2, 1), float(parwrap.rank())))
        return norm.running_mean.item()

    counters.clear()
    rank = float(parwrap.rank())
    for _ in range(3):
        assert rank == mean()
        with parwrap.sync_bn():
            assert 0.5 == mean()
            with parwrap.sync_bn(group_size=1):
                assert rank == mean()
            with alone():
                assert rank == mean()

    assert 2 == counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=120, fresh=True)
def test_a_name_that_a_module_has_imported_is_compiled_as_shared_too():
    running = torch.zeros(1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def normalize(x):
        return F.batch_norm(x, running, torch.ones(1), training=True, momentum=1.0)

    with parwrap.sync_bn():
        normalize(torch.full((2, 1), float(parwrap.rank())))

    assert 0.5 == running.item()


def forward_of(x):
    """The output, and the number of the exchange that the backward asks for."""
    out, *_, facts = torch.ops.parwrap.batch_norm(x, None, None, None, None, 0.1, 1e-5)
    return out, facts[1].item()


def test_a_backward_never_finds_the_exchange_of_a_later_scope():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(3):
        with scopes.opened(lambda _, own=Alone(): own, shared=True):  # noqa: B008 - a new one each time
            found.append(forward_of(x))

    assert 3 == len({number for _, number in found})
    found[-1][0].square().sum().backward()
    with pytest.raises(parwrap.UsageError, match=r"runs after parwrap\.sync_bn has ended"):
        found[0][0].square().sum().backward()
