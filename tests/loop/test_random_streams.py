import random

import numpy as np
import pytest
import torch
from torch import manual_seed, nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.loop.random_streams import RandomStreams, get_state, seed_all, set_state


def draw():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_the_ranks_own_streams_differ_by_rank_and_the_shared_ones_do_not():
    own, shared = [], []
    for rank in range(3):
        seed_all(1)
        streams = RandomStreams(rank)
        with streams.own():
            own.append(draw())
        shared.append(draw())

    assert 3 == len(set(own))
    assert 1 == len(set(shared))


def test_each_set_goes_on_where_it_was():
    seed_all(1)
    expected = [draw() for _ in range(4)]
    seed_all(1)
    streams = RandomStreams(rank=2)
    actual = [draw()]
    for _ in range(3):
        with streams.own():
            draw()
        actual.append(draw())

    assert expected == actual


def test_own_streams_go_on_too_and_are_seeded_with_seed_plus_rank():
    streams = RandomStreams(rank=2)
    seed_all(5)
    with streams.own():
        first = draw()
    with streams.own():
        second = draw()
    seed_all(7)

    assert [first, second] == [draw(), draw()]


def test_a_new_seed_of_the_script_makes_new_own_streams():
    streams = RandomStreams(rank=0)
    drawn = []
    for fold in (1, 2, 1):
        torch.manual_seed(fold)
        with streams.own():
            drawn.append(draw())

    assert drawn[0] == drawn[2] != drawn[1]


def test_blocks_nest():
    seed_all(0)
    streams = RandomStreams(rank=1)
    streams.use(own=True)
    with streams.shared():
        shared = draw()
        with streams.own():
            draw()
    streams.use(own=False)
    seed_all(0)

    assert shared == draw()


def test_states_are_taken_and_set():
    state = get_state()
    first = draw()
    set_state(state)

    assert first == draw()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpus_stream_is_switched_too():
    seed_all(0)
    streams = RandomStreams(rank=1)
    torch.rand(1, device="cuda")
    with streams.own():
        own = torch.rand(1, device="cuda").item()
    seed_all(1)

    assert own == torch.rand(1, device="cuda").item()


def seeded_by_name():
    manual_seed(0)


def seeded_in_torch():
    torch.manual_seed(0)


def trained(seeded):
    """The weights of a model after two epochs, and what its dropout drew on this rank."""
    x = torch.linspace(-1, 1, 20).view(-1, 1)
    seeded()
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeros = []
    model[1].register_forward_hook(lambda module, args, output: zeros.append(output.eq(0).tolist()))
    for _ in range(2):
        for a, b in DataLoader(TensorDataset(x, x), batch_size=2, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return [p.tolist() for p in model.parameters()], zeros


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("seeded", [seeded_by_name, seeded_in_torch])
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_training_repeats_after_the_same_seed(size, seeded, batch):
    with parwrap.distributed(batch=batch):
        weights, zeros = trained(seeded)
        others = trained(lambda: None)
        again = trained(seeded)

        assert (weights, zeros) == again
        assert (weights, zeros) != others
        assert size == len({str(each) for each in parwrap.gather([zeros])})


@pytest.mark.ranks(2)
def test_a_seed_of_a_state_that_is_restored_repeats_nothing():
    """As for previews that are the same in each epoch."""
    with parwrap.distributed():
        drawn, orders = [], []
        x = torch.arange(12.0).view(-1, 1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        torch.manual_seed(7)
        for _ in range(3):
            order = []
            for (batch,) in DataLoader(TensorDataset(x), batch_size=2, shuffle=True):
                model(batch).sum().backward()
                optimizer.step()
                order += batch.flatten().tolist()
                drawn.append(torch.rand(1).item())
            with torch.random.fork_rng():
                torch.manual_seed(7)
                torch.rand(1)
            orders.append(order)

        assert len(drawn) == len(set(drawn))
        assert 3 == len({str(order) for order in orders})


@pytest.mark.ranks(2)
def test_a_layer_that_seeds_within_a_restored_state_does_not_repeat_dropout():
    class Noisy(nn.Module):
        def forward(self, x):
            with torch.random.fork_rng():
                torch.manual_seed(7)
                noise = torch.rand(1)
            return x + noise

    with parwrap.distributed():
        model = nn.Sequential(nn.Linear(1, 16), Noisy(), nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        zeros = []
        for _ in range(6):  # a loop by hand
            output = model(torch.ones(1, 1))
            zeros.append(output.eq(0).tolist())
            output.sum().backward()
            optimizer.step()

    assert 5 <= len({str(each) for each in zeros})
