"""Who is told which rank failed first: the one that fails because of it."""

import subprocess
import sys

import pytest

FAILING = """
import sys, parwrap

@parwrap.distributed
def train():
    parwrap.barrier()
    if parwrap.rank() == 1:
        {fails}
    parwrap.barrier()

train()
"""


def last_words(directory, environ, fails):
    """What each rank says last, started as ``mpirun`` starts it, which shows all that ranks say."""
    (directory / "train.py").write_text(FAILING.format(fails=fails))
    ranks = []
    for rank in range(2):
        place = {"PARWRAP_RANK": f"{rank}", "PARWRAP_WORLD_SIZE": "2", "PARWRAP_LOCAL_RANK": f"{rank}"}
        variables = {**environ, **place, "PARWRAP_INIT_METHOD": f"file://{directory}/meeting"}
        command = [sys.executable, "train.py"]
        ranks.append(subprocess.Popen(command, cwd=directory, env=variables, stderr=subprocess.PIPE, text=True))
    return [rank.communicate(timeout=60)[1].splitlines()[-1:] for rank in ranks]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize(
    ("fails", "first", "told"),
    [
        ("raise ValueError('unhappy')", ["ValueError: unhappy"], "ValueError: unhappy"),
        ("sys.exit(3)", [], "SystemExit: 3"),
        (
            "raise type('Unspeakable', (Exception,), {'__str__': lambda error: 1 / 0})",
            ["Unspeakable: <exception str() failed>"],
            "Unspeakable",
        ),
    ],
)
def test_a_rank_that_fails_because_of_another_says_so_last(tmp_path, environ, fails, first, told):
    innocent, failing = last_words(tmp_path, environ, fails)

    assert [f"parwrap: rank 1 of 2 failed first: {told}"] == [line.removeprefix("[rank0]: ") for line in innocent]
    assert first == [line.removeprefix("[rank1]: ") for line in failing]


def test_ranks_that_fail_alike_are_not_told_of_each_other(tmp_path, environ):
    words = last_words(tmp_path, environ, "pass\n    raise ValueError('no data')")

    assert [["ValueError: no data"]] * 2 == [[line.partition(": ")[2] for line in each] for each in words]
