"""What processes do to files is said once for each line of the script, on rank 0, and not of those that only read."""

import contextlib
import os
import subprocess
import tempfile
from contextlib import contextmanager

import pytest

import parwrap


@contextmanager
def messages_of_rank(folder):
    """This rank's messages about processes in the block, which runs in ``folder``."""
    os.chdir(folder)
    lines = []
    with tempfile.TemporaryFile("w+", buffering=1) as file:
        with contextlib.redirect_stderr(file), parwrap.distributed():
            yield lines
        file.seek(0)
        lines += [line for line in file if "rank_zero_only" in line]


@pytest.mark.ranks(2)
def test_a_command_that_may_write_is_named_once_a_line(tmp_path):
    with messages_of_rank(tmp_path) as lines:
        for _ in range(3):
            subprocess.run(["touch", "a"], check=True)
        os.system("echo line > b")

    assert (2 if parwrap.rank() == 0 else 0) == len(lines)
    for line, command in zip(lines, ("`touch a`", "`echo line > b`"), strict=False):
        assert f"{__file__}:" in line
        assert f"runs {command} on each of 2 ranks" in line


@parwrap.rank_zero_only
def guarded():
    subprocess.run(["touch", "a"], check=True)


@pytest.mark.ranks(2)
def test_commands_that_only_read_or_are_guarded_are_not(tmp_path):
    with messages_of_rank(tmp_path) as lines:
        subprocess.check_output(["hostname"])
        subprocess.run("git rev-parse HEAD 2> /dev/null", shell=True, check=False)
        os.popen("uname -a | head -1").read()
        guarded()

    assert [] == lines
