"""Autograd runs what is on a GPU in threads of its own. Here another name of the thread inside a backward stands for them: a mock."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parwrap
from parwrap.errors import UsageError
from parwrap.torch_private.autograd import in_backward

THREAD, OF_AUTOGRAD = threading.current_thread, threading.Thread(name="autograd")


@contextmanager
def as_on_gpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "current_thread", lambda: OF_AUTOGRAD if in_backward() else THREAD())
        yield


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 3), 1.0 + step + parwrap.rank())
        model[2](checkpoint(model[1], model[0](x), use_reentrant=True)).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.ranks(2, fresh=True)  # a checkpoint changes torch's default device
def test_a_checkpoint_runs_a_backward_inside_a_backward():
    expected = parwrap.distributed(trained)()
    with as_on_gpus():
        actual = parwrap.distributed(trained)()

    assert expected == actual


@pytest.mark.ranks(2)
def test_a_step_in_a_hook_is_refused():
    with as_on_gpus(), parwrap.distributed():
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(UsageError, match=r"steps inside a backward, before .* Step after backward, not in a hook\."):
            (weight * (1.0 + parwrap.rank())).sum().backward()
