"""A run that goes on from the middle of an epoch gets the batches that would have come, on any number of ranks."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import parwrap
from parwrap.errors import RankMismatchError, UsageError

SAMPLES = 46


class Setup:
    """A model and optimizer, so that there is something to train."""

    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).mean().backward()
        self.optimizer.step()

    def evaluate(self):
        """In the midst of a pass, and drawing on the streams that are the same on all ranks."""
        self.model.eval()
        list(DataLoader(range(3), shuffle=True))
        self.model.train()


class Drawn(Sampler):
    """Draws each sample when it is asked for, from the generator that it has or else from numpy's own."""

    def __init__(self, rng=None):
        self.rng = rng

    def __iter__(self):
        return ((self.rng or np.random).choice(SAMPLES) for _ in range(SAMPLES))

    def __len__(self):
        return SAMPLES


class VaryingSize(Sampler):
    """Batches of one to five samples in a new order each time, as by length."""

    def __iter__(self):
        order = iter(random.sample(range(SAMPLES), SAMPLES))
        while batch := [sample for sample, _ in zip(order, range(random.randint(1, 5)), strict=False)]:
            yield batch

    def __len__(self):
        return SAMPLES // 5


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))


def weights():
    return WeightedRandomSampler(torch.arange(1.0, 1 + SAMPLES), SAMPLES)


KINDS = {
    "sequential": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "one by one": {"batch_size": None, "shuffle": True},
    "last dropped": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": {"batch_size": 4, "shuffle": True, "generator": lambda: torch.Generator().manual_seed(5)},
    "weighted": {"batch_size": 4, "sampler": weights},
    "subset": {"batch_size": 4, "sampler": lambda: SubsetRandomSampler(range(30))},
    "replacement": {"batch_size": 4, "sampler": lambda: RandomSampler(range(SAMPLES), replacement=True)},
    "drawn": {"batch_size": 4, "sampler": Drawn},
    "own generator": {"batch_size": 4, "sampler": lambda: Drawn(np.random.default_rng(2))},
    "varying size": {"batch_sampler": VaryingSize},
    "batch sampler": {"batch_sampler": lambda: BatchSampler(RandomSampler(range(SAMPLES)), 4, False)},
    "workers": {"batch_size": 4, "sampler": Drawn, "num_workers": 2},
    "lasting workers": {"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True},
    "stateful": {"batch_size": 4, "shuffle": True, "of": StatefulDataLoader},
    "stream": {"dataset": Stream, "batch_size": 4},
    "own distributed sampler": {
        "batch_size": 4,
        "sampler": lambda: DistributedSampler(range(SAMPLES), parwrap.world_size(), parwrap.rank()),
    },
}


def built(kind):
    options = {name: value() if callable(value) and name != "of" else value for name, value in KINDS[kind].items()}
    return options.pop("of", DataLoader)(options.pop("dataset", range(SAMPLES)), **options)


def run(kind, epochs=3, state=None, at=None, replicate=False, **options):
    """What this rank sees in each epoch, and the state that was taken ``at`` an epoch and step of it."""
    seen, taken = {}, None
    with parwrap.distributed(seed=3, **options):
        setup, loader = Setup(), built(kind)
        if replicate:
            parwrap.replicate(loader)
        first = start = 0
        if state:
            (position,) = parwrap.loaders(loader)
            position.load_state_dict(state)
            first, start = state["epoch"], state["done"] // state["per_step"]
        for epoch in range(first, epochs):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            seen[epoch] = []
            for step, data in enumerate(loader, start + 1):
                setup.step()
                seen[epoch].append(torch.as_tensor(data).reshape(-1).tolist())
                if (epoch, step) == at:
                    torch.rand(5)  # of this rank's own
                    taken = json.loads(json.dumps(parwrap.loaders()[0].state_dict()))
                if step % 3 == 0:
                    setup.evaluate()
            start = 0
    return seen, taken


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_on_as_many_ranks_the_very_same_batches_come(kind):
    whole, state = run(kind, at=(1, 2))
    rest, _ = run(kind, state=state)

    assert {1, 2} == set(rest)
    assert whole[1][2:] == rest[1]
    assert whole[2] == rest[2]
    assert rest[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"batch": "global"}) for kind in ("shuffled", "drawn", "varying size", "stateful", "stream", "lasting workers")),
        *((kind, {"uneven": "join"}) for kind in ("shuffled", "one by one", "varying size", "stream")),
        *((kind, {"uneven": "drop"}) for kind in ("shuffled", "weighted")),
        ("shuffled", {"replicate": True}),
    ],
)
def test_so_they_do_however_data_is_shared_out(kind, options):
    whole, state = run(kind, at=(1, 2), **options)
    rest, _ = run(kind, state=state, **options)

    assert [whole[1][2:], whole[2]] == [rest[1], rest[2]]
    assert rest[1]


