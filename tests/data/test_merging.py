"""One result of several, of the type that one process would have; nothing here needs a process group."""

import math
import re
from collections import Counter, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parwrap.data.evaluation_shares import Reading
from parwrap.data.merging import Part, merged
from parwrap.errors import UsageError

Scores = namedtuple("Scores", "loss name")


@dataclass(frozen=True)
class Report:
    loss: float
    scores: tuple


def read(sizes, **how):
    return Reading("eval.py:9", sizes=sizes, **how)


def merge(reduce, *results, sizes=None, **passed):
    sizes = sizes or [[2, 2], [1]]
    return merged(reduce, [Part(result, [read(own, **passed)]) for result, own in zip(results, sizes, strict=True)])


def equal(expected, actual):
    """The same values of the same types."""
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        return type(expected) is type(actual) and expected.dtype == actual.dtype and expected.tolist() == actual.tolist()
    if isinstance(expected, dict):
        return (
            list(expected) == list(actual) and all(equal(expected[key], actual[key]) for key in expected) and type(expected) is type(actual)
        )
    if isinstance(expected, (list, tuple)):
        return type(expected) is type(actual) and all(map(equal, expected, actual)) and len(expected) == len(actual)
    return type(expected) is type(actual) and expected == actual


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 6.0, 2.0),
        (np.float32(1), np.float32(6), np.float32(2)),
        (torch.tensor([1.0, 2.0]), torch.tensor([6.0, 2.0]), torch.tensor([2.0, 2.0])),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(6.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)),
        (np.array([1.0, 6.0]), np.array([6.0, 1.0]), np.array([2.0, 5.0])),
        (1 + 1j, 6 + 1j, 2 + 1j),
        ({"a": [1.0, None], "b": ("x", True)}, {"a": [6.0, None], "b": ("x", True)}, {"a": [2.0, None], "b": ("x", True)}),
        (Scores(1.0, "test"), Scores(6.0, "test"), Scores(2.0, "test")),
        (Report(1.0, (0.0,)), Report(6.0, (5.0,)), Report(2.0, (1.0,))),
        (math.inf, math.inf, math.inf),
        (0, 5.0, 1.0),
        (0.0, torch.tensor(5.0), torch.tensor(1.0)),
        (np.array([5.0]), 0, np.array([4.0])),
    ],
    ids=repr,
)
def test_a_mean_is_weighted_by_samples(one, other, expected):
    assert equal(expected, merge("mean", one, other))


COUNTS = [np.int64(3), np.float32(0.5), torch.tensor(3), torch.tensor([1.0, 2.0]), np.array([1, 2])]
"""Counts of matches; a part without one keeps the 0 that they are added to."""


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (3, 4, 7),
        (3, 0.5, 3.5),
        (2**62, 2**62, 2**63),
        (np.int32(3), np.int32(4), np.int32(7)),
        (torch.tensor([3, 4]), torch.tensor([1, 1]), torch.tensor([4, 5])),
        (torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)),
        (np.array([1, 2], np.int16), np.array([1, 1], np.int16), np.array([2, 3], np.int16)),
        (Counter(cat=1), Counter(dog=2, cat=1), Counter(cat=2, dog=2)),
        ({"n": 1, "split": "test", "done": True}, {"n": 2, "split": "test", "done": True}, {"n": 3, "split": "test", "done": True}),
        (None, None, None),
        *((0, some, some) for some in COUNTS),
        *((some, 0, some) for some in COUNTS),
        (0.5, torch.tensor(1), torch.tensor(1.5)),
        (torch.tensor(1), torch.tensor(0.5), torch.tensor(1.5)),
        (1, np.array([1, 2], np.int8), np.array([2, 3], np.int8)),
        (np.array([1], np.int8), np.array([0.5]), np.array([1.5])),
    ],
    ids=repr,
)
def test_a_sum_stays_what_it_was(one, other, expected):
    assert equal(expected, merge("sum", one, other))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([[0.0, 0.0]] * 4 + [[1.0, 1.0]])),
        (np.zeros(4), np.ones(1), np.array([0.0, 0, 0, 0, 1])),
        (["a", "b", "c"], [], ["a", "b", "c"]),
        ((torch.zeros(4), ["x"]), (torch.ones(1), ["y"]), (torch.tensor([0.0, 0, 0, 0, 1]), ["x", "y"])),
        ({"labels": [1], "split": "test"}, {"labels": [2, 3], "split": "test"}, {"labels": [1, 2, 3], "split": "test"}),
        ({"cat": [1]}, {"dog": [2], "cat": [3]}, {"cat": [1, 3], "dog": [2]}),
    ],
    ids=str,
)
def test_what_is_gathered_is_concatenated(one, other, expected):
    assert equal(expected, merge("gather", one, other))


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(-1e6, 1e6)), min_size=1, max_size=8))
def test_a_mean_of_means_is_the_mean_of_all(parts):
    expected = math.fsum(count * value for count, value in parts) / sum(count for count, _ in parts)
    actual = merged("mean", [Part(value, [read([count])]) for count, value in parts])

    assert math.isclose(expected, actual, rel_tol=1e-12, abs_tol=1e-9)


