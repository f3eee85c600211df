"""A rank that waits for its GPU is let go when another has failed. A lock of the C library is the GPU here; ``tests/gpu`` has real ones.

``tests/launching/test_coming_apart.py`` has ranks of several nodes that wait for each other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from parwrap.checks import watchdog
from parwrap.checks.watchdog import watched
from parwrap.errors import LockstepError
from parwrap.loop.interrupts import Interrupts, noting_arrivals

LIBRARY = ctypes.CDLL(None)


class Terminated(Exception):
    pass


@pytest.fixture
def gpu(monkeypatch):
    """A rank on a GPU: ``wait`` blocks it in native code, as NCCL does, until the watchdog aborts NCCL."""
    mutex = ctypes.create_string_buffer(64)
    aborted = []

    def abort():
        aborted.append(True)
        LIBRARY.pthread_mutex_unlock(mutex)

    def wait():
        LIBRARY.pthread_mutex_lock(mutex)

    wait()
    monkeypatch.setattr(watchdog, "abort_nccl", abort)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)
    monkeypatch.setattr(watchdog, "UNHEARD", 0.2)
    return SimpleNamespace(wait=wait, aborted=aborted, backend="nccl", store=None)


@pytest.fixture
def interrupts():
    def handler(number, frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    held = Interrupts()
    try:
        with held.installed():
            yield held
    finally:
        signal.signal(signal.SIGTERM, before)


def after(seconds, act):
    threading.Timer(seconds, act).start()


@pytest.mark.parametrize("error", [ValueError(), LockstepError()])
def test_a_rank_that_waits_for_its_gpu_raises_when_another_rank_of_its_node_has_raised(error, gpu, pages, interrupts):
    after(0.05, lambda: pages[1].raised(error))
    read = []

    def wait():
        gpu.wait()
        read.append(1.0)  # a number that nothing averaged

    with pytest.raises(LockstepError, match="another rank has failed"), watched(gpu, pages[0], interrupts, print):
        wait()

    assert ([True], []) == (gpu.aborted, read)


def test_after_an_abort_no_optimizer_steps_and_only_what_is_no_checkpoint_is_saved(gpu, pages, interrupts):
    """Also where the script has caught the error."""
    with watched(gpu, pages[0], interrupts, print) as aborted:
        for each in (lambda: True, lambda: False):
            aborted.check_save(each)
        aborted.step(None)
        after(0.05, lambda: pages[1].raised(ValueError()))
        with suppress(LockstepError):
            gpu.wait()

        aborted.check_save(lambda: False)
        with pytest.raises(LockstepError, match=r"no checkpoint is saved any more.*another rank has failed"):
            aborted.check_save(lambda: True)
        with pytest.raises(LockstepError, match="no optimizer steps any more"):
            aborted.step(None)


@pytest.mark.parametrize("steps", [False, True])
def test_a_script_that_has_caught_an_interrupt_may_save_unless_it_trains_on(steps, gpu, pages, interrupts):
    with watched(gpu, pages[0], interrupts, print) as aborted:
        with pytest.raises(Terminated):
            interrupts.release(signal.SIGTERM)
        if steps:
            aborted.step(None)
        pages[1].raised(KeyboardInterrupt())
        with suppress(LockstepError):
            gpu.wait()

        with pytest.raises(LockstepError) if steps else nullcontext():
            aborted.check_save(lambda: True)


def test_it_is_let_go_when_a_signal_has_come_and_raises_at_once(gpu, pages, interrupts):
    after(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def step():
        gpu.wait()
        time.sleep(5)  # no backward comes

    with pytest.raises(Terminated), watched(gpu, pages[0], interrupts, print):
        step()

    assert [True] == gpu.aborted


def test_a_signal_that_python_holds_aborts_nothing(gpu, pages, interrupts):
    with watched(gpu, pages[0], interrupts, print):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)

        assert signal.SIGTERM == interrupts.held

        with pytest.raises(Terminated):
            interrupts.release()
        time.sleep(0.5)

    assert [] == gpu.aborted


def test_a_signal_that_the_script_handles_aborts_nothing(gpu, pages, interrupts):
    with watched(gpu, pages[0], interrupts, print):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)

    assert [] == gpu.aborted


def test_signals_are_noted_in_the_file_in_which_the_launcher_notes_them(tmp_path):
    launchers = os.open(tmp_path / "signals", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.set_wakeup_fd(launchers)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        with noting_arrivals() as arrived:
            assert b"" == arrived()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert bytes([signal.SIGUSR1]) == arrived()
    finally:
        kept = signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        os.close(launchers)

    assert launchers == kept
    assert bytes([signal.SIGUSR1] * 2) == (tmp_path / "signals").read_bytes()


def test_a_descriptor_that_the_script_sets_stays(tmp_path):
    scripts = os.open(tmp_path / "signals", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    try:
        with noting_arrivals():
            signal.set_wakeup_fd(scripts)
    finally:
        kept = signal.set_wakeup_fd(-1)
        os.close(scripts)

    assert scripts == kept
