"""Averaging one set of gradients: what torch's DDP does with the averager's own signal among the parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parwrap.group.group import current
from parwrap.intercept.backward import Backward
from parwrap.strategies.ddp.gradient_averager import GradientAverager

STEPS = 4
"""Buckets are rebuilt, in the order in which gradients came, after the first."""


@pytest.mark.ranks(2)
def test_the_first_bucket_is_sent_while_the_backward_still_runs():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model(torch.ones(2, 64))  # the nodes of what comes now are not the first of this process
    averager = GradientAverager(current(), 1, tuple(model.parameters()), frozenset(), varies=False, bucket_cap_mb=0.01)
    events = []

    def send(state, bucket):
        events.append("bucket sent")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    averager._reducer.register_comm_hook(None, send)
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: events.append("last gradient"))
    for _ in range(STEPS):
        events.clear()
        loss = model(torch.ones(2, 64)).sum()
        averager.run(Backward((loss,), (None,), {}, torch.autograd.backward), weight=1.0)

    assert events.index("bucket sent") < events.index("last gradient")
