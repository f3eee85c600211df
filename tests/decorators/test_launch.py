"""``parwrap.launch`` and ``@distributed(nprocs=...)``: when a call starts ranks, and what it refuses."""

import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parwrap
from parwrap.errors import LaunchError, UsageError
from parwrap.inline import launching

STATE = {"calls": 0}
ELSEWHERE = (
    r"^parwrap: nprocs=3 has no effect here, because the function already runs on 2 ranks\. Remove nprocs=, or pass "
    r"it where the ranks are started\.$"
)


def test_arguments_go_to_the_function():
    def add(a, /, b=0, *, nprocs):
        return a + b + nprocs * parwrap.reduce_sum(1)

    assert 23 == parwrap.launch(functools.partial(add, nprocs=10), 1, b=2, nprocs=2)


def test_the_caller_is_left_as_it_was():
    def facts():
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        return environ, torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True), dist.is_initialized()

    before = facts()
    parwrap.launch(parwrap.world_size, nprocs=2)

    assert before == facts()


def test_launch_sets_the_number_of_ranks_and_the_decorator_the_rest():
    @parwrap.distributed(nprocs=3, strategy="zero1", seed=5)
    def facts():
        return parwrap.world_size(), torch.initial_seed(), os.getpid()

    assert (3, 5) == facts()[:2]
    assert (2, 5) == parwrap.launch(facts, nprocs=2)[:2]
    assert (1, 5, os.getpid()) == parwrap.launch(facts, nprocs=1)


@pytest.mark.parametrize("order", [("distributed", "amp"), ("amp", "distributed")], ids="-".join)
def test_decorators_stack_in_any_order(order):
    def train(x):
        return parwrap.world_size(), nn.Linear(1, 1)(x).dtype

    decorators = {"distributed": parwrap.distributed(nprocs=2), "amp": parwrap.amp(dtype="bf16")}
    for name in order:
        train = decorators[name](train)

    assert (2, torch.bfloat16) == train(torch.ones(1, 1)) == parwrap.launch(train, torch.ones(1, 1), nprocs=2)


class Trainer:
    def __init__(self):
        self.weight = torch.zeros(1)

    @parwrap.distributed(nprocs=2)
    def fit(self, by):
        self.weight.add_(by)
        return parwrap.world_size()

    @staticmethod
    @parwrap.distributed(nprocs=2)
    def size():
        return parwrap.world_size()


class Mixed(parwrap.DistributedMixin, parwrap.AmpMixin, strategy="zero1", nprocs=2):
    def __init__(self):
        self.weight = torch.zeros(1)

    def fit(self, by):
        self.weight.add_(by)
        return parwrap.world_size()


class Derived(Mixed):
    def fit(self, by):
        return super().fit(by) * 10


def test_methods():
    trainer, mixed = Trainer(), Derived()

    assert 2 == trainer.fit(1.0) == Trainer.size()
    assert 3 == parwrap.launch(trainer.fit, 1.0, nprocs=3)
    assert 20 == mixed.fit(1.0)
    assert 30 == parwrap.launch(mixed.fit, 1.0, nprocs=3)
    assert [2.0, 2.0] == [trainer.weight.item(), mixed.weight.item()]


@parwrap.distributed(nprocs=3)
def inner():
    return parwrap.world_size()


def test_inside_of_a_rank_a_call_joins_and_says_so_if_it_asked_for_others():
    @parwrap.distributed(nprocs=2)
    def outer():
        with pytest.warns(UserWarning, match=ELSEWHERE):
            return inner(), parwrap.launch(parwrap.world_size), parwrap.launch(inner, nprocs=2)

    assert (2, 2, 2) == outer()


@pytest.mark.ranks(2)
def test_ranks_that_a_launcher_has_started_are_used():
    with pytest.warns(UserWarning, match=ELSEWHERE):
        assert 2 == inner()
    assert parwrap.rank() == parwrap.launch(parwrap.rank, nprocs=2)
    with parwrap.distributed(nprocs=2):
        assert 2 == parwrap.world_size()


def test_one_rank_is_this_process():
    assert os.getpid() == parwrap.launch(os.getpid, nprocs=1) == parwrap.launch(os.getpid) == parwrap.distributed(nprocs=1)(os.getpid)()
    with parwrap.distributed(nprocs=1):
        assert 1 == parwrap.world_size()


def test_a_launcher_that_has_started_one_rank_leaves_the_rest_to_the_call(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    assert 2 == parwrap.launch(parwrap.world_size, nprocs=2)


def test_what_ranks_write_is_shown_where_the_caller_writes(capsys):
    logger = logging.getLogger("of the caller")
    logger.addHandler(handler := logging.StreamHandler())

    def write():
        print("rank 0 says")
        print("grüße", force=True)
        logger.error("rank %d", parwrap.rank())
        if parwrap.rank() == 0:
            subprocess.run(["echo", "another program"], check=True)

    parwrap.launch(write, nprocs=2)
    logger.error("the caller")
    logger.removeHandler(handler)
    out, err = capsys.readouterr()

    assert ["another program", "grüße", "grüße", "rank 0 says"] == sorted(out.splitlines())
    assert "rank 0\nthe caller\n" == err


def test_nobody_can_answer_a_question():
    with pytest.raises(
        EOFError, match=r"^input\('name\? '\) was called on a launched rank, which has no stdin: ask before the call, and pas"
    ):
        parwrap.launch(lambda: input("name? "), nprocs=2)


@pytest.mark.slow
def test_spawned_ranks_import_the_modules_of_functions_and_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))

    def within(calls):
        STATE["calls"] += calls
        return counted(), STATE is sys.modules[__name__].STATE, torch.get_num_threads()

    assert (5, True, 2) == parwrap.launch(within, 5, nprocs=2, start_method="spawn")
    assert 0 == STATE["calls"]


