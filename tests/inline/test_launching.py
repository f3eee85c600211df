"""Ranks that are forked from the test: what comes back from them, whose error is raised, and that none of them is left."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.inline.launching import run_on_ranks
from parwrap.inline.rank_process import failed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path_factory, monkeypatch):
    folder, mine = tmp_path_factory.mktemp("temporary"), psutil.Process()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    descriptors, children = mine.num_fds(), mine.children()
    yield
    ours = [name for name in os.listdir(folder) if name.startswith("parwrap-")]  # torch's cache is not
    assert (descriptors, children, []) == (mine.num_fds(), mine.children(), ours)


def test_rank_0_s_value_comes_back_and_all_ranks_are_one_group():
    def function():
        return {"sum": parwrap.reduce_sum(parwrap.rank() + 1), "size": parwrap.world_size(), "threads": torch.get_num_threads()}

    assert {"sum": 6, "size": 3, "threads": 1} == run_on_ranks(function, 3)


def test_ranks_compute_after_the_caller_has_computed_with_several_threads():
    torch.set_num_threads(2)
    try:
        weight = torch.randn(600, 600, requires_grad=True)
        (weight @ weight).sum().backward()
        assert run_on_ranks(lambda: (weight.detach() @ weight.detach()).shape, 2) == (600, 600)
    finally:
        torch.set_num_threads(1)


def test_what_rank_0_has_changed_in_the_callers_objects_is_changed_in_the_same_objects():
    class Own(nn.Module):  # found by no name
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 1)

    model, untouched = Own(), nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    average = torch.zeros(3)
    parameters, pointers = list(model.parameters()), [p.data_ptr() for p in model.parameters()]
    kept = untouched.weight.detach().clone()

    def train():
        x = torch.arange(8.0).view(4, 2) + parwrap.rank()
        model.head(model.norm(x)).sum().backward()
        optimizer.step()
        schedule.step()
        average.add_(1.0 + parwrap.rank())
        model.head2 = nn.Linear(1, 1)
        model.eval()
        return model, [optimizer.param_groups[0]["lr"]], Own

    def alone():
        torch.manual_seed(0)
        for module in (model.norm, model.head):
            module.reset_parameters()
        optimizer.state.clear()

    alone()
    back, rates, kind = run_on_ranks(train, 2)
    trained = [p.detach().clone() for p in parameters]

    assert back is model
    assert kind is Own
    assert [True] * 4 == [now is before for now, before in zip(list(model.parameters())[:4], parameters, strict=True)]
    assert pointers == [p.data_ptr() for p in parameters]
    assert [0.1 * 0.1] == pytest.approx(rates)
    assert rates == [optimizer.param_groups[0]["lr"]]
    assert [1.0] * 3 == average.tolist()
    assert isinstance(model.head2, nn.Linear)
    assert not model.training
    assert 1 == model.norm.num_batches_tracked
    assert 1.0 == optimizer.state[model.head.weight]["step"]
    assert 1 == schedule.last_epoch
    assert torch.equal(kept, untouched.weight)
    # the same in this process
    alone()
    optimizer.param_groups[0]["lr"] = 0.1
    model.train()
    for p in parameters:
        p.grad = None
    model.head(model.norm(torch.arange(8.0).view(4, 2))).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, trained, parameters))


def test_nothing_stays_here_that_the_next_ranks_would_be_looked_through_for():
    def tensors():
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    model = nn.Linear(1, 1)
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        for _ in range(3):
            run_on_ranks(lambda: model.weight.detach().fill_(1.0).sum().item(), 2)
        assert before == tensors()
    finally:
        gc.enable()


def test_a_model_that_is_built_in_the_function_comes_back():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    assert all(torch.equal(mine, back) for mine, back in zip(build().parameters(), run_on_ranks(build, 2).parameters(), strict=True))


class Refused(Exception):
    def __init__(self, what, *, why):
        super().__init__(what)
        self.why = why


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_error_is_raised_as_itself_with_its_traceback(first):
    class Local(Refused):
        """Nobody finds it by its name."""

    def function():
        if parwrap.rank() == first:
            try:
                raise Local("no", why=lambda: "why")
            except Local as error:
                failed(error)
                raise
        parwrap.barrier()

    with pytest.raises(Local, match=r"^no$") as caught:
        run_on_ranks(function, 2)
    told = str(caught.value.__cause__)
    assert f"rank {first} of 2 failed:\nTraceback" in told
    assert 'raise Local("no", why=lambda: "why")' in told
    assert "launched_rank.py" not in told


@pytest.mark.parametrize("error", [OSError(2, "no file"), KeyError("name"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")])
def test_errors_come_back_with_what_they_tell(error):
    def function():
        raise error

    with pytest.raises(type(error)) as caught:
        run_on_ranks(function, 1)
    assert repr(error) == repr(caught.value)
    assert str(error) == str(caught.value)


def test_what_was_trained_until_an_error_is_kept_also_if_another_rank_has_raised_it():
    trained = torch.zeros(1)

    def function():
        trained.add_(1.0)
        parwrap.barrier()
        if parwrap.rank() == 1:
            raise ArithmeticError
        threading.Event().wait()

    with pytest.raises(ArithmeticError):
        run_on_ranks(function, 2)
    assert 1.0 == trained.item()


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os._exit(7), r"^rank 1 of 2 ended with exit code 7 before it finished\.$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"^rank 1 of 2 was killed by SIGKILL \(out of memory\?\) before it finished.$"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_reported(end, text):
    def function():
        if parwrap.rank() == 1:
            batches = iter(DataLoader(range(100), num_workers=1))  # which outlives it for a while
            next(batches)
            end()
        parwrap.barrier()

    with pytest.raises(RankMismatchError, match=text):
        run_on_ranks(function, 2)


@pytest.mark.parametrize("handler", ["ignored", "reaps"])
def test_ranks_of_a_caller_that_ignores_sigchld_or_waits_for_all_children(handler):
    def reaps(number, frame):
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def dies():
        if parwrap.rank() == 1:
            os._exit(7)
        parwrap.barrier()

    handle = signal.SIG_IGN if handler == "ignored" else reaps
    before = signal.signal(signal.SIGCHLD, handle)
    try:
        assert 2 == run_on_ranks(parwrap.world_size, 2)
        with pytest.raises(RankMismatchError, match=r"^rank 1 of 2 ended(, with an exit code that something else| with exit code 7)"):
            run_on_ranks(dies, 2)
        assert handle == signal.getsignal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_leaving_by_sys_exit_leaves_the_caller_too():
    with pytest.raises(SystemExit) as left:
        run_on_ranks(sys.exit, 2)
    assert not left.value.code
    with pytest.raises(SystemExit) as left:
        run_on_ranks(lambda: sys.exit(3), 2)
    assert 3 == left.value.code


def test_what_cannot_be_sent_is_named():
    with pytest.raises(
        UsageError, match=r"^the result of rank 0, or a value that the function stored in .* cannot be sent to the caller: .*lock.*Use ten"
    ):
        run_on_ranks(threading.Lock, 2)


@pytest.mark.parametrize("start", ["launched", "daemonic", "cuda"])
def test_where_no_ranks_can_be_forked_this_is_said(start, monkeypatch):
    from parwrap.inline.forking import refuse_unforkable

    if start == "launched":
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        text = r"^it forks ranks from this process, and this is rank 1 of 2 already: call it in a process that was not launched as a rank.$"
    elif start == "daemonic":
        monkeypatch.setitem(sys.modules["multiprocessing"].current_process()._config, "daemon", True)
        text = "a daemonic process of multiprocessing cannot start processes"
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        text = "CUDA is initialized here, and does not work after a fork: call it before anything is on a GPU"
    with pytest.raises(UsageError, match=text):
        refuse_unforkable("it")


INTERRUPTED = """
import os, signal, subprocess, sys, threading, time
import torch, parwrap
from parwrap.inline.launching import run_on_ranks
from torch.utils.data import DataLoader

