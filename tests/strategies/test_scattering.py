import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parwrap.strategies.pieces import Pieces
from parwrap.strategies.scattering import cut, merged, sizes_of, why_not

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

    assert "it is given a Graph, which holds tensors of its own" == why_not([torch.ones(4), Graph()], 4)
    assert why_not([torch.ones(4), object(), 3, "name", torch.nn.Linear(1, 1)], 4) is None


@pytest.mark.parametrize("value", [3, "name", None, True, torch.tensor(2), torch.tensor(True)])
def test_what_is_the_same_everywhere_stays(value):
    assert value == merged([value, value], [3, 2], [0.6, 0.4], torch.cat, "Net")


def test_numbers_are_averaged_by_what_each_part_counts():
    assert 1.4 == pytest.approx(merged([1.0, 2.0], [3, 2], [0.6, 0.4], torch.cat, "Net"))
    assert torch.allclose(torch.tensor(1.4), merged([torch.tensor(1.0), torch.tensor(2.0)], [3, 2], [0.6, 0.4], torch.cat, "Net"))


def test_a_dict_of_a_class_that_torch_does_not_know_keeps_it():
    class Outputs(dict):
        pass

    whole = merged([Outputs(x=torch.ones(3)), Outputs(x=torch.zeros(2))], [3, 2], [0.6, 0.4], torch.cat, "Net")

    assert Outputs is type(whole)
    assert [1, 1, 1, 0, 0] == whole["x"].tolist()
