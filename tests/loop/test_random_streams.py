"""The two sets of streams of a rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from parwrap.loop.random_streams import ALL, NONE, TRAINING, RandomStreams, seed_all


def draw():
    return torch.rand(1).item(), np.random.rand(), random.random()


@pytest.fixture(autouse=True)
def _numpys_own_stream():
    generator = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(generator)


def test_own_streams_differ_by_rank_and_shared_ones_do_not():
    own, shared = [], []
    for rank in range(3):
        seed_all(1)
        streams = RandomStreams(rank)
        with streams.used(ALL):
            own.append(draw())
        shared.append(draw())
        streams.close()

    assert [3, 3, 3] == [len(set(each)) for each in zip(*own, strict=True)]
    assert 1 == len(set(shared))


def own_of_scope(rank=1):
    """What a rank draws on its own streams in a new scope, after something drawn by all."""
    torch.rand(1)
    streams = RandomStreams(rank)
    with streams.used(ALL):
        own = draw()
    streams.close()
    return own


def test_own_streams_of_a_later_scope_are_others():
    seed_all(1)
    own = [own_of_scope() for _ in range(3)]

    assert [3, 3, 3] == [len(set(each)) for each in zip(*own, strict=True)]
    torch.manual_seed(1)
    assert own == [own_of_scope() for _ in range(3)]
    assert own_of_scope(rank=1) != own_of_scope(rank=2)


def test_a_script_that_seeds_inside_a_later_scope_gets_the_streams_of_that_seed():
    seed_all(1)
    expected = own_of_scope()
    streams = RandomStreams(rank=1)
    torch.manual_seed(1)
    torch.rand(7)
    streams.seeded("torch")
    with streams.used(ALL):
        own = draw()
    streams.close()

    assert expected == own


def test_each_set_goes_on_where_it_was():
    seed_all(1)
    expected = [draw() for _ in range(4)]
    seed_all(3)
    expected_own = [draw() for _ in range(3)]
    seed_all(1)
    streams, actual, own = RandomStreams(rank=2), [draw()], []
    for _ in range(3):
        with streams.used(ALL):
            own.append(draw())
        actual.append(draw())
    streams.close()

    assert expected == actual
    assert expected_own == own


def test_only_the_libraries_that_are_named_are_switched():
    seed_all(1)
    expected = draw()
    seed_all(1)
    streams = RandomStreams(rank=2)
    with streams.used(TRAINING):
        own = draw()
    shared = draw()
    streams.close()

    assert (False, False, True) == tuple(a == b for a, b in zip(expected, own, strict=True))
    assert expected[:2] == shared[:2]


def test_uses_nest():
    seed_all(0)
    streams = RandomStreams(rank=1)
    streams.use(ALL)
    with streams.used(NONE):
        shared = draw()
        with streams.used(TRAINING):
            draw()
    assert ALL == streams.use(NONE)
    streams.close()
    seed_all(0)

    assert shared == draw()


def test_the_seed_is_the_shared_one_in_any_set():
    seed_all(5)
    streams = RandomStreams(rank=1)
    with streams.used(ALL):
        assert (5, 6) == (streams.seed(), torch.initial_seed())
    assert 5 == streams.seed()
    streams.close()


@pytest.mark.parametrize("inside", [NONE, ALL])
def test_a_seed_of_the_script_holds_for_both_sets(inside):
    drawn = []
    streams = RandomStreams(rank=1)
    for seed in (1, 100, 1):
        with streams.used(ALL):  # both sets have begun
            draw()
        with streams.used(inside):
            torch.manual_seed(seed), streams.seeded("torch")
            np.random.seed(seed), streams.seeded("numpy")
            random.seed(seed), streams.seeded("python")
        with streams.used(ALL):
            own = draw()
        drawn.append((own, draw()))
    streams.close()
    seed_all(1)

    assert drawn[0] == drawn[2]
    assert not {*drawn[0][0], *drawn[0][1]} & {*drawn[1][0], *drawn[1][1]}
    assert drawn[0][1] == draw()
    assert not set(drawn[0][0]) & set(drawn[0][1])


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("inside", [NONE, TRAINING, ALL])
def test_what_a_rank_seeds_and_draws_alone_moves_neither_set(inside, begun):
    def drawn(seeds_alone):
        seed_all(1)
        streams = RandomStreams(rank=1)
        with streams.used(ALL if begun else NONE):
            draw()
        with streams.used(inside):
            if seeds_alone:
                with streams.put_back():
                    torch.manual_seed(7), streams.seeded("torch")
                    np.random.seed(7), streams.seeded("numpy")
                    random.seed(7), streams.seeded("python")
                    with streams.used(ALL):
                        draw(), streams.fresh_seed("torch", 62)
            own = draw(), streams.fresh_seed("torch", 62)
        shared = draw(), streams.fresh_seed("torch", 62), streams.seed()
        with streams.used(ALL):
            again = draw()
        streams.close()
        return own, shared, again

    assert drawn(seeds_alone=False) == drawn(seeds_alone=True)


def test_large_seeds():
    seed_all(2**63 + 5)
    streams = RandomStreams(rank=1)
    with streams.used(ALL):
        first = draw()
    streams.close()

    assert first != draw()


@pytest.mark.gpu
def test_the_gpus_stream_is_switched_too():
    seed_all(0)
    streams = RandomStreams(rank=1)
    torch.rand(1, device="cuda")
    with streams.used(TRAINING):
        own = torch.rand(1, device="cuda").item()
    streams.close()
    seed_all(1)

    assert own == torch.rand(1, device="cuda").item()
