"""Ctrl-C and SIGTERM reach all ranks at the same backward, or after two seconds."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.loop import interrupts


def trained_steps(signal_of_rank_one, at=3):
    """The number of steps until an interrupt, of a script that catches it and goes on to evaluate."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = 0
    try:
        for (x,) in DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=1, shuffle=True):
            if parwrap.rank() == 1 and steps == at:
                os.kill(os.getpid(), signal_of_rank_one)
            model(x).sum().backward()
            optimizer.step()
            steps += 1
    except (KeyboardInterrupt, Terminated):
        model.eval()
        with torch.no_grad():
            assert 40 == sum(len(x) for (x,) in DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=8))
    return steps


class Terminated(Exception):
    pass


@pytest.mark.ranks(2)
def test_one_rank_is_interrupted_and_all_leave_at_the_same_backward(monkeypatch):
    monkeypatch.setattr(interrupts, "LONGEST", 0.3)  # for which the other waits for its own signal

    assert 3 == parwrap.distributed(trained_steps)(signal.SIGINT)


@pytest.mark.ranks(2)
def test_a_handler_that_was_there_is_called(monkeypatch):
    def handler(number, frame):
        raise Terminated

    monkeypatch.setattr(interrupts, "LONGEST", 0.3)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        steps = parwrap.distributed(trained_steps)(signal.SIGTERM)

        assert 3 == steps
        assert handler is signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.ranks(2)
def test_a_rank_that_reaches_no_backward_raises_after_two_seconds():
    began = time.monotonic()

    @parwrap.distributed
    def waits():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)

    with pytest.raises(KeyboardInterrupt):
        waits()

    assert 1.9 < time.monotonic() - began < 6


@pytest.mark.ranks(2)
def test_a_signal_that_no_backward_follows_is_not_lost():
    def ends():
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        parwrap.distributed(ends)()


@pytest.mark.ranks(2)
def test_a_handler_of_the_script_runs_on_all_ranks_at_the_same_backward():
    asked = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

    @parwrap.distributed
    def run():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        steps = 0
        for (x,) in DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=1, shuffle=True):
            if steps == 3:  # the signals of a launcher arrive one after another
                threading.Timer(0.3 * parwrap.rank(), os.kill, (os.getpid(), signal.SIGTERM)).start()
                time.sleep(0.1)
            model(x).sum().backward()
            optimizer.step()
            steps += 1
            if asked:
                break
        return steps

    try:
        steps = parwrap.gather(run())
    finally:
        signal.signal(signal.SIGTERM, before)

    assert 1 == len(set(steps))
