"""Runs a function on ranks that this process starts, watches and always ends.

``rank_process.py`` runs in a rank; ``returned.py`` packs what rank 0 sends back, and ``notebook.py`` shows the output of ranks.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import IOBase
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

from torch.utils.data import DataLoader

from parwrap.errors import LaunchError, RankMismatchError, UsageError, counted
from parwrap.inline.notebook import ChildOutput, logging_handlers
from parwrap.inline.rank_process import ENDING, MESSAGE, Job, Task, end_file, failure_file, run
from parwrap.inline.returned import CallersObjects, warn_of_changes
from parwrap.inline.spawning import Interpreter, loaded, pack
from parwrap.places import warn
from parwrap.ranks.device import BACKEND, cores, cuda_count, cuda_has_started, gpu_count, of_sharing
from parwrap.ranks.platform import FORKS, WINDOWS, path_of
from parwrap.ranks.processes import how_ended
from parwrap.ranks.rendezvous import job_folder
from parwrap.ranks.world import IN_SCRATCH, INIT_METHOD, ONE_NODE
from parwrap.torch_private.cuda import is_in_bad_fork
from parwrap.torch_private.dataloader import forget_workers
from parwrap.torch_private.dynamo import DYNAMO

__all__ = ["number_of_ranks", "run_on_ranks"]

GRACE = 5.0
"""Seconds for ranks to end before they are killed, once one has failed, Ctrl-C was pressed, or all have finished."""

Start = Callable[[int, int, dict[int, int]], Any]
"""Starts the process of a rank, from its number, a pipe for its messages, and descriptors for its stdout and stderr."""

_forking = threading.RLock()
"""Held while a process is forked: the garbage collector is off then."""

MOMENT = 0.05
"""Seconds to wait for the end of a rank that died, after another rank has reported an error, which that death may have caused."""


def number_of_ranks(nprocs: int | str | None, backend: str | None) -> int:
    """How many ranks ``nprocs`` means on this machine; ``None`` means 1.

    Raises:
        LaunchError: ``nprocs="gpu"`` without a GPU, or fewer GPUs than ranks for a ``backend`` that needs one for each. Whether torch has
            that backend is checked elsewhere.

    >>> number_of_ranks(3, "gloo")
    3
    """
    gpus = gpu_count()
    if nprocs == "gpu" and not gpus:
        raise LaunchError("nprocs='gpu' starts a rank on each GPU, but torch cannot use a GPU here: set a number of ranks for the CPU.")
    count = {"gpu": gpus, "cpu": cores(), "auto": gpus or cores()}[nprocs] if isinstance(nprocs, str) else nprocs or 1
    if 0 < gpus < count and backend not in (None, "gloo"):
        raise LaunchError(
            f"nprocs={nprocs!r} starts {count} ranks, but torch can use {counted(gpus, 'GPU')} here, and backend={backend!r} needs one for "
            f"each rank. Use at most {gpus}, or leave out backend= to let ranks share GPUs over gloo."
        )
    return count


def run_on_ranks(task: Task, size: int, backend: str | None = None, start_method: str | None = None, who: str = "parwrap.launch") -> Any:
    """Run ``task`` on ``size`` ranks that this process starts, and wait for all of them.

    Afterwards the caller's objects (``KINDS`` of ``returned.py``) have the state of rank 0, unless rank 0 dies before it can send it.
    Ctrl-C is passed on to the ranks.

    Args:
        task: the function to call, and what it reaches. The function opens the process group itself.
        size: the number of ranks.
        backend: the backend of the process group; ``None`` to choose by the device.
        start_method: ``"fork"``, or ``"spawn"`` for new interpreters, which get the function by cloudpickle; by default ranks are forked
            where that is safe.
        who: the name of the caller in errors.

    Returns:
        The function's result on rank 0.

    Raises:
        UsageError: the result, or the function, cannot be sent; this process cannot fork ranks; or this is Windows.
        RankMismatchError: a rank ended without a result.
        KeyboardInterrupt: Ctrl-C has ended the ranks.

    The exception of the first rank that fails is raised here too; its cause shows the traceback on the rank.

    >>> run_on_ranks(Task(lambda: os.environ["PARWRAP_WORLD_SIZE"], [], dict), size=2)
    '2'
    """
    if WINDOWS:
        raise UsageError(f"{who} watches ranks through pipes, and Windows cannot wait for those: start ranks with `parwrap run`.")
    method = start_method or ("fork" if FORKS and not _cuda_has_started() else "spawn")
    share = backend is None and 0 < (gpus := gpu_count()) < size
    if share:
        warn("parwrap: " + of_sharing(size, gpus, "backend='gloo'"))
    with job_folder() as folder:
        variables = partial(_variables, size, folder, share)
        if method == "fork":
            start = _forks(task, folder, variables, who)
        else:
            start = _spawns(task, folder, variables, max(1, cores() // size), backend, who)
        with _started(start, size) as ranks:
            interrupted = _watch(ranks)
        return _outcome(ranks, interrupted, CallersObjects(task.objects), folder)


def _forks(task: Task, folder: Path, variables: Callable[[int], dict[str, str]], who: str) -> Start:
    """Return a function that forks a rank from this process."""
    _refuse_fork(who)
    given = set(os.environ)
    importlib.import_module(DYNAMO)  # each rank's first optimizer would import it, which takes a second
    for name in set(os.environ) - given:  # the import sets a folder for compiled code
        del os.environ[name]
    streams = [stream for handler in logging_handlers() if (stream := getattr(handler, "stream", None)) is not None]
    files = [each for each in (*streams, *task.inherited) if isinstance(each, IOBase) and _is_regular(each)]
    _flush(files)  # else every rank would write what is in their buffers

    def settled(rank: int) -> Task:
        for each in task.inherited:
            if isinstance(each, DataLoader):
                forget_workers(each)
        for file in files if rank or os.environ.get(IN_SCRATCH) == "1" else ():
            _make_own(file)
        return replace(task, function=called)

    def called() -> Any:
        try:
            return task.function()
        finally:
            _flush(files)  # the end of a forked process does not flush files

    def start(rank: int, pipe: int, outputs: dict[int, int]) -> Any:
        job = Job(rank, partial(settled, rank), variables(rank), 1, outputs, folder, pipe, os.getpid())
        with _without_collector() as collects:
            process = multiprocessing.get_context("fork").Process(target=_forked, args=(job, collects))
            process.start()
        return process

    return start


def _forked(job: Job, collects: bool) -> None:
    """Run ``job`` in a forked process. The caller's garbage is not collected there: a finalizer may wait for a thread of the caller."""
    gc.freeze()
    if collects:
        gc.enable()
    _forking.release()
    run(job)


