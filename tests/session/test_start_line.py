"""The line at the start of training, and other lines next to progress bars. The tests of each feature check its part of the line."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import warnings
from pathlib import Path

import pytest
from tqdm import tqdm

from parwrap.system.progress_bars import bars_cleared, write_line

ROOT = Path(__file__).parents[2]
SCRIPT = """
import time, torch, warnings
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from parwrap import *

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones({samples}, 1)), batch_size=2, shuffle=True)
for epoch in range(2):
    for (x,) in tqdm(loader, desc="training", mininterval=0):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if epoch:
            warnings.warn("one of the script's", stacklevel=1)
"""


def run(tmp_path, samples, *options):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{samples}", str(samples)))
    command = [sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", *options, str(script)]
    return {"args": command, "cwd": ROOT, "env": {**os.environ, "COLUMNS": "100"}}


def lines_on_screen(text):
    """What is to be seen of each line of ``text`` on a terminal, where what follows a carriage return stands over what came before."""
    shown = []
    for line in text.replace("\r\n", "\n").split("\n"):
        screen = ""
        for part in line.split("\r"):
            screen = part + screen[len(part) :]
        shown.append(screen.rstrip())
    return shown


def through_a_pipe(how):
    return subprocess.run(
        **how, stderr=subprocess.PIPE, timeout=120, check=True
    ).stderr.decode()  # text=True takes \r for the end of a line


def through_a_terminal(how):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(**how, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 4096):
            written += data
    except OSError:  # it is closed on the other side
        pass
    os.close(ours)
    assert 0 == process.wait(60)
    return written.decode()


@pytest.mark.parametrize("shown_by", [through_a_pipe, through_a_terminal])
def test_lines_and_warnings_stand_beside_the_bars_of_a_script(shown_by, tmp_path):
    written = shown_by(run(tmp_path, 8))
    lines = lines_on_screen(written)

    (announced,) = [line for line in lines if "parwrap: 2 ranks" in line]
    assert announced.startswith(
        "parwrap: 2 ranks, gloo on cpu, ddp, batch 2 per rank, 4 global, learning rate unchanged, 8 samples / 2 ranks, seed "
    )
    (warned,) = [line for line in lines if "one of the script's" in line and "UserWarning" in line]
    assert re.match(r"\S+train\.py:\d+: UserWarning: one of the script's$", warned)
    assert 2 == len([line for line in lines if re.match(r"training: 100%\|.*\| 2/2 \[", line)])


@pytest.mark.parametrize(
    ("samples", "options", "told"),
    [
        pytest.param(1, (), "batch 2 per rank, 4 global, learning rate unchanged, 1 sample / 2 ranks, ", marks=pytest.mark.slow),
        (
            8,
            ("--accumulate", "4"),
            "batch 2 per rank, 4 global, 16 per step, learning rate unchanged, 8 samples / 2 ranks, accumulate(4), ",
        ),
        (8, ("--accumulate", "4", "--batch", "global"), "batch 1 per rank, 2 global, 8 per step, 8 samples / 2 ranks, accumulate(4), "),
        pytest.param(
            8,
            ("--accumulate", "auto"),
            "batch 2 per rank, 4 global, learning rate unchanged, 8 samples / 2 ranks, accumulate('auto'), ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_says_how_many_samples_there_are_and_make_a_step(samples, options, told, tmp_path):
    assert told in through_a_pipe(run(tmp_path, samples, *options))


@pytest.mark.parametrize("bars", [0, 1])
def test_it_is_a_line_by_itself_also_beside_a_progress_bar(bars, capsys):
    open_bars = [tqdm(total=2, file=sys.stderr) for _ in range(bars)]
    write_line("parwrap: 2 ranks")
    for bar in open_bars:
        bar.close()

    assert "parwrap: 2 ranks" in capsys.readouterr().err.splitlines()


def test_bars_that_write_elsewhere_or_are_closed_are_left_alone(tmp_path, capsys):
    with open(tmp_path / "bar", "w") as file, tqdm(total=2, file=file) as elsewhere, tqdm(total=2) as closed:
        closed.close()
        capsys.readouterr()
        with bars_cleared():
            warnings.showwarning("careful", UserWarning, "train.py", 3)
        file.flush()
        assert "\r" not in capsys.readouterr().err
        assert 1 == (tmp_path / "bar").read_bytes().count(b"\r")
        elsewhere.close()
