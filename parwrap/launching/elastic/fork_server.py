"""The fork server of ``parwrap.run``: multiprocessing's, forked from the command when that has loaded torch, so that nobody loads it again.

It loads what ranks need beyond that, then forks them. It ends with the command, and not by the signals that are meant for a script. What
an interpreter and OpenMP read at their start, the command must have been started with.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, process, resource_tracker, util
from typing import NoReturn

from parwrap.patching.patch import Patch, installed
from parwrap.system.processes import die_with_parent

__all__ = ["BLOCKED", "loading", "start", "stop"]

LONGEST = 60
"""Bytes: multiprocessing puts up to 40 behind them, and Linux takes 107."""

MEANT_FOR_RANKS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
BLOCKED: set[signal.Signals] = set()
"""What a rank unblocks. A terminal and a scheduler send their signals to all processes of a job: the server takes no notice, and a rank
that was just forked has them when it is ready."""


def start(modules: Sequence[str]) -> None:
    """Fork the server, which goes on to load ``modules``, unless it runs. This process has one thread, and has not started CUDA."""
    _find_place_for_sockets()
    resource_tracker.ensure_running()  # a process of its own, which is started in the same way

    def forked(wrapped: Callable, instance: object, args: tuple, kwargs: dict) -> int:
        _, arguments, descriptors = args
        parent = os.getpid()
        if server := os.fork():
            return server
        util.spawnv_passfds = wrapped  # nobody comes back here to take the patch off
        _serve(parent, modules, arguments[-1], descriptors)

    with installed([Patch(util, "spawnv_passfds", forked)]):
        forkserver.ensure_running()


def _find_place_for_sockets() -> None:
    """The directory for temporary files may have too long a name for a socket in it, here and in ranks."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        directory = tempfile.mkdtemp(prefix="parwrap-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=-100)
        process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]


@contextmanager
def loading(to_share: bool) -> Iterator[None]:
    """While modules are loaded nobody looks for garbage, of which there is none.

    Args:
        to_share: whether processes that are forked from this one share what was made, so that nobody is to write to it later either.
    """
    enabled = gc.isenabled()
    gc.disable()
    yield
    if to_share:
        gc.freeze()
    if enabled:
        gc.enable()


def stop() -> None:
    """End the server, for who needs none after all: this process is as if it had never been."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:  # type: ignore[attr-defined]
        os.kill(server._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        server._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    gc.unfreeze()


def _serve(parent: int, modules: Sequence[str], program: str, descriptors: Sequence[int]) -> NoReturn:
    """Run ``program``, which is what a new interpreter would be given, with those ``descriptors``, to the end of this process."""
    try:
        die_with_parent(parent)
        BLOCKED.update(MEANT_FOR_RANKS - signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_RANKS))
        _close_all_but(descriptors)
        # which are the parent's, in the midst of starting this
        forkserver._forkserver.__init__()  # type: ignore[misc]
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        with loading(to_share=True):
            for name in modules:
                with suppress(Exception):  # a rank meets it again, and can report it
                    import_module(name)
        exec(program, {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_all_but(descriptors: Sequence[int]) -> None:
    """Close what is the parent's, except for its streams."""
    try:
        numbers: Sequence[int] = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = range(util.MAXFD)
    for number in numbers:
        if number > 2 and number not in descriptors:
            with suppress(OSError):
                os.close(number)
