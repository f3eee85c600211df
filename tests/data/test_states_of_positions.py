"""Which loaders have a position, and which states can be loaded into them."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from passes_to_leave import SAMPLES, Setup, Stream


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
        ({"dataset": range(40)}, {}, r"whose dataset's length was 40, but that of this one is 46\."),
        ({}, {"shuffle": True}, r"whose order was as it is, but that of this one is shuffled\."),
        (
            {"dataset": Stream()},
            {},
            r"another kind of DataLoader, one over an IterableDataset; this is one with its own sampler\. .*lists",
        ),
        ({}, {"dataset": Stream()}, r"another kind of DataLoader, one with its own sampler; this is one over an IterableDataset\."),
        ({"dataset": Stream(), "num_workers": 1}, {"dataset": Stream()}, r"whose number of workers was 1, but that of this one is 0\."),
        ({}, {"batch_size": 3}, r"does not repeat its draws from before its state was taken: number 1 of the pass differs"),
        ({"sampler": Aimless()}, {"sampler": Aimless()}, r"it must draw from torch, np\.random or random while nothing else does"),
        (
            {"sampler": RandomSampler(range(SAMPLES), generator=torch.Generator())},
            {"sampler": RandomSampler(range(SAMPLES))},
            r"draws from torch, numpy\.random, random, a torch\._C\.Generator, but this one draws from torch, numpy\.random, random\. Load",
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
        pytest.raises(UsageError, match=rf"takes what the state_dict\(\) of a loader in parwrap\.loaders\(\) returned, not {what}"),
    ):
        parwrap.loaders(loader)[0].load_state_dict(state)


def test_where_there_is_nothing_to_list_it_is_said():
    with pytest.raises(
        UsageError, match=r"lists the training loaders of a function or script that parwrap\.distributed runs, but none is running here"
    ):
        parwrap.loaders()
    with parwrap.distributed():
        with pytest.raises(UsageError, match=r"no DataLoader was trained on yet.* pass the loader: parwrap\.loaders\(train_loader\)\[0\]"):
            parwrap.loaders()
        with pytest.raises(UsageError, match=r"parwrap\.loaders takes DataLoaders, not a list"):
            parwrap.loaders([1])
        loader = DataLoader(range(3))
        (position,) = parwrap.loaders(loader)
        del loader
        with pytest.raises(
            UsageError, match=r"the DataLoader of this position no longer exists\. List the loaders again: parwrap\.loaders\(\)"
        ):
            position.state_dict()


def test_a_loader_that_two_passes_read_is_at_no_place():
    with parwrap.distributed():
        loader, position, *_reading = reading()
        other = iter(loader)
        with pytest.raises(UsageError, match="two training passes over one DataLoader are open, so it has no single position"):
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
        with pytest.raises(UsageError, match=r"being read without training: .* before an optimizer"):
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
    with pytest.raises(RankMismatchError, match=r"rank 0 is at the position that a training loader continues from"):
        load_on_rank_zero_only()


def test_a_state_that_torchdata_has_taken_itself_is_refused_in_training():
    loader = StatefulDataLoader(range(SAMPLES), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    with parwrap.distributed():
        loader, setup = StatefulDataLoader(range(SAMPLES), batch_size=4), Setup()
        loader.load_state_dict(state)
        with pytest.raises(UsageError, match="a StatefulDataLoader got a state that was saved without parwrap, which does not contain"):
            iter(loader)
        with torch.no_grad():  # as it does without parwrap
            assert [4, 5, 6, 7] == next(iter(loader)).tolist()
        assert setup
