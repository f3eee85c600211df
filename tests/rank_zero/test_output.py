"""Who is heard."""

import io
import os
import subprocess
import sys
import threading
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest
from tqdm import tqdm

from parwrap.rank_zero.output import output_of


def test_ranks_above_zero_are_silent_and_force_lets_them_print(capfd):
    with output_of(1):
        print("hello")
        print("it is 1", force=True)
        print("beside 1", force=True, file=sys.stderr)
        sys.stdout.write("written\n")
        os.write(1, b"by descriptor\n")
        subprocess.run(["echo", "by a child"], check=True)
        list(tqdm(range(3)))
        warnings.warn("careful", stacklevel=1)
    print("after")

    assert ("it is 1\nafter\n", "beside 1\n") == capfd.readouterr()


def test_the_error_of_a_thread_is_heard_on_every_rank(capfd, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has one of its own
    with output_of(1):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

    assert capfd.readouterr().err.endswith("ZeroDivisionError: division by zero\n")


def test_rank_zero_is_heard(capfd):
    with output_of(0):
        print("hello")
        print("it is 0", force=True)
        os.write(1, b"by descriptor\n")

    assert ["by descriptor", "hello", "it is 0"] == sorted(capfd.readouterr().out.splitlines())


def test_streams_in_memory_are_silent_too():
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), output_of(1):
        print("hello")
        print("it is 1", force=True)
        print("beside", file=sys.stderr)

    assert ("it is 1\n", "") == (out.getvalue(), err.getvalue())


def test_the_streams_stay_the_same_objects(capfd):
    before = sys.stdout, sys.stderr
    with output_of(1):
        assert before == (sys.stdout, sys.stderr)

    assert before == (sys.stdout, sys.stderr)


def test_a_log_keeps_what_is_not_heard(capfd, tmp_path):
    with output_of(1, str(tmp_path / "log")):
        print("hello")
        os.write(2, b"by descriptor\n")

    assert {"hello", "by descriptor"} == set((tmp_path / "log").read_text().splitlines())
    assert ("", "") == capfd.readouterr()


def test_errors_are_heard_from_every_rank(capfd):
    with output_of(1) as output:
        print("lost it", file=output.errors)

    assert ("", "lost it\n") == capfd.readouterr()


def test_a_launcher_may_let_every_rank_speak(capfd):
    with output_of(1, heard=True):
        print("hello")
        print("aloud", force=True)

    assert ("hello\naloud\n", "") == capfd.readouterr()


def test_print_to_a_file_of_the_users_own_is_left_alone():
    own = io.StringIO()
    with output_of(1):
        print("mine", file=own)
        print("forced", file=own, force=True)

    assert "mine\nforced\n" == own.getvalue()


@pytest.mark.parametrize("rank", [0, 1])
def test_wandb_is_rank_zeros(rank, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with output_of(rank):
        assert (None, "disabled")[rank] == os.environ.get("WANDB_MODE")


@pytest.mark.parametrize("rank", [0, 1])
def test_everything_is_put_back_after_an_error(rank, capfd, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    before, descriptors = print, len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError), output_of(rank):
        raise KeyError(os.environ.get("WANDB_MODE"))
    print("heard")

    assert before is print
    assert "WANDB_MODE" not in os.environ
    assert descriptors == len(os.listdir("/proc/self/fd"))
    assert "heard\n" == capfd.readouterr().out
