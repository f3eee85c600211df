"""Commands that every rank runs."""

import os
import subprocess
import warnings

import pytest

from parwrap.decorators.rank_zero import rank_zero_only
from parwrap.rank_zero.files import intercepting_files
from parwrap.ranks.group import current, rank


@pytest.mark.ranks(2)
def test_a_command_that_may_write_is_named_once_a_line(tmp_path):
    with warnings.catch_warnings(record=True) as caught, intercepting_files(current()):
        warnings.simplefilter("default")
        for _ in range(3):
            subprocess.run(["touch", "a"], check=True, cwd=tmp_path)
        os.system("echo line >> /dev/full 2>&-")

    assert (2 if rank() == 0 else 0) == len(caught)
    for warning, command in zip(caught, ("`touch a`", "`echo line >> /dev/full 2>&-`"), strict=False):
        assert __file__ == warning.filename
        assert f"runs {command} on each of 2 ranks" in str(warning.message)
        assert "@parwrap.rank_zero_only" in str(warning.message)


@rank_zero_only
def guarded(folder):
    subprocess.run(["touch", folder / "a"], check=True)


@pytest.mark.ranks(2)
def test_commands_that_only_read_or_are_guarded_are_not(tmp_path):
    with warnings.catch_warnings(record=True) as caught, intercepting_files(current()):
        warnings.simplefilter("always")
        subprocess.check_output(["hostname"])
        subprocess.run("git rev-parse HEAD 2> /dev/null", shell=True, check=False)
        os.popen("uname -a | head -1").read()
        guarded(tmp_path)

    assert not [each for each in caught if "parwrap" in str(each.message)]
