"""Calls that the interceptor leaves undivided; the others are tested through the decorator."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parwrap


class Counts(nn.Linear):
    rows: list

    def __init__(self):
        super().__init__(2, 2)
        Counts.rows = []  # not the model's own: what a forward leaves in its model is a reason to run whole

    def forward(self, x):
        self.rows.append(len(x))
        return super().forward(x)


def by_data_parallel(model, x):
    return nn.DataParallel(model)(x)


def by_functional(model, x):
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def by_grad(model, x):
    return torch.func.vmap(model)(x[None])


def by_trace(model, x):
    return torch.jit.trace(model, x, check_trace=False)


def in_no_parameters(model, x):
    return nn.Identity()(model(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (nn.Module.__call__, [3]),
        (by_functional, [3]),
        (in_no_parameters, [3]),
        (by_data_parallel, [3]),
        (by_grad, [6]),
        (by_trace, [6]),
        (lambda model, x: model(x[:1]), [1]),
        (lambda model, x: model(x[:0]), [0]),
    ],
)
def test_calls_that_are_divided_and_that_are_not(call, expected):
    model = Counts()
    with parwrap.data_parallel(device_ids=["cpu"] * 2):
        call(model, torch.ones(6, 2))

    assert expected == model.rows[-1:]


def test_a_checkpoint_computes_again_what_each_replica_has():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Counts()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False).square()

    model, x = Checkpointed(), torch.randn(6, 2)
    with parwrap.data_parallel(device_ids=["cpu"] * 2):
        model(x).sum().backward()
    gradient, model.inner.weight.grad = model.inner.weight.grad, None
    rows = [*Counts.rows]
    model(x).sum().backward()

    assert [6, 3, 3] == rows[:3]  # a trial
    assert [3, 3, 3, 3] == rows[3:]
    assert torch.allclose(model.inner.weight.grad, gradient, atol=1e-5)


def test_threads_of_the_users_own_each_have_their_calls_divided():
    model, done = Counts(), []
    with parwrap.data_parallel(device_ids=["cpu"] * 2):
        threads = [threading.Thread(target=lambda: done.append(len(model(torch.ones(6, 2))))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [6, 6] == done
    assert [3, 3] == model.rows[-2:]


def test_a_script_that_distributes_itself_is_left_alone(monkeypatch):
    model = Counts()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a process group exchanges for good
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with parwrap.data_parallel(device_ids=["cpu"] * 2):
            nn.parallel.DistributedDataParallel(model)(torch.ones(6, 2))
    finally:
        dist.destroy_process_group()

    assert [6] == model.rows
