"""A call that launches its ranks: they train what a single process would, and the caller ends as after a plain call."""

import functools
import itertools
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile

import psutil
import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it, which sets a variable
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError

ELSEWHERE = r"^parwrap: nprocs=3 starts no new ranks here: the function runs on the 2 existing ranks\.$"
STATE = {"calls": 0}


@pytest.fixture(autouse=True)
def _the_caller_is_left_as_it_was(tmp_path_factory, monkeypatch):
    folder, mine = tmp_path_factory.mktemp("temporary"), psutil.Process()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def facts():
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        return mine.num_fds(), mine.children(), environ, torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True)

    before = facts()
    yield
    monkeypatch.undo()
    assert before == facts()
    assert [] == [name for name in os.listdir(folder) if name.startswith("parwrap-")]
    assert not dist.is_initialized()


def regression():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return data, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def trained(data, model, optimizer, schedule, epochs=2):
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return model


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_callers_own_objects_are_trained_as_by_a_plain_call(start_method):
    _, model, optimizer, schedule = objects = regression()
    parameters = list(model.parameters())
    train = parwrap.distributed(batch="global", nprocs=2, start_method=start_method)(trained)

    assert train(*objects, epochs=2) is model
    assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]
    torch.testing.assert_close(trained(*regression()).state_dict(), model.state_dict())
    assert 2 == schedule.last_epoch
    assert 6 == optimizer.state[parameters[0]]["step"]


def test_training_goes_on_here_and_there():
    here, there = regression(), regression()
    train = parwrap.distributed(batch="global", nprocs=2)(trained)
    for _ in range(2):
        train(*there)
        trained(*there)
    for _ in range(4):
        trained(*here)
    torch.testing.assert_close(here[1].state_dict(), there[1].state_dict())
    torch.testing.assert_close(here[2].state_dict(), there[2].state_dict())


def test_random_streams_go_on_from_those_of_rank_0():
    def draw():
        return torch.rand(1).item()

    torch.manual_seed(0)
    launched = [parwrap.launch(draw, nprocs=2), parwrap.launch(draw, nprocs=2), draw()]
    torch.manual_seed(0)

    assert [draw(), draw(), draw()] == launched


def test_arguments_go_to_the_function_and_all_values_come_back_if_asked_for():
    def add(a, /, b=0, *, rank):
        return a + b + parwrap.rank() * rank

    assert 3 == parwrap.launch(add, 1, b=2, rank=10, nprocs=2)
    assert [3, 13, 23] == parwrap.launch(add, 1, 2, rank=10, nprocs=3, returns="all")
    assert ["nprocs"] * 2 == parwrap.launch(functools.partial(lambda nprocs: nprocs, nprocs="nprocs"), nprocs=2, returns="all")


def test_models_of_all_ranks_are_the_callers_and_copies_of_the_others():
    model = nn.Linear(1, 1, bias=False)

    @parwrap.distributed(strategy="none", nprocs=2, returns="all")
    def sweep():
        nn.init.constant_(model.weight, 1.0 + parwrap.rank())
        return model

    first, second = sweep()
    assert first is model
    assert [1.0, 2.0] == [first.weight.item(), second.weight.item()]


def test_what_launch_is_given_wins_over_what_the_function_is_decorated_with():
    @parwrap.distributed(nprocs=3, strategy="zero1", returns="all")
    def size():
        return parwrap.world_size()

    assert [3] * 3 == size()
    assert 2 == parwrap.launch(size, nprocs=2)
    assert [2, 2] == parwrap.launch(size, nprocs=2, returns="all")


@pytest.mark.parametrize(
    "order",
    [
        ("distributed", "amp", "sync_bn"),
        ("sync_bn", "amp", "distributed"),
        *(
            pytest.param(order, marks=pytest.mark.slow)
            for order in itertools.permutations(["amp", "distributed", "sync_bn"])
            if "amp" != order[1]
        ),
    ],
    ids="-".join,
)
def test_decorators_stack_in_any_order(order):
    def train(x):
        return parwrap.world_size(), nn.Linear(1, 1)(x).dtype, parwrap.amp_state() is not None

    decorators = {
        "distributed": parwrap.distributed(nprocs=2),
        "amp": parwrap.amp(dtype="bf16"),
        "sync_bn": parwrap.sync_bn,
    }
    for name in order:
        train = decorators[name](train)
    assert (2, torch.bfloat16, True) == train(torch.ones(1, 1))


