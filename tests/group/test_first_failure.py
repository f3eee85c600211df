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

DIES_IN_ITS_BACKWARD = """
import os, torch, parwrap

@parwrap.distributed
def train():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        out = model(torch.ones(1, 1))
        if step == 3 and parwrap.rank() == 1:
            out.register_hook(lambda grad: os._exit(7))
        out.backward()
        optimizer.step()

train()
"""


def last_words(directory, environ, source):
    """What each rank says last, started as ``mpirun`` starts it, which shows all that ranks say."""
    (directory / "train.py").write_text(source)
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
        pytest.param("sys.exit(3)", [], "SystemExit: 3", marks=pytest.mark.slow),
        pytest.param(
            "raise type('Unspeakable', (Exception,), {'__str__': lambda error: 1 / 0})",
            ["Unspeakable: <exception str() failed>"],
            "Unspeakable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_fails_because_of_another_says_so_last(tmp_path, environ, fails, first, told):
    innocent, failing = last_words(tmp_path, environ, FAILING.format(fails=fails))

    assert [f"parwrap: rank 1 of 2 failed first: {told}"] == [line.removeprefix("[rank0]: ") for line in innocent]
    assert first == [line.removeprefix("[rank1]: ") for line in failing]


def test_ranks_that_fail_alike_are_not_told_of_each_other(tmp_path, environ):
    words = last_words(tmp_path, environ, FAILING.format(fails="pass\n    raise ValueError('no data')"))

    assert [["ValueError: no data"]] * 2 == [[line.partition(": ")[2] for line in each] for each in words]


def test_a_rank_that_dies_in_its_backward_keeps_no_other_waiting(tmp_path, environ):
    innocent, _ = last_words(tmp_path, environ, DIES_IN_ITS_BACKWARD)

    assert "by peer" in innocent[0]