@contextmanager
def _without_collector() -> Iterator[bool]:
    """Turn the garbage collector off in the block, which forks a process; one thread at a time. Yields whether it was on before."""
    with _forking:
        collects = gc.isenabled()
        try:
            gc.disable()
            yield collects
        finally:
            if collects:
                gc.enable()


def _spawns(task: Task, folder: Path, variables: Callable[[int], dict[str, str]], threads: int, backend: str | None, who: str) -> Start:
    """Return a function that starts a rank as a new interpreter."""
    file = folder / "task"
    pack(replace(task, inherited=[]), file, who)

    def start(rank: int, pipe: int, outputs: dict[int, int]) -> Any:
        own = {number: number for number in outputs}  # the interpreter begins with these descriptors
        job = Job(rank, partial(loaded, file, backend), variables(rank), None, own, folder, pipe, os.getpid())
        return Interpreter(job, outputs, threads=threads)

    return start


def _variables(size: int, folder: Path, share: bool, rank: int) -> dict[str, str]:
    """The environment variables that tell a rank its number, the number of ranks, the folder of the rendezvous, and to share GPUs."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0}
    variables = {f"PARWRAP_{name}": str(value) for name, value in place.items()} | {INIT_METHOD: f"{ONE_NODE}://job/{folder.name}"}
    return variables | ({BACKEND: "gloo"} if share else {})


def _refuse_fork(who: str) -> None:
    """Raise :class:`UsageError` if this process cannot fork ranks."""
    if multiprocessing.current_process().daemon:
        problem = "a daemonic process of multiprocessing cannot start processes: make this call in the main process"
    elif _cuda_has_started():
        problem = "CUDA has started here and does not work after a fork: make this call before anything is on a GPU and before "
        problem += "torch.cuda.is_available() is called, or use start_method='spawn'"
    else:
        return
    raise UsageError(f"{who} forks ranks from this process, but {problem}.")


def _cuda_has_started() -> bool:
    """Whether forked ranks could not use the GPUs: once torch has initialized CUDA, and also after ``torch.cuda.is_available()``."""
    if cuda_has_started() or not cuda_count():
        return cuda_has_started()
    reading, writing = os.pipe()
    with _starting(), _without_collector(), open(reading, "rb", buffering=0) as answer:
        child = os.fork()
        if not child:
            os.write(writing, bytes([is_in_bad_fork()]))
            os._exit(0)
        os.close(writing)
        works = answer.read(1) == b"\0"
        with suppress(ChildProcessError):  # SIGCHLD is ignored, or a handler waits for all children: no exit code is left
            os.waitpid(child, 0)
    return not works


def _is_regular(file: IOBase) -> bool:
    """Whether ``file`` is an open file on a disk, and not this process's output."""
    with suppress(OSError, ValueError):
        return file.fileno() > 2 and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    return False