class Trainer:
    def __init__(self):
        self.weight, self.epochs = torch.zeros(1), 0

    @parwrap.distributed(nprocs=2)
    def fit(self, by):
        self.weight.add_(by)
        return self, parwrap.world_size()

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


def test_methods_and_classes():
    trainer, mixed = Trainer(), Derived()

    assert 2 == trainer.fit(1.0)[1] == Trainer.size()
    assert 20 == mixed.fit(1.0)
    assert 30 == parwrap.launch(mixed.fit, 1.0, nprocs=3)
    assert 3 == parwrap.launch(trainer.fit, 1.0, nprocs=3)[1]
    assert [2.0, 2.0] == [trainer.weight.item(), mixed.weight.item()]


def test_inside_of_a_rank_a_call_joins_and_says_so_if_it_asked_for_others():
    @parwrap.distributed(nprocs=3, returns="all")
    def inner():
        return parwrap.rank()

    @parwrap.distributed(nprocs=2)
    def outer():
        with pytest.warns(UserWarning, match=ELSEWHERE):
            got = inner()
        return got, parwrap.launch(parwrap.world_size), parwrap.launch(inner, nprocs=2)

    assert ([0, 1], 2, 0) == outer()


@pytest.mark.ranks(2)
def test_ranks_that_are_there_win():
    @parwrap.distributed(nprocs=3, returns="all")
    def ranks():
        return parwrap.rank()

    with pytest.warns(UserWarning, match=ELSEWHERE):
        assert [0, 1] == ranks()
    assert parwrap.rank() == parwrap.launch(parwrap.rank, nprocs=2)
    with parwrap.distributed(nprocs=2):
        assert 2 == parwrap.world_size()


def test_one_rank_is_this_process():
    assert os.getpid() == parwrap.launch(os.getpid, nprocs=1) == parwrap.launch(os.getpid)
    assert [os.getpid()] == parwrap.launch(os.getpid, nprocs=1, returns="all")
    assert os.getpid() == parwrap.distributed(nprocs=1)(os.getpid)()
    with parwrap.distributed(nprocs=1):
        assert 1 == parwrap.world_size()


def test_a_launcher_that_has_started_one_rank_leaves_it_to_the_call(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert 2 == parwrap.launch(parwrap.world_size, nprocs=2)


def test_what_ranks_write_is_what_the_caller_writes(capsys):
    def write():
        print("rank 0 says")
        print("grüße", force=True)
        print("aside", file=sys.stderr)
        if parwrap.rank() == 0:
            subprocess.run(["echo", "by another program"], check=True)

    parwrap.launch(write, nprocs=2)
    out, err = capsys.readouterr()
    assert ["by another program", "grüße", "grüße", "rank 0 says"] == sorted(out.splitlines())
    assert "aside\n" == err


def test_loggers_of_the_caller_speak_in_ranks(capsys):
    logger, handler = logging.getLogger("of the caller"), logging.StreamHandler()
    logger.addHandler(handler)

    parwrap.launch(lambda: logger.error("rank %d", parwrap.rank()), nprocs=2)
    logger.error("the caller")

    assert ["[rank 1] ERROR:of the caller:rank 1", "rank 0", "the caller"] == sorted(capsys.readouterr().err.splitlines())


def test_a_question_that_nobody_can_answer():
    with pytest.raises(
        EOFError, match=r"^input\('name\? '\) was called on a launched rank, which has no stdin: ask before the launch, and pass"
    ):
        parwrap.launch(lambda: input("name? "), nprocs=2)


def test_a_test_may_be_skipped_from_a_rank():
    """Its exception says of itself that it is one of Python's own, and cannot be found by that name."""
    with pytest.raises(pytest.skip.Exception, match=r"^no gpu$"):
        parwrap.launch(lambda: pytest.skip("no gpu"), nprocs=2)


def test_a_rank_that_is_killed_is_named():
    def dies():
        if parwrap.rank() == 1:
            os._exit(3)
        parwrap.barrier()

    with pytest.raises(RankMismatchError, match=r"^rank 1 of 2 ended with exit code 3 before it finished\.$"):
        parwrap.launch(dies, nprocs=2)


@parwrap.distributed(nprocs=2, start_method="spawn", returns="all")
def counts(calls):
    def within():
        STATE["calls"] += calls

    within()
    return counted(), STATE is sys.modules[__name__].STATE, torch.get_num_threads()


def counted():
    return STATE["calls"]


def test_spawned_ranks_import_the_modules_of_functions_and_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))

    assert [(5, True, 2)] * 2 == counts(5)
    assert 0 == STATE["calls"]
