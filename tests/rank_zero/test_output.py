import io
import logging
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest
from tqdm import tqdm

import parwrap
from parwrap.rank_zero.output import settle


def written_by_ranks(write):
    """What each rank writes to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), parwrap.distributed():
        write()
    return parwrap.gather((out.getvalue(), err.getvalue()))


@pytest.mark.ranks(2)
def test_rank_zero_prints_and_force_lets_everybody():
    def write():
        print("hello")
        print("it is", parwrap.rank(), force=True)
        print("beside", parwrap.rank(), force=True, file=sys.stderr)
        sys.stdout.write("written\n")

    assert [("hello\nit is 0\nwritten\n", "beside 0\n"), ("it is 1\n", "beside 1\n")] == written_by_ranks(write)


@pytest.mark.ranks(2)
def test_bars_warnings_and_loggers_are_rank_zeros():
    def write():
        list(tqdm(range(3)))
        warnings.warn("careful", stacklevel=1)
        handler = logging.StreamHandler()
        logging.getLogger("train").addHandler(handler)
        logging.getLogger("train").warning("epoch")

    (_, first), other = written_by_ranks(write)

    assert all(word in first for word in ("3/3", "careful", "epoch"))
    assert ("", "") == other


@pytest.mark.ranks(2)
def test_errors_are_heard_from_every_rank_with_its_number():
    def write():
        if parwrap.rank() == 1:
            logging.getLogger("train").error("lost %s", "it")

    assert [("", ""), ("", "[rank 1] ERROR:train:lost it\n")] == written_by_ranks(write)


@pytest.mark.ranks(2)
def test_print_to_a_file_of_the_users_own_is_left_alone():
    own = io.StringIO()
    with parwrap.distributed():
        print("mine", file=own)

    assert ["mine\n"] * 2 == parwrap.gather(own.getvalue())


@pytest.mark.ranks(2)
def test_a_launcher_may_have_everyone_speak():
    def write():
        print("hello", force=True)
        logging.getLogger("train").addHandler(logging.StreamHandler())
        logging.getLogger("train").warning("epoch")

    settle(everyone=True, log_only=os.devnull)
    try:
        assert [("hello\n", "epoch\n")] * 2 == [(out, err[-6:]) for out, err in written_by_ranks(write)]
    finally:
        settle(everyone=False, log_only=os.devnull)


@pytest.mark.ranks(2)
def test_a_launcher_may_keep_what_nobody_hears(tmp_path):
    log_only = tmp_path / "aside"

    def write():
        print("hello")
        print("aloud", force=True)
        warnings.warn("careful", stacklevel=1)

    settle(everyone=False, log_only=str(log_only))
    try:
        (out, err), other = written_by_ranks(write)
    finally:
        settle(everyone=False, log_only=os.devnull)

    assert ("hello\naloud\n", True) == (out, "careful" in err)
    assert ("aloud\n", "") == other
    if parwrap.rank() == 1:
        assert "hello\n" == log_only.read_text()[:6]
        assert "careful" in log_only.read_text()


def test_one_rank_takes_force_too(capsys):
    with parwrap.distributed():
        print("hello", force=True)

    assert "hello\n" == capsys.readouterr().out
