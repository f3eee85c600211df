"""The arguments of a collective are compared before anything is sent; references are the formula, and the message."""

import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.ranks.group import alone

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Totals:
    loss: float
    hits: torch.Tensor


DIFFERENT = [
    (
        {"cat": 1},
        {"dog": 2},
        "['cat'] is an int on rank 0 and missing on rank 1; ['dog'] is missing on rank 0 and an int on rank 1. parwrap cannot guess",
    ),
    ([0.5] * 40, [0.5] * 41, "it is of length 40 on rank 0 and of length 41 on rank 1. parwrap cannot guess"),
    ({"a": {"b": []}}, {"a": {"b": [1]}}, "['a']['b'] is of length 0 on rank 0 and of length 1 on rank 1. parwrap cannot guess"),
    ({}, {"a": 1}, "['a'] is missing on rank 0 and an int on rank 1. parwrap cannot guess"),
    ({"a": 1}, [1], "it is a dict on rank 0 and of length 1 on rank 1. parwrap cannot guess"),
    ({"n": 1}, {"n": None}, "['n'] is an int on rank 0 and of type NoneType on rank 1. parwrap cannot guess"),
    ({"n": 1}, {"n": "1"}, "['n'] is an int on rank 0 and of type str on rank 1. parwrap cannot guess"),
    (1, 2**70, "it is an int on rank 0 and of type int on rank 1. parwrap cannot guess"),
    (torch.ones(2), torch.ones(2, 1), "it is a tensor [2] float32 on rank 0 and a tensor [2, 1] float32 on rank 1. parwrap cannot guess"),
    (
        torch.ones(2),
        torch.ones(2).double(),
        "it is a tensor [2] float32 on rank 0 and a tensor [2] float64 on rank 1. parwrap cannot guess",
    ),
    (torch.ones(1), 1.0, "it is a tensor [1] float32 on rank 0 and a float on rank 1. parwrap cannot guess"),
    (np.ones(2), np.ones(3), "it is an array [2] float64 on rank 0 and an array [3] float64 on rank 1. parwrap cannot guess"),
    (np.ones(2), torch.ones(2), "it is an array [2] float64 on rank 0 and a tensor [2] float32 on rank 1. parwrap cannot guess"),
    ({1: 1}, {"1": 1}, "[1] is an int on rank 0 and missing on rank 1; ['1'] is"),
    (dict.fromkeys("abcde", 1), {}, "['a'] is an int on rank 0 and missing on rank 1; ['b'] is"),
]


@pytest.mark.ranks(2)
def test_what_differs_between_ranks_is_an_error_on_every_rank_that_names_it():
    for one, other, message in DIFFERENT:
        for collective in (parwrap.reduce_sum, parwrap.reduce_mean):
            with pytest.raises(RankMismatchError, match=re.escape(f"got different structures on different ranks: {message}")):
                collective(other if parwrap.rank() else one)
    assert 3 == parwrap.reduce_sum(1 + parwrap.rank())  # the ranks are still in step


@pytest.mark.ranks(3)
def test_ranks_that_agree_are_named_together():
    with pytest.raises(RankMismatchError, match=r"\['a'\] is an int on ranks 0 and 2 and missing on rank 1"):
        parwrap.reduce_sum({} if parwrap.rank() == 1 else {"a": 1})


@pytest.mark.ranks(2)
def test_numbers_of_different_kinds_are_mixed():
    pairs = [
        (0, 1.5, 1.5, 0.75),
        (True, 2, 3, 1.5),
        (2**60 + 1, 1, 2**60 + 2, (2**60 + 2) / 2),
        (np.float32(0.5), 2, 2.5, 1.25),
        (np.int64(3), np.bool_(True), 4, 2.0),
        (1, 2j, 1 + 2j, 0.5 + 1j),
        (0, torch.tensor(1.5), 1.5, 0.75),
        (torch.tensor(1), torch.tensor(0.5, dtype=torch.bfloat16), 1.5, 0.75),
    ]
    for one, other, total, mean in pairs:
        mine = other if parwrap.rank() else one
        for expected, actual in ((total, parwrap.reduce_sum([mine, 1])), (mean, parwrap.reduce_mean([mine, 1]))):
            assert expected == actual[0]
            assert isinstance(mine, torch.Tensor) == isinstance(actual[0], torch.Tensor)
            if not isinstance(mine, torch.Tensor):
                assert type(expected) is type(actual[0])


