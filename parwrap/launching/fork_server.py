"""The fork server of ``parwrap run``: multiprocessing's own, but forked after torch is loaded, so that ranks need not load it.

It loads the other modules that ranks need, then forks the ranks. It ends with the command and ignores signals meant for a script. Variables
that an interpreter and OpenMP read only at their start must be set when the command starts.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, process, resource_tracker, util
from typing import NoReturn

from parwrap.ranks.platform import KILL, known_signals
from parwrap.ranks.processes import die_with_parent

__all__ = ["BLOCKED", "loading", "start", "stop"]

LONGEST = 60
"""The maximum length, in bytes, of the path of the directory for sockets: multiprocessing appends up to 40, and Linux allows 107."""

MEANT_FOR_RANKS = known_signals("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
BLOCKED: set[signal.Signals] = set()
"""Signals that a rank unblocks. A terminal and a scheduler signal all processes of a job: the server ignores them, and a newly forked rank
receives them once it is ready."""


def start(modules: Sequence[str]) -> None:
    """Fork the server, which loads ``modules``, unless it runs already.

    This process must have one thread and must not have initialized CUDA.
    """
    _find_place_for_sockets()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, known_signals("SIGUSR1", "SIGUSR2"))  # a scheduler sends them to all processes of a job
    resource_tracker.ensure_running()  # a child process, which starts in the same way
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    parent, original = os.getpid(), util.spawnv_passfds

    def forked(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        util.spawnv_passfds = original
        if server := os.fork():
            return server
        _serve(parent, modules, arguments[-1], descriptors)

    util.spawnv_passfds = forked  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = original


def _find_place_for_sockets() -> None:
    """Choose a short directory for sockets, here and in ranks, because the path of the default one may be too long."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        directory = tempfile.mkdtemp(prefix="parwrap-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=-100)
        process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]


@contextmanager
def loading(to_share: bool) -> Iterator[None]:
    """Disable garbage collection while modules load, because loading creates no garbage.

    Args:
        to_share: whether to freeze the objects too, so that forked processes keep sharing their pages.
    """
    enabled = gc.isenabled()
    gc.disable()
    yield
    if to_share:
        gc.freeze()
    if enabled:
        gc.enable()


def stop() -> None:
    """Kill the server and multiprocessing's resource tracker, and unfreeze what :func:`loading` has frozen: no rank is needed after all."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:  # type: ignore[attr-defined]
        os.kill(server._forkserver_pid, KILL)  # type: ignore[attr-defined]
        server._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    gc.unfreeze()


def _serve(parent: int, modules: Sequence[str], program: str, descriptors: Sequence[int]) -> NoReturn:
    """Load ``modules`` and run ``program``, multiprocessing's code for the server, until this process ends. ``descriptors`` stay open."""
    try:
        die_with_parent(parent)
        BLOCKED.update(MEANT_FOR_RANKS - signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_RANKS))
        _close_all_but(descriptors)
        # the parent's locks, held while it started this process
        forkserver._forkserver.__init__()  # type: ignore[misc]
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        with loading(to_share=True):
            for name in modules:
                with suppress(Exception):  # the rank raises it again, and can report it
                    import_module(name)
            import_module("parwrap.intercept.imported_names").note_loaded_modules()  # it imports torch, which this module must not
        exec(program, {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_all_but(descriptors: Sequence[int]) -> None:
    """Close the parent's descriptors, except its streams."""
    try:
        numbers: Sequence[int] = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = range(util.MAXFD)
    for number in numbers:
        if number > 2 and number not in descriptors:
            with suppress(OSError):
                os.close(number)