def test_a_function_gets_the_results_and_entries_may_each_have_their_own_way():
    assert [1, 2] == merge(list, 1, 2)
    reduce = {"loss": "mean", "correct": "sum", "scores": "gather", "best": max}
    one, other = ({"loss": loss, "correct": 1, "scores": [loss], "best": loss} for loss in (1.0, 6.0))

    assert {"loss": 2.0, "correct": 2, "scores": [1.0, 6.0], "best": 6.0} == merge(reduce, one, other)
    assert (2.0, 2) == merge(("mean", "sum"), (1.0, 1), (6.0, 1))
    assert Scores(2.0, "x") == merge(("mean", "sum"), Scores(1.0, "x"), Scores(6.0, "x"))


@pytest.mark.parametrize("reduce", ["mean", "sum", "gather"])
def test_the_result_of_the_only_part_is_left_alone(reduce):
    result = {"count": 3, "anything": object()}

    assert result is merged(reduce, [Part(result, [read([3])])])


WHOLE = "is an integer, and the mean of the ranks' counts is not the count of a single process: use reduce='sum' for it"


@pytest.mark.parametrize(
    ("reduce", "one", "other", "message"),
    [
        ("mean", {"n": 3}, {"n": 3}, f"evaluate(reduce='mean'): the result['n'] {WHOLE}"),
        ("mean", torch.tensor(3), torch.tensor(3), f"evaluate(reduce='mean'): the result {WHOLE}"),
        (
            "gather",
            [1],
            (1,),
            "evaluate(reduce='gather'): the result has a different type on some ranks: list on one and tuple on another.",
        ),
        (
            "gather",
            3,
            4,
            "evaluate(reduce='gather'): the result is the number 3, but 'gather' joins lists or tensors. Return one of these, or use "
            "'sum' for it, for example",
        ),
        ("gather", torch.tensor(3.0), torch.tensor(3.0), "has shapes that cannot be concatenated along the first dimension: [], []."),
        (
            "gather",
            torch.ones(1, 2),
            torch.ones(1, 3),
            "the result has shapes that cannot be concatenated along the first dimension: [1,",
        ),
        (
            "sum",
            "a",
            "b",
            "evaluate(reduce='sum'): the result has a different value on some ranks: 'a' on one and 'b' on another. A str is kept "
            "only if all ranks return the same one: return a number or a tensor, or pass a function as reduce.",
        ),
        (
            "sum",
            (True,),
            (False,),
            "evaluate(reduce='sum'): the result[0] has a different value on some ranks: True on one and False on another. A bool is",
        ),
        (
            "sum",
            torch.tensor([True]),
            torch.tensor([True]),
            "the result is a tensor of bools, which have no sum: return a count, such as `mask.sum()`, or pass a function as reduce.",
        ),
        ("sum", [1], [1, 2], "evaluate(reduce='sum'): the result has a different length on some ranks: 1 on one and 2 on another."),
        (
            "sum",
            torch.ones(1),
            torch.ones(2),
            "the result has a different shape on some ranks: [1] on one and [2] on another. For predictions, use",
        ),
        ("sum", {1}, {2}, "evaluate(reduce='sum'): the result is a set, which cannot be merged: return numbers,"),
        (
            "mean",
            {"a": 1.0},
            {"b": 1.0},
            "evaluate(reduce='mean'): the result has the key 'b' on some ranks, but not on rank 0: use reduce='sum', or",
        ),
        (
            {"a": "sum"},
            {"a": 1, "b": 2},
            {"a": 1, "b": 2},
            "reduce={'a': 'sum'} does not match the result, {'a': 1, 'b': 2}: pass",
        ),
        ({"a": "sum"}, {"a": 1}, {"b": 2}, "reduce={'a': 'sum'} does not match the result, {'b': 2}: pass one reduction for each"),
        (("sum",), (1,), 2, "reduce=('sum',) does not match the result, 2: pass one reduction for each"),
        (("sum",), 1, 2, "reduce=('sum',) does not match the result, 1: pass one reduction for each of its entries, or one for all."),
        (
            "sum",
            Report(1.0, (None,)),
            Report(1.0, (2,)),
            "evaluate(reduce='sum'): the result.scores[0] has a different value on some ranks: None on one and 2 on another.",
        ),
    ],
)
def test_what_cannot_be_put_together(reduce, one, other, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        merge(reduce, one, other)


def test_parts_of_several_loaders_must_be_in_proportion_for_a_mean():
    def two_loaders(second):
        return [Part(value, [read([own]), read([more])]) for value, own, more in zip((1.0, 4.0), (4, 2), second, strict=True)]

    assert 2.0 == merged("mean", two_loaders((8, 4)))
    with pytest.raises(
        UsageError, match=re.escape("reads several loaders, and the ranks' parts of them have different proportions ([4, 2]")
    ):
        merged("mean", two_loaders((2, 2)))


def test_items_that_may_be_samples_or_batches_cannot_be_weighted():
    parts = [Part(value, [read([1, 1], rows=rows)]) for value, rows in ((1.0, 8), (2.0, 6))]

    assert 1.5 == merged("mean", [part._replace(passes=[read([1, 1], rows=8)]) for part in parts])
    with pytest.raises(
        UsageError,
        match="a loader with batch_size=None yields items of different sizes, and it is unknown whether an item is a sample or a",
    ):
        merged("mean", parts)


def test_rows_of_several_loaders_are_in_order_only_if_they_are_of_one():
    passes = [[read([2]), read([1])], [read([1]), read([1])]]

    assert [1, 2, 3] == merged("gather", [Part([1, 2], passes[0]), Part([3], passes[1])])
    with pytest.raises(UsageError, match=re.escape("the function reads several loaders, and the ranks have 3, 2 rows, which is neither")):
        merged("gather", [Part([1, 2, 9], passes[0]), Part([3, 9], passes[1])])


@pytest.mark.parametrize("predictions", [torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), [1.0, 2.0]], ids=["tensor", "array", "list"])
def test_what_may_be_predictions_is_averaged_with_a_warning(predictions):
    parts = [
        Part(predictions, [read([2])]),
        Part(type(predictions)([3.0, 4.0]) if isinstance(predictions, list) else predictions + 2, [read([2])]),
    ]
    with pytest.warns(UserWarning, match="each rank read 2 samples, and the result has 2 entries, .*use reduce='gather'"):
        assert [2.0, 3.0] == list(merged("mean", parts))
