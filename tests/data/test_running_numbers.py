"""A script that divides what it has summed up over a share by the length of the whole is told once how to have it of all ranks."""

import contextlib
import io
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from trained_on import Setup

LINE = "divides by the length of a dataset that 2 ranks share"


def train(divide):
    """What is said while a loop ``divide``s."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), parwrap.distributed():
        setup, dataset = Setup(), TensorDataset(torch.arange(20.0))
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        for _ in range(2):
            divide(setup, dataset, loader)
    return said.getvalue()


def after_the_pass(setup, dataset, loader):
    running = 0.0
    for (x,) in loader:
        setup.step(x)
        running += x.sum().item()
    return running / len(loader.dataset)


def in_the_pass(setup, dataset, loader):
    running = 0.0
    for (x,) in loader:
        setup.step(x)
        running += x.sum().item() / len(dataset)
    return running


def by_a_variable_from_before(setup, dataset, loader):
    count, running = len(dataset), 0.0
    for (x,) in loader:
        setup.step(x)
        running += x.sum().item()
    return running / count


def under_a_name(setup, dataset, loader):
    for (x,) in loader:
        setup.step(x)
    size = len(loader.dataset)
    running = 1.0
    running /= size


def by_an_item(setup, dataset, loader):
    """As in torch's tutorial about transfer learning."""
    loaders, sizes = {"train": loader, "val": DataLoader(range(8))}, {"train": len(dataset), "val": 8}
    for phase in ("train", "val"):
        running = 0.0
        setup.model.train(phase == "train")
        for batch in loaders[phase]:
            if phase == "train":
                setup.step(batch[0])
            running += len(batch)
        running = running / sizes[phase]


def by_an_attribute(setup, dataset, loader):
    options = SimpleNamespace(samples=len(dataset))
    for (x,) in loader:
        setup.step(x)
    return 1.0 / options.samples


def by_the_length_of_a_list(setup, dataset, loader):
    data = list(range(20))
    for x in DataLoader(data, batch_size=4, shuffle=True):
        setup.step(x)
    return 1.0 / len(data)


def after_a_look_at_another(setup, dataset, loader):
    next(iter(DataLoader(range(8), batch_size=4)))
    return after_the_pass(setup, dataset, loader)


def by_an_item_for_another_loader(setup, dataset, loader):
    sizes = {"train": len(dataset), "val": 8}
    for (x,) in loader:
        setup.step(x)
    return 1.0 / sizes["val"]


def by_batches(setup, dataset, loader):
    running = 0.0
    for number, (x,) in enumerate(loader):
        setup.step(x)
        running += x.sum().item()
        f"{number * len(x)}/{len(loader.dataset)} {100.0 * number / len(loader)}"
    return running / len(loader)


def by_what_was_counted(setup, dataset, loader):
    running, count = 0.0, 0
    for (x,) in loader:
        setup.step(x)
        running, count = running + x.sum().item(), count + len(x)
    return running / count


def summed_over_ranks(setup, dataset, loader):
    running = 0.0
    for (x,) in loader:
        setup.step(x)
        running += x.sum().item()
    return parwrap.reduce_sum(running) / len(dataset)


def in_an_evaluation(setup, dataset, loader):
    for (x,) in loader:
        setup.step(x)
    with torch.no_grad():
        running = sum(x.sum().item() for (x,) in loader)
    return running / len(dataset)


ITEMS = ["by_an_item", "by_an_attribute", "by_the_length_of_a_list", "after_a_look_at_another"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divide", ["after_the_pass", "in_the_pass", "by_a_variable_from_before", "under_a_name", *ITEMS])
def test_it_is_said_once_where_the_division_is(divide):
    before = TensorDataset.__len__
    said = [line for line in train(globals()[divide]).splitlines() if LINE in line]

    assert (1 if parwrap.rank() == 0 else 0) == len(said)
    assert all("test_running_numbers.py:" in line and "parwrap.reduce_sum(x)" in line for line in said)
    assert before is TensorDataset.__len__


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "divide", ["by_batches", "by_what_was_counted", "summed_over_ranks", "in_an_evaluation", "by_an_item_for_another_loader"]
)
def test_other_numbers_are_not_talked_about(divide):
    assert LINE not in train(globals()[divide])


def test_a_single_process_says_nothing():
    assert "divides" not in train(after_the_pass)
