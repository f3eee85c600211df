"""The state of torchdata's ``StatefulDataLoader`` is that of what a rank reads."""

from __future__ import annotations

import copy

import pytest
import torch

import parwrap
from drawn_order import DrawnOrder
from training import Training, samples

stateful = pytest.importorskip("torchdata.stateful_dataloader")


def loader(**options):
    return stateful.StatefulDataLoader(range(16), batch_size=2, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "num_workers": 1}], ids=["in order", "shuffled", "worker"])
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_pass_is_resumed_from_its_state(options, epochs):
    with parwrap.distributed(seed=1):
        training, first = Training(), parwrap.shard(loader(**options))
        for _ in range(epochs):
            training.train(first)
        seen = []
        for index, batch in enumerate(first):
            training.step()
            seen += samples(batch)
            if index == 1:
                break
        state = first.state_dict()
        del first
        training.train(loader(**options))
        resumed = loader(**options)
        resumed.load_state_dict(parwrap.broadcast(state))
        rest, following = (training.train(resumed) for _ in range(2))
        del resumed

    assert [4, 4, 8] == [len(seen), len(rest), len(following)]
    assert sorted(range(16)) == sorted(sample for each in parwrap.gather(seen + rest) for sample in each)
    assert sorted(range(16)) == sorted(sample for each in parwrap.gather(following) for sample in each)
    assert not options or following != seen + rest


@pytest.mark.ranks(2)
def test_the_state_of_an_exhausted_pass_is_followed_by_the_next_order():
    with parwrap.distributed(seed=1):
        training, first = Training(), loader(shuffle=True)
        training.train(first)
        state, drawn = first.state_dict(), torch.get_rng_state()
        expected = training.train(parwrap.shard(first))
        resumed = parwrap.shard(loader(shuffle=True))
        resumed.load_state_dict(state)
        torch.set_rng_state(drawn)

        assert expected == training.train(resumed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("saves_again", [False, True])
def test_a_state_that_was_loaded_can_be_saved_before_it_is_read(saves_again):
    with parwrap.distributed(seed=1):
        training, first = Training(), loader(shuffle=True)
        rest = []
        for index, batch in enumerate(first):
            training.step()
            if index == 1:
                state = copy.deepcopy(first.state_dict())
            rest += samples(batch) if index > 1 else []
        torch.manual_seed(9)
        resumed = loader(shuffle=True)
        resumed.load_state_dict(state)
        again = resumed.state_dict()
        if saves_again:
            resumed = loader(shuffle=True)
            resumed.load_state_dict(again)

        assert rest == training.train(resumed)


@pytest.mark.ranks(2)
def test_the_order_is_distributed_samplers():
    with parwrap.distributed(seed=1):
        seen = Training().train(loader(shuffle=True, generator=torch.Generator().manual_seed(7)))

    assert list(DrawnOrder(range(16), seed=7)) == seen


@pytest.mark.ranks(2)
def test_the_state_of_a_whole_pass_is_torchdatas():
    with parwrap.distributed():
        whole = loader()
        batches = iter(whole)
        next(batches)
        state = whole.state_dict()

    assert 1 == state["_num_yielded"]
    assert "parwrap" not in state


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("option", "value"), [("batch", "global"), ("uneven", "join")])
def test_a_state_from_the_middle_of_a_pass_is_refused_where_it_cannot_go_on(option, value):
    with parwrap.distributed(**{option: value}):
        optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        first, other = loader(shuffle=True), loader(shuffle=True)
        for _ in first:
            weight.sum().backward()
            optimizer.step()
            break
        with pytest.raises(parwrap.UsageError, match=rf"in the middle of a pass, but with {option}='{value}' a pass cannot continue there"):
            other.load_state_dict(first.state_dict())