ANYWHERE = ["shuffled", "one by one", "last dropped", "weighted", "own generator", "varying size", "workers", "stateful"]


@pytest.fixture
def alone(kind):
    """A run on one rank: what it has seen, and a state of it."""
    return run(kind, at=(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_too(kind, alone):
    whole, state = alone
    rest, _ = run(kind, state=state)

    assert [whole[1][4:], whole[2]] == [rest[1], rest[2]]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ANYWHERE)
def test_the_batches_that_are_left_of_one_rank_are_dealt_to_more(kind, alone):
    whole, state = alone
    (mine, _) = run(kind, state=state, epochs=2)
    dealt = [batch for step in zip(*parwrap.gather(mine[1]), strict=True) for batch in step]
    left = whole[1][4:]

    assert left == dealt[: len(left)]
    assert whole[1][: len(dealt) - len(left)] == dealt[len(left) :]  # the last round is filled up as ever


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("kind", "given"), [("shuffled", "join"), ("drawn", "join"), ("shuffled", "drop"), ("drawn", "drop")])
def test_what_does_not_go_round_is_shared_out_as_ever(kind, given, alone):
    whole, state = alone
    mine, _ = run(kind, state=state, epochs=2, uneven=given)
    dealt = [batch for step in zip(*parwrap.gather(mine[1]), strict=True) for batch in step]
    left = whole[1][4:]  # 8 batches for 3 ranks

    assert (left[:6] if given == "drop" else [*left, left[6]]) == dealt


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["shuffled", "weighted"])
def test_or_split(kind, alone):
    whole, state = alone
    mine, _ = run(kind, state=state, batch="global")

    for epoch, left in ((1, whole[1][4:]), (2, whole[2])):
        assert left == [[sample for part in parts for sample in part] for parts in zip(*parwrap.gather(mine[epoch]), strict=True)]


SCRIPT = """
import json, os, sys
import torch
import parwrap
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

torch.manual_seed(3)
steps = int(sys.argv[1])
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
one, other = DataLoader(range(46), 4, shuffle=True, num_workers=1), StatefulDataLoader(range(46), 4, shuffle=True)
kept = torch.load("kept.pt", weights_only=True) if os.path.exists("kept.pt") else None
if kept:
    parwrap.loaders(one)[0].load_state_dict(kept["one"])
    other.load_state_dict(kept["other"])
seen = []
for epoch in range(kept["epoch"] if kept else 0, 2):
    for step, batches in enumerate(zip(one, other)):
        if epoch == 1 and step == steps:
            break
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if epoch == 1:
            seen.append([batch.tolist() for batch in batches])
            torch.save({"epoch": epoch, "one": parwrap.loaders()[0].state_dict(), "other": other.state_dict()}, "kept.pt")
print(json.dumps(parwrap.gather(seen)))
"""


def test_a_script_goes_on_with_ever_other_numbers_of_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    seen = []
    for ranks, steps in (2, 3), (3, 1):
        command = [sys.executable, "-m", "parwrap.run", "--nproc-per-node", str(ranks), "train.py", str(steps)]
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True).stdout
        seen += [batches for step in zip(*json.loads(printed), strict=True) for batches in step]
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    with parwrap.distributed():
        setup, loaders = Setup(), (DataLoader(range(SAMPLES), 4, shuffle=True), StatefulDataLoader(range(SAMPLES), 4, shuffle=True))
        for position, state in zip(parwrap.loaders(*loaders), (kept["one"], kept["other"]), strict=True):
            position.load_state_dict(state)
        for batches in zip(*loaders, strict=True):
            setup.step()
            seen.append([batch.tolist() for batch in batches])
    order = DistributedSampler(range(SAMPLES), 1, 0, seed=3)
    order.set_epoch(1)
    one, other = ([sample for batches in seen for sample in batches[number]] for number in (0, 1))

    assert list(range(SAMPLES)) == sorted(one) == sorted(other)
    assert [set(list(order)[:8]), list(order)[36:]] == [set(one[:8]), one[36:]]