def _flush(files: Sequence[IOBase]) -> None:
    for file in files:
        if not file.closed and file.writable():
            file.flush()


def _make_own(file: IOBase) -> None:
    """Separate ``file`` of this rank from the caller's.

    A file for reading keeps its position here. A file for reading and writing becomes a copy. What a file for writing gets is dropped.
    """
    descriptor = file.fileno()
    with ExitStack() as opened, suppress(FileNotFoundError):  # the file may have been removed
        path, position = os.devnull, 0
        if file.readable():
            path, position = path_of(descriptor), os.lseek(descriptor, 0, os.SEEK_CUR)
        if file.readable() and file.writable():
            path = shutil.copyfile(path, opened.enter_context(NamedTemporaryFile()).name)
        appends = os.O_APPEND if "a" in str(getattr(file, "mode", "")) else 0
        own = os.open(path, (os.O_RDWR if file.writable() else os.O_RDONLY) | appends)
        opened.callback(os.close, own)
        os.lseek(own, position, os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=False)


@contextmanager
def _starting() -> Iterator[None]:
    """Delay signals while processes are started: those that end a rank until it is ready, and Ctrl-C until all ranks are started.

    Python's warning about threads is suppressed, because torch's threads are handled.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Rank:
    """The process of one rank.

    Attributes:
        failed_at: the time of the rank's exception, in seconds of ``time.monotonic``, or 0 if the process ended without a report; otherwise
            ``None``.
        finished: whether the rank has reported its end.
        ended: whether the process has ended.
        how: how the process ended, if it ended without a report.
    """

    def __init__(self, start: Start, number: int) -> None:
        self.failed_at: float | None = None
        self.finished = self.ended = self._terminated = False
        self.how = ""
        self._output = ChildOutput()
        self._messages, theirs = os.pipe()
        try:
            self.process = start(number, theirs, self._output.outputs)
        except BaseException:
            os.close(self._messages)
            self._output.close()
            raise
        finally:
            os.close(theirs)
            self._output.started()
        self._pid = cast(int, self.process.pid)
        try:
            self.sentinel = os.pidfd_open(self._pid)
        except (AttributeError, OSError):  # an older system; multiprocessing's pipe stays open in processes that the rank has started
            self.sentinel = os.dup(self.process.sentinel)

    @property
    def sources(self) -> list[Any]:
        """The descriptors to wait for."""
        messages = [] if self.finished or self.failed_at is not None else [self._messages]
        return [self.sentinel, *messages, *self._output.sources]

    def receive(self) -> None:
        """Read the messages of the rank, and show its output."""
        if self.ended:
            return
        self._output.show()
        while wait([self._messages], 0) and (message := os.read(self._messages, MESSAGE.size)):
            (when,) = MESSAGE.unpack(message)
            if when:
                self.failed_at = when
            else:
                self.finished = True

    def end(self) -> None:
        """Let the process end, and release its resources. If the rank did not report its end, kill it with its children first."""
        if not self.ended:
            if not self.finished:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
                self.process.kill()
            self.process.join(GRACE)
            self.process.kill()
            self.process.join()
            self.receive()
            self.ended = True
            if not self.finished and self.failed_at is None and not self._terminated:
                self.how = _ending_of(self.process.exitcode)
                self.failed_at = 0.0
            try:
                self.process.close()
            except ValueError:  # something else has collected its exit code, so it is assumed to be alive
                cast(Any, self.process)._popen.close()
            self._output.close()
            os.close(self._messages)
            os.close(self.sentinel)

    def signal(self, number: int) -> None:
        """Send the rank the signal ``number``, to end it. SIGINT also goes to its children: a terminal's Ctrl-C does not reach them."""
        if not self.ended:
            self._terminated = True
            for send in (os.killpg, os.kill) if number == signal.SIGINT else (os.kill,):
                with suppress(ProcessLookupError):  # the process may not lead a process group yet
                    send(self._pid, number)
                    break


