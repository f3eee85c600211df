"""``@hogwild`` in a plain process: the workers train the caller's model, and have ended when it returns."""

import contextlib
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from counting import counted, zeros
from parwrap.errors import RankMismatchError, UsageError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_the_callers_model_is_trained_on_all_of_the_data_each_sample_once():
    model = zeros()
    weight, place = model.weight, model.weight.data_ptr()

    @parwrap.hogwild(workers=3, lock=True)
    def train(model):
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=30)
        return model, parwrap.rank()

    assert (model, 0) == train(model)
    assert model.weight is weight
    assert place == weight.data_ptr()
    assert [[-30.0, -30.0]] == weight.tolist()


def test_a_model_that_is_built_inside_comes_back_trained():
    @parwrap.hogwild(workers=2, lock=True)
    def train():
        model = zeros()
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=10)
        return {"model": model}

    assert [[-10.0, -10.0]] == train()["model"].weight.tolist()


def test_an_optimizer_of_the_callers_goes_on_from_call_to_call_as_its_schedule_does():
    model = zeros()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    @parwrap.hogwild(workers=2)
    def train_epoch():
        counted(model, optimizer, samples=8)
        schedule.step()

    for _ in range(2):
        train_epoch()

    assert 8 == optimizer.state[model.weight]["step"]  # 4 in each call, on worker 0
    assert 0.25e-3 == optimizer.param_groups[0]["lr"]


def test_the_callers_model_learns_digits(capfd):
    """As well as by a single process: ``test_strategies.py``."""
    digits = runpy.run_path(str(EXAMPLES / "digits.py"))
    train_set, test_set = digits["digits"]()
    torch.manual_seed(0)
    model = digits["Net"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    @parwrap.hogwild(workers=2)
    def train():
        for _ in range(6):
            digits["train"](model, "cpu", DataLoader(train_set, batch_size=32, shuffle=True), optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that the caller has is lost on the workers
        train()

    assert digits["test"](model, "cpu", DataLoader(test_set, batch_size=256)) > 0.9
    assert re.search(
        r"^parwrap: 2 ranks, gloo on cpu, hogwild on shared parameters, batch 32 per rank, 1437 samples / 2 ranks, seed \d+\n$",
        capfd.readouterr().err,
    )


def test_workers_may_take_different_numbers_of_steps_and_evaluate_together():
    model = zeros()

    @parwrap.evaluate(reduce="sum")
    def evaluate(loader):
        return sum(len(rows) for (rows,) in loader)

    @parwrap.hogwild(workers=2, lock=True)
    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(1 + 9 * parwrap.rank()):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        return evaluate(DataLoader(TensorDataset(torch.arange(10)), batch_size=3)), parwrap.gather(parwrap.rank())

    assert (10, [0, 1]) == train()
    assert [[-11.0, -11.0]] == model.weight.tolist()


def test_closures_train_under_the_lock():
    model = zeros()

    @parwrap.hogwild(workers=2, lock=True, timeout=20)
    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def closure():
            optimizer.zero_grad()
            loss = model.weight.sum()
            loss.backward()
            return loss

        for _ in DataLoader(TensorDataset(torch.arange(10)), batch_size=1):
            optimizer.step(closure)

    train()
    assert [[-10.0, -10.0]] == model.weight.tolist()


class Assigns(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - p.grad


def test_what_a_step_puts_in_the_place_of_a_parameter_all_workers_have():
    model = zeros()

    @parwrap.hogwild(workers=2, lock=True, timeout=20)
    def train():
        counted(model, Assigns(model.parameters(), lr=1.0), samples=20)

    train()
    assert [[-20.0, -20.0]] == model.weight.tolist()


@pytest.mark.parametrize("before", ["step", *(pytest.param(each, marks=pytest.mark.slow) for each in ("evaluation", "end"))])
def test_what_a_loop_puts_in_the_place_of_a_parameter_all_workers_have(before):
    model = zeros()

    @parwrap.hogwild(workers=2, timeout=20)
    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        counted(model, optimizer, samples=20)
        parwrap.barrier()
        if parwrap.rank() == 0:
            model.weight.data = torch.full_like(model.weight, 5.0)
        if before == "evaluation":
            model.eval()
        if before == "step" and parwrap.rank() == 0:
            model.weight.sum().backward()
        parwrap.barrier()
        return parwrap.gather(model.weight.tolist())

    assert [[[5.0, 5.0]], [[5.0 * (before != "end")] * 2]] == train()
    assert [[5.0, 5.0]] == model.weight.tolist()


class OutOfData(Exception):
    pass


def test_an_error_in_a_worker_is_raised_in_the_caller_and_what_was_trained_is_kept():
    model = zeros()

    @parwrap.hogwild(workers=2)
    def train():
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=4)
        if parwrap.rank() == 1:
            raise OutOfData("no more")
        parwrap.barrier()

    with pytest.raises(OutOfData, match="no more") as caught:
        train()
    assert "in train\n    raise OutOfData" in str(caught.value.__cause__)
    assert model.weight.max() < 0


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '/no/where'$") as caught:
        parwrap.hogwild(workers=2)(lambda: os.listdir("/no/where"))()
    assert "/no/where" == caught.value.filename


def test_a_worker_that_is_gone_is_not_waited_for():
    @parwrap.hogwild(workers=2)
    def train():
        if parwrap.rank() == 1:
            os._exit(3)
        counted(zeros(), None, samples=0)

    with pytest.raises(RankMismatchError, match="rank 1 of 2 ended with exit code 3"):
        train()


@pytest.mark.slow
def test_each_call_draws_other_numbers_that_the_callers_seed_makes_repeatable():
    @parwrap.hogwild(workers=2)
    def order():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        return optimizer and [rows.item() for rows in DataLoader(torch.arange(20), batch_size=1, shuffle=True)]

    first, second = order(), order()
    torch.manual_seed(0)

    assert first != second
    assert first == order()
    assert parwrap.hogwild(workers=2, seed=3)(order)() == parwrap.hogwild(workers=2, seed=3)(order)()


def test_it_stacks_with_other_decorators_in_any_order_and_joins_itself():
    model = zeros()

    @parwrap.hogwild(workers=2, lock=True)
    def inner():
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=12)
        return torch.is_autocast_enabled("cpu"), parwrap.world_size()

    @parwrap.accumulate(2)
    @parwrap.hogwild(workers=2, lock=True)
    @parwrap.amp(dtype="bf16")
    @parwrap.distributed(uneven="drop")
    def outer():
        return inner()

    assert (True, 2) == outer()
    assert [[-6.0, -6.0]] == model.weight.tolist()  # 6 samples a worker are 3 steps


def test_what_is_caught_inside_is_no_failure():
    @parwrap.hogwild(workers=2)
    def inner():
        raise OutOfData

    @parwrap.hogwild(workers=2)
    def outer():
        with contextlib.suppress(OutOfData):
            inner()
        parwrap.barrier()
        return parwrap.gather(parwrap.rank())

    assert [0, 1] == outer()


def test_one_worker_is_the_caller_itself():
    @parwrap.hogwild(workers=1)
    def train():
        return os.getpid(), parwrap.world_size()

    assert (os.getpid(), 1) == train()


def test_methods_can_be_decorated_and_nothing_is_patched_in_the_caller():
    class Trainer:
        def __init__(self):
            self.model = zeros()

        @parwrap.hogwild(workers=2, lock=True)
        def fit(self):
            counted(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0), samples=2)

    before = torch.autograd.backward, print, DataLoader.__iter__
    trainer = Trainer()
    trainer.fit()

    assert [[-2.0, -2.0]] == trainer.model.weight.tolist()
    assert before == (torch.autograd.backward, print, DataLoader.__iter__)