def reading(state=None, **options):
    """A setup, a loader in training, its position and a pass that has yielded a batch."""
    setup, loader = Setup(), DataLoader(**{"dataset": range(SAMPLES), "batch_size": 4, **options})
    reading = iter(loader)
    next(reading)
    return loader, parwrap.loaders(loader)[0], reading, setup


def test_positions_are_listed_in_the_order_of_the_first_passes():
    with parwrap.distributed():
        setup, second, first = Setup(), DataLoader(range(8), batch_size=2), DataLoader(range(9), batch_size=2)
        (named,) = parwrap.loaders(first)
        assert "<parwrap loader not trained on yet: epoch 0, 0 batches done>" == repr(named)
        for loader in (first, second):
            for number, _ in enumerate(loader):
                setup.step()
                if loader is second and number == 2:
                    break
        for _ in first:
            setup.evaluate()
            listed = parwrap.loaders()
            break
        else_open = iter(second)
        next(else_open)

        assert named is listed[0]
        assert ["<parwrap loader 0: epoch 2, 0 batches done>", "<parwrap loader 1: epoch 1, 1 batches done>"] == list(map(repr, listed))


def test_a_pass_that_was_over_when_the_state_was_taken_stays_over():
    with parwrap.distributed():
        loader, position, rest, _ = reading()
        list(rest)
        over = position.state_dict()
        loader, position, rest, _ = reading()
        for _ in range(10):
            next(rest)
        last = next(rest)
        inside = position.state_dict()
        for state, expected in ((over, 12), (inside, 0)):
            loader, setup = DataLoader(range(SAMPLES), batch_size=4), Setup()
            parwrap.loaders(loader)[0].load_state_dict(state)

            assert expected == len([setup.step() for _ in loader])
            assert 12 == len(loader) == len([setup.step() for _ in loader])
        assert [44, 45] == last.tolist()


def test_a_state_is_kept_until_the_next_pass_and_a_broken_pass_begins_anew():
    with parwrap.distributed():
        _, position, rest, setup = reading(shuffle=True)
        state = position.state_dict()
        later = DataLoader(range(SAMPLES), batch_size=4, shuffle=True)
        (position,) = parwrap.loaders(later)
        position.load_state_dict(state)
        assert state == position.state_dict()
        expected = next(rest).tolist()
        going_on = iter(later)
        assert expected == next(going_on).tolist()
        setup.step()
        del going_on
        assert 12 == len([setup.step() for _ in later])


class Aimless(Sampler):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(SAMPLES).tolist())

    def __len__(self):
        return SAMPLES


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"dataset": range(40)}, {}, r"whose dataset's length was 40; this one's is 46\."),
        ({}, {"shuffle": True}, r"whose order was as it is; this one's is shuffled\."),
        (
            {"dataset": Stream()},
            {},
            r"another kind of DataLoader, one over an IterableDataset; this is one with a sampler of its own\. .*lists",
        ),
        ({}, {"dataset": Stream()}, r"another kind of DataLoader, one with a sampler of its own; this is one over an IterableDataset\."),
        ({"dataset": Stream(), "num_workers": 1}, {"dataset": Stream()}, r"whose number of workers was 1; this one's is 0\."),
        ({}, {"batch_size": 3}, r"does not draw again what it drew before its state was taken: number 1 of the pass is another"),
        ({"sampler": Aimless()}, {"sampler": Aimless()}, r"it must draw from torch, np\.random or random while nothing else does"),
        (
            {"sampler": RandomSampler(range(SAMPLES), generator=torch.Generator())},
            {"sampler": RandomSampler(range(SAMPLES))},
            r"draws from torch, numpy\.random, random, a torch\._C\.Generator; this one draws from torch, numpy\.random, random\. Load",
        ),
    ],
)
def test_states_of_other_loaders_are_refused(before, now, message):
    with parwrap.distributed():
        _before, position, rest, _ = reading(**before)
        state = position.state_dict()
        loader, _ = DataLoader(**{"dataset": range(SAMPLES), "batch_size": 4, **now}), Setup()
        with pytest.raises(UsageError, match=message):
            parwrap.loaders(loader)[0].load_state_dict(state) or iter(loader)
        del rest


@pytest.mark.parametrize(
    ("state", "what"),
    [({"_num_yielded": 3, "_snapshot": 1}, "a dict with '_num_yielded', '_snapshot'"), (3, "a int"), ({}, "an empty dict")],
)
def test_what_is_no_state_is_refused(state, what):
    loader = DataLoader(range(3))
    with (
        parwrap.distributed(),
        pytest.raises(UsageError, match=rf"takes what state_dict\(\) of parwrap\.loaders\(\) has returned, not {what}"),
    ):
        parwrap.loaders(loader)[0].load_state_dict(state)