def _ending_of(code: int | None) -> str:
    """How a process has ended, in words. ``code`` is its exit code, or ``None`` if the code is unknown."""
    if code is None:
        return "ended (something else in this process, such as a SIGCHLD handler that waits for all children, has collected its exit code)"
    return how_ended(code)


@contextmanager
def _started(start: Start, size: int) -> Iterator[list[_Rank]]:
    """Start the ranks; none of them outlives the block."""
    ranks: list[_Rank] = []
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    try:
        if ignored:  # the system would then keep no exit codes
            with suppress(ValueError):  # only the main thread can set handlers
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with _starting():
            for number in range(size):
                ranks.append(_Rank(start, number))
        yield ranks
    finally:
        for rank in ranks:
            rank.end()
        if ignored:
            with suppress(ValueError):
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _watch(ranks: Sequence[_Rank]) -> bool:
    """Wait until all ranks have ended, or their grace period is over. Returns whether Ctrl-C was pressed."""
    deadline, interrupted = None, False
    while waiting := [rank for rank in ranks if not rank.ended]:
        try:
            _wait(waiting, deadline)
            if deadline is not None:
                if time.monotonic() > deadline:
                    break
            elif any(rank.failed_at is not None for rank in ranks):
                _wait(waiting, time.monotonic() + MOMENT)
                deadline = time.monotonic() + GRACE
                for rank in ranks:
                    if rank.failed_at is None:
                        rank.signal(signal.SIGTERM)
            elif all(rank.finished for rank in ranks):
                deadline = time.monotonic() + GRACE
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted, deadline = True, time.monotonic() + GRACE
            for rank in ranks:
                rank.signal(signal.SIGINT)
    return interrupted


def _wait(ranks: Sequence[_Rank], deadline: float | None) -> None:
    """Wait until a rank has sent something or has ended, or until ``deadline``, and handle it."""
    sources = [source for rank in ranks for source in rank.sources]
    ready = wait(sources, None if deadline is None else max(0.0, deadline - time.monotonic()))
    ended = [rank for rank in ranks if rank.sentinel in ready]
    for rank in ranks:
        rank.receive()
    for rank in ended:
        rank.end()


def _outcome(ranks: Sequence[_Rank], interrupted: bool, callers: CallersObjects, folder: Path) -> Any:
    """Give the caller's objects the state of rank 0, and return its result or raise the first failure."""
    end = callers.unpack(end_file(folder)) if ranks[0].finished else None
    if end is not None and end.state:
        callers.take(end.state)
        warn_of_changes(end.changed)
    failed = [(rank.failed_at, number) for number, rank in enumerate(ranks) if rank.failed_at is not None]
    if failed:
        number = min(failed)[1]
        who = f"rank {number} of {len(ranks)}"
        if how := ranks[number].how:
            raise RankMismatchError(f"{who} {how}{' (out of memory?)' if 'SIGKILL' in how else ''} before it finished.")
        raise callers.unpack(failure_file(folder, number)).error(who)
    if end is None or (interrupted and not all(rank.finished for rank in ranks)):
        raise KeyboardInterrupt
    return end.value
