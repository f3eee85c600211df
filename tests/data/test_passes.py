"""A pass that is asked whether another batch comes."""

import pytest
import torch
from torch.utils.data import DataLoader

import parwrap
from parwrap.data.passes import Pass


def recorded(batches):
    """A pass, and a list of its calls."""
    calls = []
    return Pass(iter(batches), lambda exhausted: calls.append(f"exhausted {exhausted}"), lambda batch: calls.append("drawn")), calls


def test_looking_ahead_changes_nothing_that_is_seen():
    reading, calls = recorded("ab")

    assert not reading.last()
    assert [("a", False), ("b", True)] == [(batch, reading.last() and reading.last()) for batch in reading]
    assert ["drawn", "drawn", "exhausted True"] == calls
    assert [] == list(reading)


def test_the_innermost_pass_looks_ahead():
    inner, calls = recorded("ab")
    outer = Pass(inner, lambda exhausted: None)
    next(outer)

    assert not outer.last()
    assert ["drawn"] == calls
    assert "b" == next(outer)
    assert outer.last()


def test_an_error_is_raised_where_its_batch_is_drawn():
    def broken():
        yield "a"
        raise KeyError("broken")

    reading, calls = recorded(broken())

    assert "a" == next(reading)
    assert not reading.last()
    with pytest.raises(KeyError, match="broken"):
        next(reading)
    assert ["drawn", "exhausted False"] == calls


@pytest.mark.ranks(2, timeout=20)
def test_a_pass_that_outlives_the_function_goes_on_with_its_share():
    @parwrap.distributed
    def begin():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(DataLoader(torch.arange(8.0), batch_size=1))
        return [next(batches).item()], batches, optimizer

    seen, batches, _ = begin()
    seen += [batch.item() for batch in batches]

    assert [0.0, 2.0, 4.0, 6.0] == sorted(seen) or [1.0, 3.0, 5.0, 7.0] == sorted(seen)
