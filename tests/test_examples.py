"""The examples train what they promise, by the commands that their first lines show."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FSDP = pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")


def commands(name):
    """The commands in the docstring of an example."""
    return re.findall(r"^python (.*)$", (EXAMPLES / name).read_text().split('"""')[1], re.MULTILINE)


def printed_by(command, folder):
    """What a command prints. It runs in a folder with a link to the examples."""
    (folder / "examples").symlink_to(EXAMPLES)
    run = subprocess.run([sys.executable, *shlex.split(command)], cwd=folder, capture_output=True, text=True, timeout=100)

    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def learned(printed, accuracy):
    assert " samples on each of 2 ranks" in printed
    assert float(re.findall(r"accuracy (\S+)", printed)[-1]) >= accuracy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at", "accuracy"),
    [
        ("hogwild.py", 0, 0.8),
        ("parameter_server.py", 1, 0.85),
        ("parameter_server.py", 2, 0.9),
        ("self_launch.py", 0, 0.9),
    ],
)
def test_an_example_learns_on_ranks(name, at, accuracy, tmp_path):
    learned(printed_by(commands(name)[at], tmp_path), accuracy)


@FSDP
@pytest.mark.slow
def test_an_example_learns_in_shards_and_its_checkpoint_loads_in_a_plain_model(tmp_path):
    import runpy

    import torch

    learned(printed_by(commands("fsdp.py")[1], tmp_path), 0.9)

    model = runpy.run_path(str(EXAMPLES / "fsdp.py"))["Decoder"](64, 2)
    model.load_state_dict(torch.load(tmp_path / "decoder.pt"))
