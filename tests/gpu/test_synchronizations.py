"""A regular step has the host wait for a GPU no more often than torch's own tools do; the CPU stands for the GPU: a mock."""

from contextlib import ExitStack
from functools import partial
from operator import methodcaller

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from lagging_backend import as_on_gpus
from synchronizations import synchronizations

SETTLED, STEPS = 36, 8
"""Steps after which nothing is new; weights have been compared in the 32nd."""


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


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train():
    """Gives where a host would have waited."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(parwrap.rank())
    data = [(torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(SETTLED + STEPS)]

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with ExitStack() as watched:
        for number, batch in enumerate(data):
            if number == SETTLED:
                places = watched.enter_context(synchronizations())
            step(*batch)
    return places


@pytest.mark.parametrize(
    ("feature", "each_step"),
    [
        (None, 0),
        (partial(parwrap.amp, dtype="bf16"), 0),
        (partial(parwrap.amp, dtype="fp16"), 1),  # as GradScaler
        (partial(parwrap.accumulate, 4), 0),
    ],
    ids=["ddp", "bf16", "fp16", "accumulate"],
)
@pytest.mark.ranks(2, timeout=60)
def test_a_regular_step(feature, each_step, tmp_path):
    with as_on_gpus(tmp_path):
        places = parwrap.distributed(feature()(train) if feature else train)()

    assert STEPS * each_step == len(places), "\n".join(places)
