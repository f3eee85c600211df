import re
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parwrap
from parwrap.strategies.data_parallel.scatter_gather import cut, items_of_samples, merged, sizes_of, why_not
from parwrap.strategies.data_parallel.sharded_outputs import Pieces

CPU = torch.device("cpu")


@given(rows=st.integers(0, 50), parts=st.integers(1, 9))
def test_parts_are_as_even_as_can_be_and_none_is_empty(rows, parts):
    sizes = sizes_of(rows, parts)

    assert rows == sum(sizes)
    assert min(parts, rows) == len(sizes)
    assert not sizes or 0 < min(sizes) >= max(sizes) - 1


def test_rows_are_cut_and_what_has_none_goes_to_all():
    x, flag = torch.arange(5), object()
    first, second = cut({"x": x, "rest": (torch.tensor(2), torch.ones(1, 3), flag, None)}, [3, 2], [CPU] * 2)

    assert [0, 1, 2] == first["x"].tolist()
    assert [3, 4] == second["x"].tolist()
    assert first["rest"][2] is second["rest"][2] is flag
    assert all(torch.equal(*pair) for pair in zip(first["rest"][:2], second["rest"][:2], strict=True))


def test_a_part_may_be_changed_in_place_and_gradients_flow_back():
    x = torch.ones(4, 2, requires_grad=True)
    for part in cut(x * 1, [2, 2], [CPU] * 2):
        part.mul_(3).sum().backward(retain_graph=True)

    assert torch.equal(torch.full((4, 2), 3.0), x.grad)


def test_what_is_in_pieces_already_is_not_put_together():
    pieces = Pieces([torch.ones(3, 2), torch.zeros(2, 2)])

    assert pieces.pieces == tuple(cut(pieces, [3, 2], [CPU] * 2))
    assert pieces.is_in_pieces
    assert [4, 1] == [len(part) for part in cut(pieces, [4, 1], [CPU] * 2)]


def test_an_object_with_tensors_of_its_own_cannot_be_cut():
    class Graph:
        def __init__(self):
            self.nodes = torch.ones(4)

    assert "one of its inputs is a Graph, which contains tensors" == why_not([torch.ones(4), Graph()], 4)
    assert why_not([torch.ones(4), object(), 3, "name", torch.nn.Linear(1, 1)], 4) is None


@pytest.mark.parametrize("value", [3, "name", None, True, torch.tensor(2), torch.tensor(True)])
def test_what_is_the_same_everywhere_stays(value):
    assert value == merged([value, value], [3, 2], [0.6, 0.4], torch.cat, "Net")


class Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclass
class Logits:
    logits: torch.Tensor

    def __post_init__(self):
        self.best = self.logits.argmax(1)


@dataclass
class Both(OrderedDict):
    """What transformers calls a ModelOutput."""

    logits: torch.Tensor = None

    def __post_init__(self):
        self["logits"] = self.logits


@pytest.mark.parametrize("make", [lambda rows: Attributes(logits=rows), Logits, Both])
def test_objects_are_built_anew_and_make_more_of_what_they_are_given(make):
    rows = torch.randn(5, 2)
    whole, expected = merged([make(rows[:3]), make(rows[3:])], [3, 2], None, torch.cat, "Net"), make(rows)

    assert type(expected) is type(whole)
    assert torch.equal(rows, whole.logits)
    assert vars(expected).keys() == vars(whole).keys()
    assert all(torch.equal(each, vars(whole)[name]) for name, each in vars(expected).items())
    assert not isinstance(whole, dict) or torch.equal(rows, whole["logits"])


def test_an_object_that_cannot_be_built_from_its_values_is_an_error():
    class Picky(dict):
        def __init__(self, rows, name):
            super().__init__(rows=rows)

    with pytest.raises(parwrap.UsageError, match="Net returned a Picky, which cannot be rebuilt from its values"):
        merged([Picky(torch.ones(3), "a"), Picky(torch.ones(2), "b")], [3, 2], None, torch.cat, "Net")


PARTED = (
    "does not have one row per sample, so its parts cannot be combined: return tensors whose first dimension is the batch. If it is a "
    "loss, pass loss="
)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.ones(5, 2)] * 2, "Net returned tensors of shape [5, 2] and [5, 2] for 3 and 2 samples, which do not have one row per"),
        (
            [torch.ones(3, 5), torch.ones(2, 4)],
            "Net returned tensors of shape [3, 5] and [2, 4] for the parts of a batch: all dimensions but the first must be equal. Pad "
            "all of them to the length of the whole batch, as pad_packed_sequence does with total_length.",
        ),
        ([torch.tensor(3), torch.tensor(2)], f"Net returned a Tensor that differs between replicas and {PARTED}"),
        ([torch.tensor(3.0), torch.tensor(2.0)], f"Net returned a Tensor that differs between replicas and {PARTED}"),
        ([3.0, 2.0], f"Net returned a float that differs between replicas and {PARTED}"),
        (["a", "b"], f"Net returned a str that differs between replicas and {PARTED}"),
        ([[1, 2, 3], [1, 2]], "Net returned outputs of different structure on different replicas: "),
    ],
)
def test_outputs_that_cannot_be_put_together_are_errors(parts, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        merged(parts, [3, 2], None, torch.cat, "Net")


@pytest.mark.parametrize(
    "value", [[5, 4, 2], (5, 4, 2), ["a", "b", "c"], np.ones(3), np.ones((3, 2)), [[1], [2, 3], []], {"lengths": [5, 4, 2]}]
)
def test_items_beside_the_tensors_may_be_of_samples(value):
    assert "items for 3 samples, which may have one item per sample" in items_of_samples([torch.ones(3, 2), value], 3)
    assert items_of_samples([torch.ones(2, 2), value], 4) is None
    assert items_of_samples([torch.ones(3, 2), [torch.ones(3)] * 3, "abc", None], 3) is None


def test_a_number_that_is_the_same_everywhere_has_the_gradients_of_all():
    x = torch.ones(2, requires_grad=True)
    merged([x.sum(), x.sum()], [3, 2], None, torch.cat, "Net").backward()

    assert torch.equal(torch.ones(2), x.grad)


def test_numbers_are_averaged_by_what_each_part_counts():
    assert 1.4 == pytest.approx(merged([1.0, 2.0], [3, 2], [0.6, 0.4], torch.cat, "Net"))
    assert torch.allclose(torch.tensor(1.4), merged([torch.tensor(1.0), torch.tensor(2.0)], [3, 2], [0.6, 0.4], torch.cat, "Net"))


def test_a_dict_of_a_class_that_torch_does_not_know_keeps_it():
    class Outputs(dict):
        pass

    whole = merged([Outputs(x=torch.ones(3)), Outputs(x=torch.zeros(2))], [3, 2], [0.6, 0.4], torch.cat, "Net")

    assert Outputs is type(whole)
    assert [1, 1, 1, 0, 0] == whole["x"].tolist()
