"""SIGTERM ends a rank, in an ``except`` block too, and leaves ``finally`` blocks time to run."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader

import parwrap
from parwrap.launching import signals
from parwrap.launching.signals import Terminated, terminate


@pytest.fixture
def terminating(monkeypatch):
    """SIGTERM is handled as in a rank."""
    monkeypatch.setattr(signals, "AGAIN", 0.02)
    before = signal.signal(signal.SIGTERM, terminate)
    yield
    signal.signal(signal.SIGTERM, before)


def sigterm_then_sleep(seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)


def test_it_raises_at_once_where_no_exception_is_handled(terminating):
    with pytest.raises(Terminated, match="143"):
        sigterm_then_sleep(0)


def handles(done: list[str], seconds: float) -> None:
    try:
        raise FileNotFoundError
    except FileNotFoundError:
        sigterm_then_sleep(seconds)
        done.append("handled")
    time.sleep(60)


def saves(done: list[str]) -> None:
    try:
        raise ValueError("of the script")
    finally:
        sigterm_then_sleep(0.1)
        done.append("saved")


def test_it_raises_when_an_except_block_ends(terminating):
    done = []
    with pytest.raises(Terminated):
        handles(done, 0.1)

    assert ["handled"] == done


def test_it_raises_in_an_except_block_that_does_not_end(terminating, monkeypatch):
    monkeypatch.setattr(signals, "FINISHING", 0.1)
    done = []
    with pytest.raises(Terminated):
        handles(done, 60)

    assert [] == done


def test_finally_blocks_run_to_their_end(terminating):
    done = []
    with pytest.raises(ValueError, match="of the script"):
        saves(done)
    with pytest.raises(Terminated):
        time.sleep(60)

    assert ["saved"] == done


def train_from_scratch() -> int:
    """The number of steps until SIGTERM arrives at rank 1; no checkpoint is found."""
    model, steps = torch.nn.Linear(1, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    try:
        raise FileNotFoundError
    except FileNotFoundError:
        try:
            for x in DataLoader(torch.ones(40, 1), shuffle=True):
                if steps == 3 and parwrap.rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                model(x).sum().backward()
                optimizer.step()
                steps += 1
        except Terminated:
            pass
    return steps


@pytest.mark.ranks(2)
def test_it_raises_at_a_backward_in_an_except_block(monkeypatch):
    monkeypatch.setattr("parwrap.loop.interrupts.LONGEST", 0.3)  # for which rank 0 waits for a signal of its own
    before = [signal.signal(number, terminate) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert 3 == parwrap.distributed(train_from_scratch)()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
