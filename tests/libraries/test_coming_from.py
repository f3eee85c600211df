"""The scripts of *Coming from another tool* for accelerate and Fabric train what the plain script does on ranks of parwrap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "examples" / "coming_from"
ON_CPUS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


def trained(name, folder, *launch):
    """The lines of epochs and the weights of a script that reads in order, because tools shuffle in other orders."""
    source = (SCRIPTS / name).read_text()
    assert source.count("shuffle=True") == 1
    (folder / name).write_text(source.replace("shuffle=True", "shuffle=False"))
    command = [sys.executable, *launch, name]
    run = subprocess.run(command, cwd=folder, env={**os.environ, **ON_CPUS}, capture_output=True, text=True, timeout=100)

    assert run.returncode == 0, run.stderr
    return [line for line in run.stdout.splitlines() if line.startswith("epoch")], torch.load(folder / "model.pt")


@pytest.mark.parametrize(
    ("library", "name", "launch"),
    [
        ("accelerate", "with_accelerate.py", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]),
        (
            "lightning.fabric",
            "with_fabric.py",
            ["-c", "from lightning.fabric.cli import _main; _main()", "run", "--devices", "2", "--accelerator", "cpu"],
        ),
    ],
)
def test_another_tool_trains_what_the_plain_script_does(library, name, launch, tmp_path):
    pytest.importorskip(library)
    theirs, by_them = trained(name, tmp_path, *launch)
    ours, weights = trained("plain.py", tmp_path, "-m", "parwrap.run", "--nproc-per-node", "2")

    assert len(ours) == 3
    assert theirs == ours
    torch.testing.assert_close(weights, by_them)
