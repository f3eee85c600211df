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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at", "accuracy"),
    [
        pytest.param("fsdp.py", 1, 0.9, marks=FSDP),
        ("hogwild.py", 0, 0.8),
        ("parameter_server.py", 1, 0.85),
        ("parameter_server.py", 2, 0.9),
        ("self_launch.py", 0, 0.9),
    ],
)
def test_an_example_learns_on_ranks(name, at, accuracy, tmp_path):
    printed = printed_by(commands(name)[at], tmp_path)

    assert " samples on each of 2 ranks" in printed
    assert float(re.findall(r"accuracy (\S+)", printed)[-1]) >= accuracy


@FSDP
@pytest.mark.slow
def test_a_checkpoint_of_shards_loads_in_a_plain_model(tmp_path):
    import runpy

    import torch

    printed_by(commands("fsdp.py")[1] + " --epochs 1", tmp_path)

    model = runpy.run_path(str(EXAMPLES / "fsdp.py"))["Decoder"](64, 2)
    model.load_state_dict(torch.load(tmp_path / "decoder.pt"))
