"""Signals that arrive while a rank is in a backward are handled right after it."""

import os
import signal
import threading

import pytest
import torch

import parwrap
from parwrap.coordination.held_signals import HeldSignals


def test_a_signal_is_handled_at_once_unless_it_is_held():
    held, seen = HeldSignals(), []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("of before"))
    try:
        with held.installed():
            signal.raise_signal(signal.SIGUSR1)
            held.hold()
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR2, lambda number, frame: seen.append("of the script"))
            signal.raise_signal(signal.SIGUSR2)

            assert ["of before"] == seen
            held.release()
            signal.raise_signal(signal.SIGUSR2)

            assert ["of before", "of before", "of the script", "of the script"] == seen
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_scripts_see_the_handlers_that_they_set_and_all_is_put_back():
    def handle(number, frame): ...

    patched = signal.signal, signal.getsignal
    with HeldSignals().installed():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.signal(signal.SIGINT, handle) is signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is handle
        assert signal.signal(signal.SIGINT, signal.SIG_IGN) is handle
        assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN

    assert patched == (signal.signal, signal.getsignal)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.ranks(2, timeout=30)
def test_a_rank_that_is_interrupted_in_a_backward_sends_its_gradients_first():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    interrupted = []
    with parwrap.distributed():
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2) * (1 + parwrap.rank())).sum()
            if step == 4 and parwrap.rank() == 1:
                loss.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGINT))
            try:
                loss.backward()
            except KeyboardInterrupt:
                interrupted.append(step)
            optimizer.step()

    assert [[], [4]] == parwrap.gather(interrupted)
    weights = parwrap.gather(model.weight.detach())
    assert torch.equal(weights[0], weights[1])


def test_several_of_one_signal_that_wait_are_handled_once_as_python_does():
    held, seen = HeldSignals(), []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with held.installed():
            held.hold()
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            held.release()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert [signal.SIGUSR1] == seen


def test_another_thread_holds_no_signals():
    held, seen = HeldSignals(), []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with held.installed():
            thread = threading.Thread(target=held.hold)
            thread.start()
            thread.join()
            signal.raise_signal(signal.SIGUSR1)

            assert [signal.SIGUSR1] == seen
    finally:
        signal.signal(signal.SIGUSR1, before)
