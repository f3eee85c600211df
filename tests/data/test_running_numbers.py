"""A script that divides what it has summed up over a share by the length of the whole is told once how to have it of all ranks."""

import contextlib
import io

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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divide", ["after_the_pass", "in_the_pass", "by_a_variable_from_before", "under_a_name"])
def test_it_is_said_once_where_the_division_is(divide):
    before = TensorDataset.__len__
    said = [line for line in train(globals()[divide]).splitlines() if LINE in line]

    assert (1 if parwrap.rank() == 0 else 0) == len(said)
    assert all("test_running_numbers.py:" in line and "parwrap.reduce_sum(x)" in line for line in said)
    assert before is TensorDataset.__len__


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divide", ["by_batches", "by_what_was_counted", "summed_over_ranks", "in_an_evaluation"])
def test_other_numbers_are_not_talked_about(divide):
    assert LINE not in train(globals()[divide])


def test_a_single_process_says_nothing():
    assert "divides" not in train(after_the_pass)
