"""What comes back from ranks that a call has launched is what the function has made of it, and what others hold stays theirs."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import parwrap
from parwrap.system.remote_exception import RemoteTraceback


@dataclass(frozen=True)
class Diverged(Exception):
    step: int


class Detailed(Exception):
    def __init__(self, text, *, detail):
        super().__init__(text)


def raises(error):
    raise error


@pytest.mark.parametrize(
    "error",
    [Diverged(3), Detailed("often", detail="or not"), TimeoutError("late"), ModuleNotFoundError("no module", name="none")],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_classes_that_cannot_be_built_again_are_themselves(error):
    with pytest.raises(type(error)) as raised:
        parwrap.launch(raises, error, nprocs=2)

    assert error.args == raised.value.args
    assert isinstance(raised.value.__cause__, RemoteTraceback)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_members_of_a_group_of_errors_are_themselves():
    group = ExceptionGroup("several", [Diverged(3), ExceptionGroup("inner", [Detailed("often", detail=lambda: "or not")])])  # noqa: F821

    with pytest.raises(type(group), match="several") as raised:
        parwrap.launch(raises, group, nprocs=2)

    assert repr(group.exceptions) == repr(raised.value.exceptions)
    assert [Detailed] == [type(each) for each in raised.value.exceptions[1].exceptions]
    assert len(raised.value.split(Diverged)) == 2


def test_an_error_that_cannot_be_had_again_is_its_nearest_base_with_its_traceback():
    class Never(ValueError):
        def __new__(cls, *args):
            if args != ("here",):
                raise TypeError("only here")
            return super().__new__(cls, *args)

        def __reduce__(self):
            return raises, (TypeError("never"),)

        args = property(lambda self: ())

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parwrap.launch(lambda: raises(Never("here")), nprocs=2)

    assert "Never" in str(raised.value.__cause__)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_is_returned_is_as_the_function_has_left_it(start_method):
    """Also where nothing tells of the change."""
    by_numpy, by_data, sparse = torch.zeros(3), torch.zeros(3), torch.eye(2).to_sparse()
    with torch.inference_mode():
        inferred = torch.zeros(3)
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def change():
        by_numpy.numpy()[:] = 1
        by_data.data.fill_(2)
        sparse.mul_(5)
        with torch.inference_mode():
            inferred.add_(3)
        model[0].best, optimizer.param_groups[0]["lr"] = 0.9, 7.0
        return by_numpy, by_data, sparse, inferred, model, optimizer

    one, two, five, three, *rest = parwrap.launch(change, nprocs=2, start_method=start_method)

    assert ([1.0] * 3, [2.0] * 3, [3.0] * 3) == (one.tolist(), two.tolist(), three.tolist())
    assert [[5.0, 0.0], [0.0, 5.0]] == five.to_dense().tolist()
    assert all(mine is back for mine, back in zip((by_numpy, by_data, model, optimizer), (one, two, *rest), strict=True))
    assert (0.9, 7.0) == (model[0].best, optimizer.param_groups[0]["lr"])


def test_what_is_frozen_and_what_is_tied_in_a_rank_is_so_in_the_caller():
    frozen, thawed = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
    first, tied, turned, one, other = (nn.Parameter(torch.rand(2, 2)) for _ in range(5))
    apart = [nn.Parameter(torch.rand(2, 2)) for _ in range(2)]
    left, before = tied.detach(), tied.tolist()

    def change():
        frozen.requires_grad_(False)
        thawed.bias.requires_grad_(True)
        tied.data, turned.data = first.data, first.data.t()
        one.data = other.data = torch.zeros(2, 2)
        flat = torch.zeros(8)
        apart[0].data, apart[1].data = flat[:4].view(2, 2), flat[4:].view(2, 2)
        return first, tied, turned, one, other, apart

    parwrap.launch(change, nprocs=2)
    with torch.no_grad():
        first[0, 1] = 7.0
        one[0, 0] = 8.0
        apart[0].fill_(9.0)

    assert [False] * 3 + [True] == [p.requires_grad for p in (*frozen.parameters(), *thawed.parameters())]
    assert before == left.tolist()
    assert (7.0, 7.0) == (tied[0, 1].item(), turned[1, 0].item())
    assert 8.0 == other[0, 0].item()
    assert 0.0 == apart[1].sum().item()


def test_groups_of_an_optimizer_that_something_else_holds_are_still_its_groups():
    """As a schedule of one's own holds them."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.0)
    groups, state, parameters = optimizer.param_groups, optimizer.state, optimizer.param_groups[0]["params"]

    def step():
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    for rate in (1.0, 0.1, 0.01):
        for group in groups:
            group["lr"] = rate
        parwrap.launch(step, nprocs=2)

    assert weight.item() == pytest.approx(1 - 1.11)
    assert (groups, state, parameters) == (optimizer.param_groups, optimizer.state, optimizer.param_groups[0]["params"])
    assert groups is optimizer.param_groups
    assert state is optimizer.state
    assert parameters is groups[0]["params"]


def test_rates_that_change_without_a_step_are_the_callers_too():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    by_hand = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(1.0))

    def lower():
        for group in by_hand.param_groups:
            group["lr"].fill_(0.1)
        optimizer.step()
        scheduler.step()

    parwrap.launch(lower, nprocs=2)

    assert (0.5, 1) == (optimizer.param_groups[0]["lr"], scheduler.last_epoch)
    assert by_hand.param_groups[0]["lr"].item() == pytest.approx(0.1)


def test_all_values_share_what_they_shared():
    def rows():
        table = torch.full((100, 10), float(parwrap.rank()))
        return [table, *table]

    for rank, (table, *views) in enumerate(parwrap.launch(rows, nprocs=2, returns="all")):
        table += 1

        assert [rank + 1.0] * 100 == [view[0].item() for view in views]


def test_all_values_are_of_the_classes_that_they_were():
    assert [TimeoutError] * 2 == [type(value) for value in parwrap.launch(lambda: TimeoutError(), nprocs=2, returns="all")]


def test_all_values_must_be_such_as_can_be_sent():
    with pytest.raises(parwrap.UsageError, match=r"^the result on rank \d cannot be sent to the other ranks, as returns='all'"):
        parwrap.launch(lambda: lambda: 1, nprocs=2, returns="all")


def test_an_event_loop_of_the_callers_hears_nothing_of_signals_to_ranks():
    def one_fails():
        if parwrap.rank() == 1:
            raise ValueError("one fails")
        signal.pause()

    async def serve():
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        with pytest.raises(ValueError, match="one fails"):
            await asyncio.to_thread(parwrap.launch, one_fails, nprocs=2)
        await asyncio.sleep(0.1)
        return told.is_set()

    assert not asyncio.run(serve())


def test_a_system_without_descriptors_of_processes(monkeypatch):
    def missing(process):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing, raising=False)

    assert 2 == parwrap.launch(parwrap.world_size, nprocs=2)


def test_a_tensor_that_wraps_others_is_left_alone():
    wrapping = TwoTensor(torch.ones(2), torch.ones(2))
    moved = torch.nn.Parameter(torch.ones(2))

    def change():
        moved.data = torch.zeros(2)

    parwrap.launch(change, nprocs=2)

    assert [0, 0] == moved.tolist()
    assert [1, 1] == wrapping.a.tolist()
