"""A regular step never has the host wait for a GPU; the CPU stands for the GPU: a mock."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from operator import methodcaller

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from lagging_backend import Event, Stream, as_on_gpus
from parwrap.errors import LockstepError
from parwrap.norm import forward_backward
from parwrap.norm.kernels import kernels_for
from synchronizations import synchronizations

SETTLED, STEPS = 36, 8
"""Steps after which nothing is new; weights are compared after the 32nd and the 64th."""


@pytest.mark.parametrize(
    "wait",
    [
        float,
        bool,
        *(methodcaller(name) for name in ("item", "tolist", "nonzero", "cpu", "numpy")),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.new_tensor([1.0]),
        lambda x: f"{x}",
    ],
)
def test_each_way_to_wait_is_found(wait):
    x = torch.ones(())
    with synchronizations() as places:
        x + 1
        assert [] == places
        wait(x)

    assert places
    assert all(each.partition(" at ")[2].startswith(__file__) for each in places)


@pytest.mark.ranks(2, fresh=True)
def test_to_wait_for_the_newest_event_is_found():
    with as_on_gpus(), synchronizations() as places:
        first, second = Event(), Event()
        first.record()
        second.record()
        first.synchronize()
        second.synchronize()

    assert ["Event.synchronize"] == [each.partition(" at ")[0] for each in places]


class Net(nn.Module):
    """Two heads; the second one is used in every third forward only, if at all."""

    def __init__(self, second):
        super().__init__()
        self.body, self.heads = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.ModuleList(nn.Linear(8, 3) for _ in "ab")
        self.second, self.calls = second, 0

    def forward(self, x):
        self.calls += 1
        body = self.body(x)
        return self.heads[0](body) + (self.heads[1](body) if self.second(self.calls) else 0)


def trained(second=lambda calls: True, unsynced=0):
    """Gives where a host would have waited."""
    torch.manual_seed(0)
    model = Net(second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = 4 * parwrap.world_size() * (SETTLED + STEPS)
    loader = DataLoader(TensorDataset(torch.randn(samples, 6), torch.randint(3, (samples,))), 4, shuffle=True)
    batches = list(parwrap.replicate(loader))[parwrap.rank() :: parwrap.world_size()]  # a loader reads on the host
    with ExitStack() as watched:
        for number, (x, y) in enumerate(batches):
            if number == SETTLED:
                places = watched.enter_context(synchronizations())
            for _ in range(unsynced):
                with parwrap.no_sync():
                    functional.cross_entropy(model(x), y).backward()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return places


@pytest.mark.parametrize("options", [{}, {"unsynced": 2}], ids=["ddp", "no_sync"])
@pytest.mark.ranks(2, fresh=True)
def test_a_regular_step_waits_for_nothing(options):
    with as_on_gpus():
        places = parwrap.distributed(trained)(**options)
        assert Event.recorded > STEPS  # the numbers of each step are on their way to the host

    assert [] == places, "\n".join(places)


@pytest.mark.ranks(2, fresh=True)
def test_a_step_that_leaves_the_same_parameters_out_as_before_waits_for_nothing():
    with as_on_gpus():
        places = parwrap.distributed(trained)(second=lambda calls: False)

    assert [] == places, "\n".join(places)


@pytest.mark.ranks(2, fresh=True)
def test_a_step_that_leaves_now_these_and_now_those_parameters_out_waits_as_find_unused_parameters_does():
    """The gradient of a parameter that no rank has reached must be ``None`` again before the optimizer steps."""
    with as_on_gpus():
        places = parwrap.distributed(trained)(second=lambda calls: calls % 2 == parwrap.rank() and calls % 3 == 0)

    assert 0 < len(places) <= STEPS, places
    assert all("tolist" in place and "ddp_averager.py" in place for place in places), places


@pytest.mark.ranks(2, fresh=True)
def test_a_batch_norm_that_is_synchronized_waits_once_in_its_forward_as_that_of_torch_does(monkeypatch):
    """It also waits once in its backward here, because the group is not NCCL's, with which that check is put off to the next forward."""
    on_cpu = kernels_for(torch.zeros(1))
    monkeypatch.setattr(forward_backward, "kernels_for", lambda input: on_cpu)
    with as_on_gpus(), parwrap.sync_bn():
        places = parwrap.distributed(trained)()

    waits = [each for each in places if not each.startswith("lift_fresh")]  # kernels of the CPU, and a header that is pinned on a GPU
    assert 2 * STEPS == len(waits), "\n".join(waits)
    assert all("tolist" in each and "exchange.py" in each for each in waits), "\n".join(waits)


@pytest.mark.ranks(2, fresh=True)
def test_a_parameter_that_one_rank_alone_uses_late_is_an_error_before_the_next_step():
    with suppress(RuntimeError), as_on_gpus():  # the last collective of rank 1 finds no partner
        rank = parwrap.rank()
        with pytest.raises(LockstepError) as raised:
            parwrap.distributed(trained)(second=lambda calls: calls == 40 and rank == 1)

    if rank == 0:
        assert "a parameter of shape (3, 8) has got a gradient on another rank" in str(raised.value)


@pytest.mark.ranks(2, fresh=True)
def test_the_last_bucket_is_sent_from_the_stream_on_which_the_script_trains():
    """Its other gradients are computed there: from another stream, numbers that are not there yet would be sent."""
    with as_on_gpus(), Stream():
        side = Stream.current()
        parwrap.distributed(trained)()
        assert Stream.used
        assert {side} == {*Stream.used}
