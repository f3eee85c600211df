"""A run that goes on from the middle of an epoch gets the batches that would have come, on any number of ranks."""

import functools
import json
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import parwrap
from parwrap.errors import UsageError
from passes_to_leave import SAMPLES, Setup, Stream
from warm_command import run as run_command


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


TWINS = ("generator", "subset", "replacement", "last dropped", "batch sampler", "own generator", "one by one", "lasting workers")
"""Kinds of which ``test_one_rank_goes_on_too`` shows the same."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in TWINS)) for kind in KINDS])
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
    return run_alone(kind)


@functools.cache
def run_alone(kind):
    return run(kind, at=(1, 4))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_goes_on_too(kind):
    whole, state = run(kind, at=(1, 4))
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
        printed = run_command(command, cwd=tmp_path, timeout=100, check=True).stdout
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


@pytest.mark.ranks(2)
def test_passes_that_are_not_dealt_out_by_index_go_on_with_as_many_ranks_only():
    _, stream = run("stream", at=(1, 2))
    _, own = run("own distributed sampler", at=(1, 2))
    with parwrap.distributed():
        loader, _ = DataLoader(Stream(), batch_size=4), Setup()
        stream["facts"]["number of ranks"] = 3
        parwrap.loaders(loader)[0].load_state_dict(stream)
        with pytest.raises(
            UsageError, match=r"whose number of ranks was 3, but that of this one is 2\. Only a loader whose sampler parwrap replaces can"
        ):
            iter(loader)
        loader = DataLoader(range(SAMPLES), 4, sampler=DistributedSampler(range(SAMPLES), 2, parwrap.rank()))
        parwrap.loaders(loader)[0].load_state_dict(own)
        with pytest.raises(
            UsageError, match=r"whose sampler's epoch was 1, but that of this one is 0\. Call the set_epoch of its DistributedSampler"
        ):
            iter(loader)
