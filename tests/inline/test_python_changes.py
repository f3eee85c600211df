"""What a function changes in Python objects on launched ranks is changed in the caller's, in place, and what cannot be sent is named."""

import array
import functools
import itertools
import random
import threading
import warnings
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import parwrap

BEST = None
METHODS = pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def _without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="parwrap: BatchNorm layers train on batches of 2")  # said once by a process
        yield


class Slotted:
    __slots__ = ("epoch", "loss")


@dataclass(frozen=True)
class Frozen:
    values: list


@dataclass
class Node:
    name: str
    next: Any = None
    seen: list = field(default_factory=list)


class AttributeDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class ReadOnly:
    def __init__(self):
        vars(self)["value"] = 1

    def __setattr__(self, name, value):
        raise AttributeError(name)


class Trainer:
    """As people write it."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, shuffle=True)
        self.history, self.best, self.epoch = [], {"loss": float("inf"), "weight": None}, 0
        self.slotted, self.recent, self.seen = Slotted(), deque(maxlen=3), set()
        self.counts, self.ordered = Counter(), OrderedDict(a=1, b=2)
        self.array, self.temporary, self.tensors = np.zeros(4), 1, []
        self.myself = self

    def fit(self, epochs=2):
        for epoch in range(epochs):
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                loss = self.model(x).sum()
                loss.backward()
                self.optimizer.step()
                self.counts["steps"] += 1
            self.history.append({"epoch": epoch, "best": self.best})
            self.epoch += 1
            self.best["loss"], self.best["weight"] = epoch, self.model.weight.detach().clone()
            self.slotted.epoch = epoch
            self.recent.append(epoch)
            self.seen.add(epoch)
            self.array[epoch] = epoch + 1
            self.tensors.append(self.model.bias)
        self.ordered.move_to_end("a")
        self.new = self.history
        self.model.tag = self.best
        del self.temporary
        return self


@METHODS
def test_a_trainer_is_afterwards_as_a_plain_call_leaves_it(start_method):
    trainer, plain = Trainer(), Trainer()
    plain.model.load_state_dict(trainer.model.state_dict())
    history, best, array = trainer.history, trainer.best, trainer.array

    back = parwrap.launch(trainer.fit, nprocs=2, start_method=start_method)
    with parwrap.distributed():
        plain.loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
        plain.fit()

    assert back is trainer is trainer.myself
    assert history is trainer.history is trainer.new
    assert best is trainer.best is trainer.model.tag is history[0]["best"] is history[1]["best"]
    assert (plain.epoch, plain.counts, plain.seen, plain.recent) == (trainer.epoch, trainer.counts, trainer.seen, trainer.recent)
    assert ["b", "a"] == list(trainer.ordered)
    assert (1, False) == (trainer.slotted.epoch, hasattr(trainer.slotted, "loss"))
    assert array is trainer.array
    assert [1.0, 2.0, 0.0, 0.0] == array.tolist()
    assert 1 == best["loss"]
    torch.testing.assert_close(plain.best["weight"], best["weight"])
    assert all(each is trainer.model.bias for each in trainer.tensors)
    assert not hasattr(trainer, "temporary")


class Registry:
    items: dict = {}  # noqa: RUF012
    count = 0


def register():
    global BEST
    BEST = "registered"
    Registry.items["a"] = 1
    Registry.count += 1


def test_globals_and_attributes_of_classes_are_changed():
    global BEST
    BEST, Registry.count = None, 0
    Registry.items.clear()
    parwrap.launch(register, nprocs=2)

    assert ("registered", {"a": 1}, 1) == (BEST, Registry.items, Registry.count)


def test_what_spawned_ranks_have_from_an_import_is_not_the_callers_and_is_named():
    global BEST
    BEST, Registry.count = None, 5
    Registry.items.clear()
    with pytest.warns(UserWarning, match="^parwrap: the function changed") as warned:
        parwrap.launch(register, nprocs=2, start_method="spawn")

    (text,) = {str(each.message) for each in warned}
    of_module = "(which was not sent to the ranks, because it is in a module that they import)"
    assert all(f"{name} {of_module}" in text for name in ("BEST", "Registry.count", "Registry.items['a']"))
    assert (None, {}, 5) == (BEST, Registry.items, Registry.count)


@METHODS
def test_closures_defaults_and_attributes_of_functions_are_changed(start_method):
    best, count = None, 0

    def train(kept=[]):  # noqa: B006
        nonlocal best, count
        best = {"loss": 0.5}
        count += 1
        kept.append(best)
        train.calls = 3

    parwrap.launch(train, nprocs=2, start_method=start_method)

    assert ({"loss": 0.5}, 1, 3) == (best, count, train.calls)
    assert train.__defaults__[0][0] is best


@METHODS
def test_arguments_keep_what_they_share(start_method):
    def change(items, table, matrix, row, node):
        items[0]["changed"] = True
        items.append(table)
        table["itself"] = table
        row += 1
        matrix[0, 0] = 5
        node.next.seen.append(node)
        node.next, node.extra = None, node.next

    items, table, matrix, first, second = [{}], {}, np.zeros((2, 2)), Node("first"), Node("second")
    first.next, second.next, inner, row = second, first, items[0], matrix[1]
    parwrap.launch(change, items, table, matrix, row, first, nprocs=2, start_method=start_method)

    assert {"changed": True} == inner
    assert inner is items[0]
    assert items[1] is table is table["itself"]
    assert [[5.0, 0.0], [1.0, 1.0]] == matrix.tolist()
    assert row.base is matrix
    assert (None, second) == (first.next, first.extra)
    assert second.seen[0] is first


def test_the_result_is_that_of_rank_0():
    ranks = []
    parwrap.launch(lambda: ranks.append(parwrap.rank()), nprocs=3)

    assert [0] == ranks


def test_objects_with_ways_of_their_own_to_be_set_are_changed():
    attributes, read_only, frozen = AttributeDict(a=1), ReadOnly(), Frozen([])
    event, objects = threading.Event(), np.array([None, []], dtype=object)

    def change():
        attributes.a, attributes.new = 2, [1]
        vars(read_only)["value"] = 2
        frozen.values.append(1)
        event.set()
        objects[0] = objects[1]
        objects[1].append(3)

    parwrap.launch(change, nprocs=2)

    assert ({"a": 2, "new": [1]}, 2, [1], True) == (attributes, read_only.value, frozen.values, event.is_set())
    assert [3] == objects[0]
    assert objects[0] is objects[1]


def test_random_generators_go_on():
    generators = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
    same = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)

    def draw(generators):
        one, two, three = generators
        return torch.rand(1, generator=one).item(), two.random(), three.random()

    parwrap.launch(draw, generators, nprocs=2)
    draw(same)

    assert draw(same) == draw(generators)


@METHODS
def test_estimators_data_frames_and_attributes_of_modules_are_changed(start_method):
    estimator, frame = LinearRegression(), pd.DataFrame({"a": [1.0, 2.0]})
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].outputs, model[0]._best = [], None

    def change():
        estimator.fit(np.eye(2), np.ones(2))
        frame.loc[0, "a"] = 7.0
        frame["b"] = 1
        model[0].outputs.append(model(torch.zeros(1, 1)).shape)
        model[0]._best = 0.5

    parwrap.launch(change, nprocs=2, start_method=start_method)

    assert (2,) == estimator.coef_.shape
    assert {"a": [7.0, 2.0], "b": [1, 1]} == frame.to_dict("list")
    assert ([(1, 1)], 0.5) == (model[0].outputs, model[0]._best)


class Writing:
    def __init__(self):
        self.writer, self.history, self.epoch = None, {}, 0

    def fit(self):
        self.writer, self.epoch = open("/dev/null", "w"), 1  # noqa: SIM115
        self.history["lock"], self.history["loss"] = threading.Lock(), 0.5


@METHODS
def test_what_cannot_be_sent_is_named_in_one_warning_at_the_users_line(start_method):
    writing = Writing()
    with pytest.warns(UserWarning, match="^parwrap: the function changed") as warned:
        parwrap.launch(writing.fit, nprocs=2, start_method=start_method)

    (text,), (file,) = ({str(each.message) for each in warned}, {each.filename for each in warned})
    assert text.startswith("parwrap: the function changed self.writer (")
    assert (
        "self.history['lock'] (TypeError: cannot pickle '_thread.lock' object) on its ranks, but the change cannot be sent to this pro"
        in text
    )
    assert text.endswith("process, where it stays unchanged. Create it inside the function, or return what you need of it.")
    assert __file__ == file
    assert (None, 1, {"loss": 0.5}) == (writing.writer, writing.epoch, writing.history)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (each for each in range(3)),
        pytest.param(lambda: iter([1, 2]), marks=pytest.mark.slow),
        pytest.param(itertools.count, marks=pytest.mark.slow),
    ],
    ids=["generator", "iterator", "count"],
)
def test_iterators_that_were_advanced_are_named(make):
    batches = make()
    with pytest.warns(UserWarning, match=r"^parwrap: the function changed batches on its ranks, but the change cannot be sent"):
        parwrap.launch(lambda: next(batches), nprocs=2)


class Unchanged:
    """What a trainer may have that belongs to one process."""

    def __init__(self, path):
        self.file, self.lock, self.numbers = open(path, "w"), threading.Lock(), (each for each in range(3))  # noqa: SIM115
        self.loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, num_workers=1, persistent_workers=True)
        self.bar, self.show = tqdm(total=3), functools.partial(print, end="")
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.epoch = 0

    def fit(self):
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            self.model(x).sum().backward()
            self.optimizer.step()
        self.schedule.step()
        with self.lock:
            self.file.write("epoch")
        self.bar.update(1)
        self.epoch += 1


def test_what_belongs_to_a_process_and_is_not_changed_is_not_named(tmp_path):
    trainer = Unchanged(tmp_path / "log")
    parwrap.launch(trainer.fit, nprocs=2)

    assert (1, 1) == (trainer.epoch, trainer.bar.n)
    trainer.bar.close()
    trainer.file.close()


def test_what_was_changed_until_an_error_is_kept():
    history = []

    def train():
        history.append(1)
        parwrap.barrier()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        parwrap.launch(train, nprocs=2)
    assert [1] == history


class Mixed(parwrap.DistributedMixin, nprocs=2):
    def __init__(self):
        self.history = []

    def fit(self, callback):
        self.history.append(callback(self))
        return self


def test_decorated_methods_and_mixins_change_their_instance_in_each_call():
    class Decorated:
        def __init__(self):
            self.history = []

        @parwrap.distributed(nprocs=2)
        def fit(self, callback):
            self.history.append(callback(self))
            return self

    def callback(trainer):
        trainer.called = len(trainer.history)
        return parwrap.world_size()

    for trainer in (Decorated(), Mixed()):
        for _ in range(2):
            assert trainer.fit(callback) is trainer
        assert ([2, 2], 1) == (trainer.history, trainer.called)


def test_hogwild_workers_change_them_too():
    history = []

    @parwrap.hogwild(workers=2)
    def train():
        history.append(1)

    train()
    assert [1] == history


def test_long_lists_are_sent_by_what_is_new_and_keep_their_items():
    samples = [{"index": index} for index in range(150_000)]
    last = samples[-1]
    parwrap.launch(lambda: samples.append(None), nprocs=2)

    assert (150_001, None) == (len(samples), samples[-1])
    assert last is samples[-2]


@METHODS
def test_buffers_and_arrays_of_all_kinds_are_changed_in_place(start_method):
    things = [bytearray(b"ab"), array.array("i", [1, 2]), np.ma.masked_array([1.0, 2.0], mask=[False, True])]
    alike = list(things)

    parwrap.launch(change_first, things, nprocs=2, start_method=start_method)

    assert all(one is other for one, other in zip(things, alike, strict=True))
    assert [bytearray(b"zb"), array.array("i", [7, 2]), [7.0, None]] == [*things[:2], things[2].tolist()]


def change_first(things):
    things[0][0] = ord("z")
    things[1][0] = 7
    things[2][0] = 7


def schedule(model, optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()


counted = []


@functools.lru_cache
def remembered(number):
    counted.append(number)
    return torch.arange(number)


def test_what_a_cached_function_remembers_is_no_loss_and_what_it_changes_comes_back(recwarn):
    parwrap.launch(lambda: remembered(3).sum().item(), nprocs=2)

    assert ([3], 0) == (counted, remembered.cache_info().currsize)
    assert [] == [str(each.message) for each in recwarn if "cannot be sent" in str(each.message)]


def test_a_scheduler_that_is_made_for_the_callers_optimizer_is_no_loss():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    parwrap.launch(schedule, model, optimizer, nprocs=2)

    assert optimizer.param_groups[0]["lr"] == 0.5
