"""``@hogwild`` in a plain process: changes by the workers appear in the caller's objects, and in everything that refers to them."""

import gc

import pytest
import torch
from torch import nn

import parwrap
from counting import counted, zeros
from parwrap.errors import UsageError


def test_views_of_the_callers_show_what_was_trained():
    model = zeros()
    earlier, array, flat = model.weight.detach(), model.weight.detach().numpy(), model.weight.data.view(-1)
    later = nn.Parameter(flat)
    mask = torch.zeros(2)
    wide = mask.expand(3, 2)

    @parwrap.hogwild(workers=2, lock=True)
    def train():
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=10)
        mask.add_(1)

    train()
    assert [[-10.0, -10.0]] == model.weight.tolist() == earlier.tolist() == array.tolist()
    assert [-10.0, -10.0] == flat.tolist() == later.tolist()
    assert [[1.0, 1.0]] * 3 == wide.tolist()


def test_a_lazy_module_stays_as_it_is_or_has_the_shape_that_it_has_got():
    used, unused = nn.LazyLinear(1, bias=False), nn.LazyLinear(3)

    @parwrap.hogwild(workers=2, lock=True)
    def train():
        used(torch.ones(1, 2))
        nn.init.zeros_(used.weight)
        counted(used, torch.optim.SGD(used.parameters(), lr=1.0), samples=10)

    train()
    assert [[-10.0, -10.0]] == used.weight.tolist()
    assert [-20.0] == used(torch.ones(2)).tolist()
    assert unused.has_uninitialized_params()


def test_what_is_changed_through_data_comes_back():
    model, average = zeros(), zeros()

    @parwrap.hogwild(workers=2, lock=True)
    def train():
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=10)
        parwrap.barrier()
        average.weight.data.mul_(0.5).add_(0.5 * model.weight.data)

    train()
    assert [[-5.0, -5.0]] == average.weight.tolist()


def test_what_python_itself_has_frozen_is_no_object_of_the_callers(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as Python 3.12 does from the start

    assert torch.equal(torch.zeros(1, 2), parwrap.hogwild(workers=2)(zeros)().weight)


def test_where_objects_are_frozen_none_would_come_back():
    gc.freeze()
    try:
        with pytest.raises(UsageError, match=r"gc\.freeze\(\) hides objects whose changes must be sent back: call gc\.unfreeze\(\) first"):
            parwrap.hogwild(workers=2)(zeros)()
    finally:
        gc.unfreeze()
