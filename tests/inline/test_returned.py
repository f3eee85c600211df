"""What comes back from ranks that a call has started, against the same in one process."""

import random
import warnings
from array import array
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import parwrap
from parwrap.inline.returned import contents, differing

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.slow)]


def objects():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return data, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def trained(data, model, optimizer, scheduler, epochs=2):
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model[2](model[0](x)), y).backward()
            optimizer.step()
        scheduler.step()
    return model


@pytest.mark.parametrize("start_method", METHODS)
def test_the_callers_objects_are_trained_in_place_as_by_a_plain_call(start_method):
    _, model, optimizer, scheduler = arguments = objects()
    parameters, pointers = list(model.parameters()), [p.data_ptr() for p in model.parameters()]
    groups, state = optimizer.param_groups, optimizer.state
    train = parwrap.distributed(batch="global", nprocs=2, start_method=start_method)(trained)

    assert train(*arguments, epochs=2) is model
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert groups is optimizer.param_groups
    assert state is optimizer.state
    torch.testing.assert_close(trained(*objects()).state_dict(), model.state_dict())
    assert (0.1 * 0.5**2, 2) == (optimizer.param_groups[0]["lr"], scheduler.last_epoch)
    assert 6 == optimizer.state[parameters[0]]["step"]


def test_training_goes_on_here_and_there():
    here, there = objects(), objects()
    train = parwrap.distributed(batch="global", nprocs=2)(trained)
    for _ in range(2):
        train(*there)
        trained(*there)
    for _ in range(4):
        trained(*here)

    torch.testing.assert_close(here[1].state_dict(), there[1].state_dict())
    torch.testing.assert_close(here[2].state_dict(), there[2].state_dict())


class Deep:
    def __init__(self):
        self.model = nn.Linear(1, 1)


class Trainer:
    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.inner, self.models = Deep(), {"a": {"b": [nn.Linear(1, 1)]}}
        self.parts = {"second": nn.Linear(1, 1)}
        self.epochs, self.history = 0, []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self):
        set_to_seven(self.parts["second"])
        set_to_seven(self.model)
        self.step()

    def step(self):
        set_to_seven(of_a_method)

    def notes(self):
        self.model.best, self.optimizer.note = 0.25, "good"
        torch.optim.lr_scheduler.StepLR(self.optimizer, 1)  # counts steps of the optimizer in attributes of its own

    def deep(self):
        nn.init.ones_(self.inner.model.weight)
        nn.init.ones_(self.models["a"]["b"][0].weight)

    def counts(self):
        self.epochs += 1
        self.history.append(0.5)
        self.best = 0.25


def set_to_seven(module):
    nn.init.constant_(module.weight, 7.0)
    by_a_helper.fill_(7.0)


of_a_method, by_a_helper, rebound = nn.Linear(1, 1), torch.zeros(1), 0


@pytest.mark.parametrize("start_method", METHODS)
def test_objects_are_found_by_every_name_of_the_function_and_of_its_helpers(start_method):
    trainer, in_closure = Trainer(), nn.Linear(1, 1)

    def closure():
        set_to_seven(in_closure)

    by_a_helper.zero_()
    parwrap.launch(trainer.fit, nprocs=2, start_method=start_method)
    parwrap.launch(closure, nprocs=2, start_method=start_method)

    found = trainer.model, trainer.parts["second"], in_closure, *([of_a_method] if start_method == "fork" else [])
    assert {7.0} == {each.weight.item() for each in found}
    assert start_method == "spawn" or 7.0 == by_a_helper.item()


def rebinds():
    global rebound
    rebound = 3


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda: Trainer().fit, None),
        (lambda: Trainer().counts, "self.epochs, self.history, self.best"),
        (lambda: rebinds, "rebound"),
        (lambda: Trainer().deep, "self.inner, self.models"),
        (lambda: Trainer().notes, "self.model.best, self.optimizer.note"),
    ],
)
def test_what_else_has_changed_is_named_once(function, named):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parwrap.launch(function(), nprocs=2)

    texts = [str(each.message) for each in caught if "parwrap" in str(each.message)]
    assert [] == texts if named is None else len(texts) == 1
    assert named is None or texts[0].startswith(f"parwrap: the function changed {named} on its ranks, and this process keeps its own. ")
    assert named is None or caught[-1].filename == __file__


class Meter:
    __slots__ = ("total", "unset")