@pytest.mark.ranks(2)
def test_other_orders_and_containers_of_the_same_are_no_difference():
    ab = {1: 1, 12: 2.0, "b": torch.ones(2)}
    total = parwrap.reduce_sum(OrderedDict(reversed(ab.items())) if parwrap.rank() else ab)
    assert (2, 4.0, [2.0, 2.0]) == (total[1], total[12], total["b"].tolist())
    assert ({}, [], ()) == (parwrap.reduce_sum({}), parwrap.reduce_sum([]), parwrap.reduce_sum(()))
    assert [2, 2] == list(parwrap.reduce_sum((1, 1) if parwrap.rank() else [1, 1]))


@pytest.mark.ranks(2)
def test_dataclasses_and_arrays_are_entered():
    total = parwrap.reduce_sum(Totals(0.5, torch.ones(2)))
    counts, halves = parwrap.reduce_mean([np.array([[1, 2]]), np.array([0.5, parwrap.rank()], dtype=np.float16)])

    assert (Totals, 1.0, [2.0, 2.0]) == (type(total), total.loss, total.hits.tolist())
    assert ([[1.0, 2.0]], [0.5, 0.5], np.float16) == (counts.tolist(), halves.tolist(), halves.dtype)
    assert 1 == parwrap.reduce_mean(np.array(1)).item()
    assert [[3], [3]] == [each.hits.tolist() for each in parwrap.gather(Totals(1.0, torch.tensor([3])))]


class Bag(list):
    def __init__(self, *items):
        super().__init__(items)


@pytest.mark.ranks(2)
def test_lists_with_a_constructor_and_sizes_are_entered():
    bag, size = Bag(1, Bag(2)), torch.zeros(2, 3).shape
    total = parwrap.reduce_sum(bag)

    assert ([2, [4]], Bag, Bag) == (total, type(total), type(total[1]))
    assert [bag, bag] == parwrap.gather(bag)
    assert ((4, 6), (2.0, 3.0)) == (parwrap.reduce_sum(size), parwrap.reduce_mean(size))
    assert [size, size] == parwrap.gather(size)


@pytest.mark.ranks(2)
def test_arrays_of_other_byte_orders_are_added_up_and_those_that_torch_does_not_know_are_refused():
    for dtype in (">f8", ">i4", ">c16"):
        assert [2, 4] == parwrap.reduce_sum(np.array([1, 2], dtype)).tolist()
    for dtype, known in (np.longdouble, "float64"), (np.clongdouble, "complex128"):
        with pytest.raises(
            UsageError,
            match=rf"reduce_sum\(\) cannot combine arrays of .*, because torch has no such dtype: pass x\.astype\(np\.{known}\)\.",
        ):
            parwrap.reduce_sum(np.ones(2, dtype))


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_send_is_an_error_on_every_rank():
    mine = (lambda: 1) if parwrap.rank() else 1
    with pytest.raises(
        UsageError, match=r"parwrap.gather sends pickled objects to the other ranks, but rank 1's cannot be pickled: .*lambda"
    ):
        parwrap.gather(mine)
    with pytest.raises(UsageError, match=r"parwrap.broadcast sends pickled objects to the other ranks, but rank 1's cannot be pickled: "):
        parwrap.broadcast(mine, src=1)
    with pytest.raises(
        RankMismatchError, match=r"broadcast\(\) got src=0 on rank 0 and src=1 on rank 1, but only one rank can send. Pass the same src"
    ):
        parwrap.broadcast(1, src=parwrap.rank())
    for wrong in ("loss", None, np.array(["loss"])):
        with pytest.raises(UsageError, match="takes tensors, arrays, numbers and dicts"):
            parwrap.reduce_sum(wrong)
    with alone(), pytest.raises(UsageError, match="would wait forever"):
        parwrap.reduce_sum(1)
