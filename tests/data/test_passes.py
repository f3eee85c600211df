"""A pass that is asked whether another batch comes."""

import pytest

from parwrap.data.passes import Pass


def told(batches):
    """A pass, and what it has told."""
    heard = []
    return Pass(iter(batches), lambda exhausted: heard.append(f"exhausted {exhausted}"), lambda batch: heard.append("drawn")), heard


def test_looking_ahead_changes_nothing_that_is_seen():
    reading, heard = told("ab")

    assert not reading.last()
    assert [("a", False), ("b", True)] == [(batch, reading.last() and reading.last()) for batch in reading]
    assert ["drawn", "drawn", "exhausted True"] == heard
    assert [] == list(reading)


def test_the_innermost_pass_looks_ahead():
    inner, heard = told("ab")
    outer = Pass(inner, lambda exhausted: None)
    next(outer)

    assert not outer.last()
    assert ["drawn"] == heard
    assert "b" == next(outer)
    assert outer.last()


def test_an_error_is_raised_where_its_batch_is_drawn():
    def broken():
        yield "a"
        raise KeyError("broken")

    reading, heard = told(broken())

    assert "a" == next(reading)
    assert not reading.last()
    with pytest.raises(KeyError, match="broken"):
        next(reading)
    assert ["drawn", "exhausted False"] == heard
