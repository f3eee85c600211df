import random

import numpy as np
import pytest
import torch

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