@parwrap.hogwild(workers=2)
def train_nothing():
    pass


@pytest.mark.ranks(2)
def test_inside_a_rank_it_is_refused():
    with pytest.raises(UsageError, match=f"@parwrap.hogwild forks ranks from this process, and this is rank {parwrap.rank()} of 2 already"):
        train_nothing()
    with (
        parwrap.distributed(),
        pytest.raises(UsageError, match=r"not possible inside parwrap.distributed and parwrap.run: remove it and use "),
    ):
        train_nothing()


def test_other_workers_inside_are_refused():
    outer = parwrap.hogwild(workers=2)(lambda: parwrap.hogwild(workers=3)(train_nothing)())
    text = r"hogwild\(workers=3, lock=False\) cannot be called inside hogwild\(workers=2, lock=False\), whose workers are running"
    with pytest.raises(UsageError, match=text):
        outer()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers=0 is not a positive integer"),
        ({"workers": 2.0}, "workers=2.0 is not a positive integer"),
        ({"lock": "yes"}, "lock='yes' is neither True nor False"),
        ({"timeout": 0}, "timeout=0 is not a positive number of seconds"),
        ({"seed": -1}, "seed=-1 is not an integer"),
        ({"worker": 2}, r"parwrap.hogwild has no option 'worker'; did you mean 'workers'\?"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.hogwild(**options)


def test_a_block_is_refused():
    with pytest.raises(UsageError, match=r"`with parwrap.hogwild\(\):` has no function that other processes could run"), parwrap.hogwild():
        pass


def test_the_example_learns_to_classify_texts(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hogwild.py", "--workers", "2", "--samples", "4000", "--epochs", "2"])
    runpy.run_path(str(EXAMPLES / "hogwild.py"), run_name="__main__")

    assert 0.75 < float(re.search(r"^test accuracy (\S+)$", capfd.readouterr().out, re.MULTILINE)[1])