trained = torch.zeros(1)
def train():
    trained.add_(1)
    batches = iter(DataLoader(range(100), num_workers=1))
    next(batches)
    if sys.argv[1:]:
        subprocess.Popen(["sleep", "100"])
    try:
        parwrap.barrier()
        if parwrap.rank() == 0:
            print("ready", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        if "handles" not in sys.argv:
            raise
        return "handled"
try:
    print(run_on_ranks(train, 2, start_method="spawn" if "spawned" in sys.argv else "fork"), flush=True)
except KeyboardInterrupt:
    print("interrupted", trained.item(), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "printed"),
    [
        ("raises", "interrupted 1.0\n"),
        ("handles", "handled\n"),
        pytest.param("raises spawned", "interrupted 1.0\n", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_ranks_and_their_children_and_comes_back_unless_they_handle_it(how, printed, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", INTERRUPTED, *how.split()]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as caller:
        assert "ready\n" == caller.stdout.readline()
        children = psutil.Process(caller.pid).children(recursive=True)
        os.killpg(caller.pid, signal.SIGINT)
        out, err = caller.communicate(timeout=60)

    assert (0, printed, "") == (caller.returncode, out, err)
    assert len(children) == 6
    psutil.wait_procs(children, timeout=10)
    assert [] == [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert [] == os.listdir(tmp_path)


def test_a_caller_that_is_killed_takes_its_ranks_along(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], env=environ, stdout=subprocess.PIPE, text=True) as caller:
        assert "ready\n" == caller.stdout.readline()
        ranks = psutil.Process(caller.pid).children()
        caller.kill()
    until = time.monotonic() + 10
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.01)
