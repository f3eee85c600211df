"""Compiled models under ``sync_bn``, against one process that has the whole batch."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from parwrap.batch_norm.compiled_norm import scopes
from parwrap.errors import UsageError
from parwrap.group.group import alone

SHAPES = {nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4, 3, 3), nn.BatchNorm3d: (4, 2, 2, 2)}


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
    """What steps on ``batches`` leave: outputs, and gradients of inputs and weights, summed over the ranks, and the buffers."""
    found = []
    for x in batches:
        x.requires_grad_()
        net.zero_grad()
        out = forward(x)
        out.pow(3).sum().backward()
        found.append((out.detach(), x.grad, [p.grad.clone() for p in net.parameters()]))
    return found, [buffer.clone() for buffer in net.buffers()]


def differences(compiled, kind=nn.BatchNorm1d, sizes=((4, 4),) * 3, **options):
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


def in_place(net):
    net.compile(backend="aot_eager")
    return net


def by_aot(**options):
    return lambda net: torch.compile(net, backend="aot_eager", **options)


COMPILED = {
    "inductor": (lambda net: torch.compile(net, fullgraph=True), {}),
    "eager": (lambda net: torch.compile(net, backend="eager"), {}),
    "in place": (in_place, {}),
    "2d": (by_aot(fullgraph=True), {"kind": nn.BatchNorm2d}),
    "3d": (by_aot(fullgraph=True), {"kind": nn.BatchNorm3d}),
    "dynamic": (by_aot(dynamic=True), {"sizes": ((4, 4), (3, 4), (2, 5), (0, 4))}),
    "other sizes": (by_aot(), {"sizes": ((4, 4), (3, 4), (2, 5))}),
    "cumulative": (by_aot(), {"momentum": None}),
    "no weights": (by_aot(), {"affine": False}),
    "no statistics": (by_aot(), {"track_running_stats": False}),
    "neither": (by_aot(), {"affine": False, "track_running_stats": False}),
}


TWINS = ("inductor", "3d", "other sizes", "neither")


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("how", [pytest.param(each, marks=[pytest.mark.slow] * (each in TWINS)) for each in COMPILED])
def test_a_compiled_model_has_the_numbers_of_one_process(how):
    compiled, options = COMPILED[how]

    assert differences(compiled, **options) < 1e-9


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_step_shares():
    def compiled(net):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x):
            return net(x)

        return step

    assert differences(compiled) < 1e-9


@pytest.mark.ranks(2, timeout=120)
def test_a_name_that_a_module_has_imported_is_compiled_as_shared_too():
    running = torch.zeros(1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def normalize(x):
        return F.batch_norm(x, running, torch.ones(1), training=True, momentum=1.0)

    with parwrap.sync_bn():
        normalize(torch.full((2, 1), float(parwrap.rank())))

    assert 0.5 == running.item()


def compiled_mean():
    """A function that gives the running mean after a compiled forward of ranks."""
    norm = nn.BatchNorm1d(1, momentum=1.0)
    compiled = torch.compile(norm, backend="aot_eager")

    def mean():
        compiled(torch.full((2, 1), float(parwrap.rank())))
        return norm.running_mean.item()

    return mean, norm


@pytest.mark.ranks(2, timeout=120)
def test_what_was_compiled_elsewhere_is_compiled_again_once():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    mean, _ = compiled_mean()
    rank = float(parwrap.rank())
    for _ in range(10):
        assert rank == mean()
        with parwrap.sync_bn():
            assert 0.5 == mean()
            with parwrap.sync_bn(group_size=1):
                assert rank == mean()
    assert rank == mean()

    assert 2 == counters["stats"]["unique_graphs"]


@pytest.mark.ranks(2, timeout=120)
def test_compiled_forwards_in_eval_mode_and_on_what_one_rank_alone_runs_do_not_share():
    mean, norm = compiled_mean()
    with parwrap.sync_bn():
        mean()
        norm.eval()
        assert 0.5 == mean()
        norm.train()
        with alone():
            assert float(parwrap.rank()) == mean()


@pytest.mark.ranks(4, timeout=180)
def test_compiled_groups_share_within_themselves():
    mean, _ = compiled_mean()
    with parwrap.sync_bn(group_size=2):
        assert [0.5, 0.5, 2.5, 2.5] == parwrap.gather(mean())


@pytest.mark.ranks(2, timeout=120)
def test_compiled_half_precision_shares():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=1.0))
    x = torch.randn(8, 3)
    expected = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        expected(x)
        with parwrap.sync_bn():
            torch.compile(net, backend="aot_eager", fullgraph=True)(x.chunk(2)[parwrap.rank()]).sum().backward()

    assert (net[1].running_var - expected[1].running_var).abs().max() < 1e-5


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_backward_may_come_after_the_scope():
    net = Net()
    with parwrap.sync_bn():
        out = torch.compile(net, backend="aot_eager")(torch.randn(4, 4, dtype=torch.float64))
    out.sum().backward()

    assert net.scale.grad is not None


def warnings_in_backwards(make, x=(4, 2)):
    torch.manual_seed(0)
    with parwrap.sync_bn(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward = make()
        for _ in range(2):
            forward(torch.randn(*x).requires_grad_()).sum().backward()
    return len([each for each in caught if "goes through a batch norm that used only this rank's part of the batch" in str(each.message)])


OUT_OF_REACH = {
    "scripted": lambda: torch.jit.script(nn.BatchNorm1d(2)),
    "traced": lambda: torch.jit.trace(nn.BatchNorm1d(2), torch.randn(4, 2), check_trace=False),
    "called directly": lambda: lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
}
WITHIN = {
    "shared": lambda: nn.BatchNorm1d(2),
    "in eval mode": lambda: torch.jit.script(nn.BatchNorm1d(2).eval()),
    "groups": lambda: nn.Sequential(nn.Unflatten(1, (2, 1)), nn.GroupNorm(1, 2)),
    "instances": lambda: nn.Sequential(nn.Unflatten(0, (2, 2)), nn.InstanceNorm1d(2)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", OUT_OF_REACH)
def test_batch_norms_out_of_reach_are_said_to_be_of_one_rank(kind):
    assert 1 == warnings_in_backwards(OUT_OF_REACH[kind])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", WITHIN)
def test_others_are_not(kind):
    assert 0 == warnings_in_backwards(WITHIN[kind])


class Alone:
    """The exchange of a rank that shares with no other, a new one for each scope."""

    def gathered(self, numbers):
        return numbers.view(1, -1)

    def summed(self, numbers):
        return numbers


def forward_of(x):
    """The output, and the number of the exchange that the backward will ask for."""
    out, *_, facts = torch.ops.parwrap.batch_norm(x, None, None, None, None, 0.1, 1e-5)
    return out, facts[1].item()


def test_a_backward_never_finds_the_exchange_of_a_later_scope():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for _ in range(100):
        with scopes.opened(lambda _, own=Alone(): own, shared=True):  # noqa: B008 - a new one each time
            found.append(forward_of(x))

    assert 100 == len({number for _, number in found})
    found[-1][0].square().sum().backward()
    with pytest.raises(UsageError, match=r"runs after parwrap\.sync_bn has ended"):
        found[0][0].square().sum().backward()


def test_two_models_in_two_threads_each_have_their_own_exchange():
    own = {2: Alone(), 3: Alone()}
    found = []

    def train(channels):
        x = torch.randn(4, channels, dtype=torch.float64, requires_grad=True)
        for _ in range(50):
            out, number = forward_of(x)
            found.append(scopes.used(number) is own[channels])
            out.square().sum().backward()

    with scopes.opened(lambda call: own[call.input.size(1)], shared=True):
        threads = [threading.Thread(target=train, args=(channels,)) for channels in own]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [True] * 100 == found