def test_where_there_is_nothing_to_list_it_is_said():
    with pytest.raises(
        UsageError, match=r"lists the training loaders of a function or script that parwrap\.distributed runs, and none runs here"
    ):
        parwrap.loaders()
    with parwrap.distributed():
        with pytest.raises(UsageError, match=r"no DataLoader was trained on yet.* name the loader: parwrap\.loaders\(train_loader\)\[0\]"):
            parwrap.loaders()
        with pytest.raises(UsageError, match=r"parwrap\.loaders takes DataLoaders, not a list"):
            parwrap.loaders([1])
        loader = DataLoader(range(3))
        (position,) = parwrap.loaders(loader)
        del loader
        with pytest.raises(UsageError, match=r"the DataLoader of this position is gone\. List the loaders anew: parwrap\.loaders\(\)"):
            position.state_dict()


def test_a_loader_that_two_passes_read_is_at_no_place():
    with parwrap.distributed():
        loader, position, *_reading = reading()
        other = iter(loader)
        with pytest.raises(UsageError, match="two training passes over one DataLoader are open, so that it is at no one place"):
            position.state_dict()
        del other
        with pytest.raises(UsageError, match="are open"):
            position.state_dict()
        del _reading
        assert 2 == position.state_dict()["epoch"]


@pytest.mark.ranks(2)
def test_a_loader_that_is_only_looked_at_has_no_place():
    with parwrap.distributed():
        loader = DataLoader(range(SAMPLES))
        looking = iter(loader)
        with pytest.raises(UsageError, match=r"read as one that is only looked at: .* before there is an optimizer"):
            parwrap.loaders(loader)[0].state_dict()
        del looking
        assert 0 == parwrap.loaders(loader)[0].state_dict()["done"]


@pytest.mark.ranks(2, timeout=30)
def test_ranks_that_load_different_states_are_told():
    with parwrap.distributed():
        loader, position, rest, _ = reading()
        states = [position.state_dict()]
        next(rest)
        states.append(position.state_dict())
        position.load_state_dict(states[parwrap.rank()])
        with pytest.raises(
            RankMismatchError, match=r"differ between ranks: epoch 0 after 8 on rank 0, epoch 0 after 16 on rank 1\. Load the same"
        ):
            iter(loader)


@parwrap.distributed
def load_on_rank_zero_only():
    loader, position, _rest, setup = reading()
    setup.step()
    state = position.state_dict()
    if parwrap.is_rank_zero():
        position.load_state_dict(state)
    for _ in loader:
        setup.step()


@pytest.mark.ranks(2, timeout=30)
def test_a_rank_that_has_loaded_nothing_is_told_of():
    with pytest.raises(RankMismatchError, match=r"rank 0 is at the position that a training loader goes on from"):
        load_on_rank_zero_only()


@pytest.mark.ranks(2)
def test_passes_that_are_not_dealt_out_by_index_go_on_with_as_many_ranks_only():
    _, stream = run("stream", at=(1, 2))
    _, own = run("own distributed sampler", at=(1, 2))
    with parwrap.distributed():
        loader, _ = DataLoader(Stream(), batch_size=4), Setup()
        stream["facts"]["number of ranks"] = 3
        parwrap.loaders(loader)[0].load_state_dict(stream)
        with pytest.raises(
            UsageError, match=r"whose number of ranks was 3; this one's is 2\. Only passes whose indices parwrap deals out can"
        ):
            iter(loader)
        loader = DataLoader(range(SAMPLES), 4, sampler=DistributedSampler(range(SAMPLES), 2, parwrap.rank()))
        parwrap.loaders(loader)[0].load_state_dict(own)
        with pytest.raises(
            UsageError, match=r"whose sampler's epoch was 1; this one's is 0\. Call the set_epoch of its DistributedSampler"
        ):
            iter(loader)


def test_a_state_that_torchdata_has_taken_itself_is_refused_in_training():
    loader = StatefulDataLoader(range(SAMPLES), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    with parwrap.distributed():
        loader, setup = StatefulDataLoader(range(SAMPLES), batch_size=4), Setup()
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match="a StatefulDataLoader was given a state that was taken without parwrap, which does not say"):
            iter(loader)
        with torch.no_grad():  # as it does without parwrap
            assert [4, 5, 6, 7] == next(iter(loader)).tolist()
        assert setup
