"""Ranks that a call starts: what comes back, whose error is raised, and that nothing of them is left."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.loop import interrupts

ROOT = Path(__file__).parents[2]


def _short():
    """A folder with a short path: multiprocessing makes sockets there, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


temporary, ours = pytest.fixture(_short), pytest.fixture(_short)


@pytest.fixture(autouse=True)
def _nothing_is_left(ours, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", ours)
    mine = psutil.Process()
    files, children = mine.num_fds(), set(mine.children())  # what an earlier test has left may be gone later

    def left():
        return mine.num_fds() - files > 0, set(mine.children()) - children

    yield
    until = time.monotonic() + 20
    while left() != (False, set()) and time.monotonic() < until:
        time.sleep(0.01)  # a thread of a queue to a loader's worker closes its pipe a moment after
        gc.collect()
    assert (False, set()) == left()
    assert [] == [str(path) for path in Path(ours).glob("parwrap-*/*") if path.name != "lock"]


def test_the_value_of_rank_zero_comes_back_from_a_group_of_ranks():
    def function():
        return {"sum": parwrap.reduce_sum(parwrap.rank() + 1), "size": parwrap.world_size(), "threads": torch.get_num_threads()}

    assert {"sum": 6, "size": 3, "threads": 1} == parwrap.launch(function, nprocs=3)


def test_ranks_compute_after_the_caller_has_computed_with_several_threads():
    torch.set_num_threads(2)
    try:
        weight = torch.randn(600, 600, requires_grad=True)
        (weight @ weight).sum().backward()
        assert (600, 600) == parwrap.launch(lambda: (weight.detach() @ weight.detach()).shape, nprocs=2)
    finally:
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Frozen(Exception):
    step: int


class Picky(Exception):
    def __init__(self, text, *, detail):
        super().__init__(text)
        self.detail = detail


class Local(Exception):
    __qualname__ = "test.<locals>.Local"


def raising(error, on):
    if parwrap.rank() == on:
        raise error
    parwrap.barrier()


@pytest.mark.parametrize(
    "error",
    [
        Picky("no", detail="why"),
        OSError(2, "no file"),
        *(
            pytest.param(error, marks=pytest.mark.slow)
            for error in (
                Picky("no", detail=lambda: "why"),
                Local("local"),
                TimeoutError("late"),
                UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
                ModuleNotFoundError("no module", name="none"),
            )
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_error_of_a_rank_is_raised_as_itself_with_the_ranks_traceback(error):
    with pytest.raises(type(error)) as caught:
        parwrap.launch(raising, error, on=1, nprocs=2)

    told = str(caught.value.__cause__)
    assert (error.args, str(error)) == (caught.value.args, str(caught.value))
    assert told.startswith("\nrank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert "    raise error\n" in told
    assert "inline" not in told.replace(__file__, "")


def test_the_error_is_of_the_rank_that_failed_first():
    for first in (0, 1):
        with pytest.raises(ArithmeticError):
            parwrap.launch(raising, ArithmeticError(), on=first, nprocs=2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_members_of_a_group_of_errors_are_themselves():
    group = ExceptionGroup("several", [Frozen(3), ExceptionGroup("inner", [Picky("often", detail="or not")])])  # noqa: F821

    with pytest.raises(type(group), match="several") as raised:
        parwrap.launch(raising, group, on=1, nprocs=2)

    assert repr(group.exceptions) == repr(raised.value.exceptions)


def test_a_test_may_be_skipped_from_a_rank():
    """The exception claims to be one of Python's own."""
    with pytest.raises(pytest.skip.Exception, match=r"^no gpu$"):
        parwrap.launch(lambda: pytest.skip("no gpu"), nprocs=2)


def test_an_error_keeps_what_was_trained_until_then_also_if_another_rank_raised_it(monkeypatch):
    monkeypatch.setattr(interrupts, "LONGEST", 0.3)  # rank 0 reaches no backward
    trained = torch.zeros(1)

    def function():
        trained.add_(1.0)
        parwrap.barrier()
        if parwrap.rank() == 1:
            raise ArithmeticError
        threading.Event().wait(20)

    with pytest.raises(ArithmeticError):
        parwrap.launch(function, nprocs=2)
    assert 1.0 == trained.item()


def leaves(code):
    os._exit(code)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: leaves(7), r"^rank 1 of 2 ended with exit code 7 before it finished\.$"),
        (is_killed, r"^rank 1 of 2 was killed by SIGKILL \(out of memory\?\) before it finished\.$"),
    ],
)
def test_a_rank_that_ends_without_a_report_is_named(end, text):
    def function():
        if parwrap.rank() == 1:
            batches = iter(DataLoader(range(100), num_workers=1))  # the worker outlives it for a while
            next(batches)
            end()
        parwrap.barrier()

    with pytest.raises(RankMismatchError, match=text):
        parwrap.launch(function, nprocs=2)


@pytest.mark.slow  # beside all other tests of a worker, children of this one were there for seconds after it
@pytest.mark.parametrize("handler", ["ignored", "reaps"])
def test_a_caller_that_ignores_sigchld_or_waits_for_all_children(handler):
    def reaps(number, frame):
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    handle = signal.SIG_IGN if handler == "ignored" else reaps
    before = signal.signal(signal.SIGCHLD, handle)
    try:
        assert 2 == parwrap.launch(parwrap.world_size, nprocs=2)
        with pytest.raises(RankMismatchError, match=r"^rank \d of 2 ended( \(something else in this process| with exit code 7)"):
            parwrap.launch(leaves, 7, nprocs=2)
        assert handle == signal.getsignal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_sys_exit_on_the_ranks_exits_the_caller_too():
    for code in (None, 0, 3):
        with pytest.raises(SystemExit) as left:
            parwrap.launch(sys.exit, code, nprocs=2)
        assert code == left.value.code


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(UsageError, match=r"^the result of rank 0 cannot be sent to the caller: .*lock.* Return te"):
        parwrap.launch(threading.Lock, nprocs=2)
    trained = torch.zeros(1)
    with pytest.raises(UsageError, match=r"^the result of rank 0"):
        parwrap.launch(lambda: trained.add_(1) and threading.Lock(), nprocs=2)

    assert 1.0 == trained.item()


def test_a_value_stored_in_the_callers_model_that_cannot_be_sent_is_an_error():
    model = torch.nn.Linear(1, 1)

    def store():
        class Local(torch.nn.Module):
            pass

        model.add_module("added", Local())

    text = r"^a value that the function stored in one of the caller's objects cannot be sent to the caller: .*Local.* Store tensors"
    with pytest.raises(UsageError, match=text):
        parwrap.launch(store, nprocs=2)


def test_ranks_come_apart():
    def function():
        if parwrap.rank() == 0:
            parwrap.barrier()

    with pytest.raises(parwrap.LockstepError, match="the ranks have come apart"):
        parwrap.launch(function, nprocs=2)


def test_the_callers_event_loop_hears_no_signals_of_ranks(monkeypatch):
    monkeypatch.setattr(interrupts, "LONGEST", 0.3)  # rank 0 reaches no backward

    def one_fails():
        if parwrap.rank() == 1:
            raise ValueError("one fails")
        signal.pause()

    async def serve():
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        with pytest.raises(ValueError, match="one fails"):
            await asyncio.to_thread(parwrap.launch, one_fails, nprocs=2)
        await asyncio.sleep(0.1)
        return told.is_set()

    assert not asyncio.run(serve())


def test_a_system_without_descriptors_of_processes(monkeypatch):
    def missing(process):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing, raising=False)

    assert 2 == parwrap.launch(parwrap.world_size, nprocs=2)


@pytest.mark.parametrize(("ends", "status"), [(lambda: sys.exit(5), 5), (lambda: 1 / 0, 1), (lambda: None, 0)])
def test_a_process_that_the_function_forks_ends_by_itself(ends, status):
    def function():
        child = os.fork()
        if not child:
            return ends()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with tempfile.TemporaryDirectory() as folder:
        assert status == parwrap.launch(function, nprocs=2)
        assert os.path.isdir(folder)


def test_ranks_leave_garbage_of_the_caller_alone():
    """The end of a C++ object there would wait for threads that only the caller has."""
    ours, theirs = os.pipe()

    class InCycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            os.write(theirs, f"{os.getpid()} ".encode())

    def function():
        InCycle()
        gc.collect()
        return gc.isenabled()

    gc.disable()
    try:
        InCycle()
        assert not parwrap.launch(function, nprocs=2)
    finally:
        gc.enable()
        gc.collect()
        os.close(theirs)
    with open(ours) as pipe:
        finalized_in = pipe.read().split()

    assert 3 == len(finalized_in) == len({*finalized_in})  # each process its own
    assert parwrap.launch(gc.isenabled, nprocs=2)


def test_a_call_leaves_no_environment_variable_behind():
    code = "import os, parwrap; before = {**os.environ}; parwrap.launch(lambda: None, nprocs=2); assert before == {**os.environ}"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_files_that_the_caller_is_writing(tmp_path):
    """Nothing of them is written twice or lost."""
    log = open(tmp_path / "log.txt", "w")  # noqa: SIM115
    log.write("header\n")

    def function():
        log.write(f"rank {parwrap.rank()}\n")

    parwrap.launch(function, nprocs=2)
    log.write("footer\n")
    log.close()

    assert "header\nrank 0\nfooter\n" == (tmp_path / "log.txt").read_text()


def test_files_that_the_caller_also_reads(tmp_path):
    """Each rank has its own position, and only rank 0 writes."""
    (tmp_path / "data.txt").write_text("abc")
    data, both = open(tmp_path / "data.txt"), open(tmp_path / "both.txt", "w+")  # noqa: SIM115
    appended = open(tmp_path / "appended.txt", "a+")  # noqa: SIM115
    for each in (both, appended):
        each.write("header\n")

    def function():
        for each in (both, appended):
            each.write(f"rank {parwrap.rank()}\n")
        both.seek(0)
        return parwrap.gather((data.read(), both.read()))

    with data, both, appended:
        assert [("abc", "header\nrank 0\n"), ("abc", "header\nrank 1\n")] == parwrap.launch(function, nprocs=2)

    for name in ("both.txt", "appended.txt"):
        assert "header\nrank 0\n" == (tmp_path / name).read_text()


def test_a_loader_whose_workers_belong_to_the_caller():
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    deep = [[[loader]]]
    assert 4 == len(list(loader))

    assert [4, 4] == parwrap.launch(lambda: [len(list(deep[0][0][0])) for _ in range(2)], nprocs=2)
    assert 4 == len(list(loader))
    loader._iterator = None
    gc.collect()


IN_A_PACKAGE = """
import parwrap

def where():
    from .helper import name
    import __main__
    return name, __main__.__file__, __main__.__spec__.name

if __name__ == "__main__":
    assert where() == parwrap.launch(where, nprocs=2, start_method="spawn")
"""


@pytest.mark.slow
def test_a_new_interpreter_knows_the_package_of_main(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for name, text in {"__init__": "", "helper": "name = __name__", "train": IN_A_PACKAGE}.items():
        (package / f"{name}.py").write_text(text)

    command = [sys.executable, "-m", "package.train"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (0, "") == (ended.returncode, ended.stderr)


INTERRUPTED = """
import os, signal, subprocess, sys, threading
import torch, parwrap
from parwrap.loop import interrupts
from torch.utils.data import DataLoader

interrupts.LONGEST = 0.3  # no backward comes
trained = torch.zeros(1)
def train():
    trained.add_(1)
    batches = iter(DataLoader(range(100), num_workers=1))
    next(batches)
    if "dies" not in sys.argv:
        subprocess.Popen(["sleep", "100"])
    try:
        parwrap.barrier()
        print("ready", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        if "handles" not in sys.argv:
            raise
        return "handled"
try:
    print(parwrap.launch(train, nprocs=2, start_method="spawn" if "spawned" in sys.argv else "fork"), flush=True)
except KeyboardInterrupt:
    print("interrupted", trained.item(), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "printed"),
    [
        ("raises", "interrupted 1.0\n"),
        pytest.param("handles", "handled\n", marks=pytest.mark.slow),
        pytest.param("raises spawned", "interrupted 1.0\n", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_ranks_and_their_children_unless_they_handle_it(how, printed, temporary):
    command = [sys.executable, "-c", INTERRUPTED, *how.split()]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": temporary},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as caller:
        assert "ready\n" == caller.stdout.readline()
        children = psutil.Process(caller.pid).children(recursive=True)
        os.killpg(caller.pid, signal.SIGINT)
        out, _ = caller.communicate(timeout=60)

    assert (0, printed) == (caller.returncode, out)
    assert 6 == len(children)
    psutil.wait_procs(children, timeout=10)
    assert [] == [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_ranks_end_with_a_caller_that_is_killed(temporary):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": temporary}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, "dies"], env=environ, stdout=subprocess.PIPE, text=True) as caller:
        assert "ready\n" == caller.stdout.readline()
        ranks = psutil.Process(caller.pid).children()
        caller.kill()
    until = time.monotonic() + 10
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.01)