def test_contents_differ_if_a_value_does():
    meter = Meter()
    meter.total = 0
    table, generator = np.zeros(3), torch.Generator()
    names = {"table": table, "nested": {"best": [1.0]}, "generator": generator, "same": "text", "nan": float("nan"), "meter": meter}
    before = contents(names)
    table[0], names["nested"]["best"][0] = 1, 0.5
    meter.total += 1
    generator.manual_seed(3)

    assert ["table", "nested", "generator", "meter.total", "new"] == differing(before, contents({**names, "new": 1}))


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2000),
        np.zeros((512, 512)),
        np.zeros(3, object),
        [0] * 5000,
        dict.fromkeys(range(2000), 0),
        deque([0] * 2000),
        bytearray(10),
        array("f", [0.0] * 4),
    ],
)
def test_a_change_in_a_large_container_is_seen(value):
    before = contents({"value": value})
    assert [] == differing(before, contents({"value": value}))

    value[0] = 7
    assert ["value"] == differing(before, contents({"value": value}))


@pytest.mark.parametrize("start_method", METHODS)
def test_changes_of_every_kind_come_back(start_method):
    model, frozen = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    lazy, moved, view = nn.LazyLinear(2), torch.zeros(2000), torch.zeros(4, 4)
    by_numpy, expanded, integers = torch.zeros(3), torch.zeros(1).expand(3), torch.zeros(2, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0), momentum=0.9)

    def change():
        model.append(nn.Linear(1, 1))
        optimizer.add_param_group({"params": list(model[1].parameters())})
        optimizer.param_groups[0]["lr"].fill_(0.5)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        model.eval()
        frozen.half().requires_grad_(False)
        lazy(torch.ones(1, 5))
        moved.data = torch.ones(3)
        view[1].fill_(2.0)
        by_numpy.numpy()[:] = 1
        integers.add_(4)
        return expanded, by_numpy.view(1, 3), lazy

    one, shared, returned = parwrap.launch(change, nprocs=2, start_method=start_method)

    assert returned is lazy
    assert one is expanded
    assert (2, False, 2, 0.5) == (len(model), model.training, len(optimizer.param_groups), optimizer.param_groups[0]["lr"].item())
    assert [id(p) for p in model.parameters()] == [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert 4 == len(optimizer.state)
    assert (torch.float16, False) == (frozen.weight.dtype, frozen.weight.requires_grad)
    assert (2, 5) == lazy.weight.shape
    assert ([1.0] * 3, [2.0] * 4, [1.0] * 3) == (moved.tolist(), view[1].tolist(), by_numpy.tolist())
    assert ([[1.0] * 3], [4, 4]) == (shared.tolist(), integers.tolist())
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()  # and it trains on
    optimizer.step()


def test_a_new_model_comes_back_with_what_its_parts_share():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    back = parwrap.launch(build, nprocs=2)

    assert back[1].weight is back[0].weight
    assert all(map(torch.equal, build().parameters(), back.parameters()))


@pytest.mark.parametrize("start_method", METHODS)
def test_random_streams_go_on_from_those_of_rank_zero(start_method):
    def draw():
        return torch.rand(1).item(), np.random.rand()

    torch.manual_seed(0)
    np.random.seed(0)
    launched = [parwrap.launch(draw, nprocs=2, start_method=start_method), draw()]
    torch.manual_seed(0)
    np.random.seed(0)

    assert [draw(), draw()] == launched


@pytest.mark.parametrize("start_method", METHODS)
def test_generators_and_the_loss_scale_go_on_from_those_of_rank_zero(start_method):
    def made():
        order = RandomSampler(range(8), generator=torch.Generator().manual_seed(1))
        drawn = np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator().manual_seed(0)
        return *drawn, DataLoader(range(8), batch_size=8, sampler=order), torch.amp.GradScaler("cpu", init_scale=8)

    def draw(new, old, plain, of_torch, loader, scaler):
        scaler.scale(torch.ones(1))
        scaler.update(scaler.get_scale() * 2)
        (batch,) = loader
        return new.random(), old.rand(), plain.random(), torch.rand(1, generator=of_torch).item(), batch.tolist(), scaler.get_scale()

    here, there = made(), made()
    assert [draw(*here), draw(*here)] == [parwrap.launch(draw, *there, nprocs=2, start_method=start_method), draw(*there)]