def counted():
    return STATE["calls"]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"nprocs": 0}, r"^nprocs=0 is not a positive number of ranks, nor 'gpu', 'cpu' or 'auto'\.$"),
        ({"nprocs": True}, r"^nprocs=True is not a positive number of ranks"),
        ({"nprocs": "two"}, r"^nprocs='two' is not a positive number of ranks"),
        (
            {"start_method": "thread"},
            r"^start_method='thread' is not a valid value\. Choose one of: None: on Linux, ranks are forked from the c",
        ),
    ],
)
def test_a_value_that_does_not_exist_is_an_error_at_once(asked, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**asked)
    with pytest.raises(UsageError, match=text):
        parwrap.launch(print, **asked)


def test_a_call_in_place_of_a_function():
    with pytest.raises(
        UsageError, match=r"^parwrap\.launch takes a function .*, not 3: instead of train\(3\), write parwrap\.launch\(train, 3"
    ):
        parwrap.launch(3, nprocs=2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nproc": 2}, r"takes no argument 'nproc', which parwrap\.launch would pass to it\. Did you mean nprocs=2\?$"),
        (
            {"strategy": "zero1"},
            r"train \(.*\.py:\d+\) takes no argument 'strategy', which .*\. 'strategy' is an option of parwrap\.distributed: decorate the "
            r"function, or call parwrap\.launch\(parwrap\.distributed\(strategy='zero1'\)\(train\), \.\.\., nprocs=2\)\.$",
        ),
    ],
)
@pytest.mark.parametrize("decorator", [lambda function: function, parwrap.distributed(nprocs=2)], ids=["plain", "decorated"])
def test_an_option_that_neither_launch_nor_the_function_takes(decorator, given, text):
    @decorator
    def train(epochs, batch="own"):
        return batch

    with pytest.raises(UsageError, match=text):
        parwrap.launch(train, 1, **given, nprocs=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        parwrap.launch(train, epoch=1, nprocs=1)
    assert "mine" == parwrap.launch(train, 1, batch="mine", nprocs=1)
    assert {"strategy": "mine"} == parwrap.launch(lambda **options: options, strategy="mine", nprocs=1)


def test_a_block_cannot_start_ranks():
    with (
        pytest.raises(
            UsageError, match=r"^`with parwrap\.distributed\(nprocs=2\):` has no function that other processes could run: decorate"
        ),
        parwrap.distributed(nprocs=2),
    ):
        pass


def test_the_machine_must_have_as_many_gpus(monkeypatch):
    with pytest.raises(
        LaunchError, match=r"^nprocs='gpu' starts a rank on each GPU, but torch cannot use a GPU here: set a number of ranks"
    ):
        parwrap.launch(print, nprocs="gpu")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else the driver counts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # stands for a machine that has them
    with pytest.raises(
        LaunchError,
        match=r"^nprocs=3 starts 3 ranks, but torch can use 2 GPUs here, and backend='nccl' needs one for each rank. "
        r"Use at most 2, or leave out backend= to let ranks share GPUs over gloo\.$",
    ):
        launching.number_of_ranks(3, "nccl")


def test_ranks_share_gpus_over_gloo_where_there_are_too_few(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else the driver counts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # stands for a machine with a GPU
    monkeypatch.setattr(launching, "_cuda_has_started", lambda: False)
    task = launching.Task(lambda: os.environ.get("PARWRAP_BACKEND"), [], dict)

    with pytest.warns(UserWarning, match=r"^parwrap: 2 ranks share 1 GPU over gloo, .* Add backend='gloo' to hide this message\.$"):
        assert "gloo" == launching.run_on_ranks(task, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launching.run_on_ranks(task, 2, backend="gloo") is None


def test_ranks_are_spawned_with_cloudpickle_once_cuda_has_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # stands for a GPU in use
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    with pytest.raises(
        UsageError, match=r"CUDA has started here and .* torch\.cuda\.is_available\(\) is called, or use start_method='spawn'\.$"
    ):
        parwrap.launch(print, nprocs=2, start_method="fork")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        UsageError,
        match=r"^parwrap\.distributed with nprocs=2 starts ranks in new interpreters here, but cloudpickle, which sends functions to them, "
        r"is not installed: pip install cloudpickle, or parwrap\[notebook\]\. On Linux, ranks are forked and need no cloudpickle if",
    ):
        parwrap.launch(print, nprocs=2)


def test_asking_the_driver_for_gpus_starts_cuda_too(monkeypatch):
    caller = os.getpid()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else the driver counts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # stands for a machine with a GPU
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)  # whatever another test has asked
    assert not launching._cuda_has_started()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != caller)  # as after torch.cuda.is_available()
    assert launching._cuda_has_started()


def test_gpus_are_asked_for_where_sigchld_is_ignored(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else the driver counts
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # stands for a machine with a GPU
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for started in (False, True):
            monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda started=started: started)
            assert started == launching._cuda_has_started()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_daemonic_process_cannot_start_ranks(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(
        UsageError, match="a daemonic process of multiprocessing cannot start processes: make this call in the main process"
    ):
        parwrap.launch(print, nprocs=2)


def test_what_spawned_ranks_cannot_be_sent_is_named():
    lock, text = (
        threading.Lock(),
        r"here, and {}, which the function uses, cannot be sent to them: cannot pickle '_thread\.lock' object\. Create",
    )
    with pytest.raises(UsageError, match=text.format("lock")):
        parwrap.launch(lambda: lock, nprocs=2, start_method="spawn")
    with pytest.raises(UsageError, match=text.format("given")):
        parwrap.launch(lambda given: None, [lock], nprocs=2, start_method="spawn")
