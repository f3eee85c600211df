"""The scripts of the tutorials and of the pages for those who come from another tool: on two ranks they train what the pages promise."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = ("-m", "parwrap.run", "--nproc-per-node", "2")


def printed(*command, cwd):
    """What a command of Python prints."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text):
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def epochs(text):
    """The lines of epochs and the last result."""
    return [line for line in text.splitlines() if line.startswith(("epoch", "best"))]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transfer_learning.py", []),
        pytest.param("gpt.py", [], marks=pytest.mark.slow),
        pytest.param(
            "gpt.py",
            ["--strategy", "fsdp", "--wrap", "Block"],
            marks=[pytest.mark.slow, pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")],
        ),
    ],
)
def test_a_tutorial_prints_the_numbers_of_one_process(name, options, tmp_path):
    arguments = ["--epochs", "2", "--save", "gpt.pt"] if name == "gpt.py" else []
    one = printed(EXAMPLES / name, *arguments, cwd=tmp_path)
    several = printed(*RUN, "--batch", "global", *options, EXAMPLES / name, *arguments, cwd=tmp_path)

    assert len(epochs(one)) >= 2
    assert numbers("\n".join(epochs(several))) == pytest.approx(numbers("\n".join(epochs(one))), abs=2e-3)


@pytest.mark.slow
@pytest.mark.needs_torch(2, 10, why="fsdp does")
def test_the_sharded_gpt_saves_a_plain_checkpoint(tmp_path):
    import runpy

    import torch

    printed(*RUN, "--strategy", "fsdp", "--wrap", "Block", EXAMPLES / "gpt.py", "--epochs", "1", "--save", "gpt.pt", cwd=tmp_path)
    state = torch.load(tmp_path / "gpt.pt")
    model = runpy.run_path(str(EXAMPLES / "gpt.py"))["GPT"](len(state["tokens.weight"]))

    model.load_state_dict(state)


@pytest.mark.slow
def test_the_trainer_of_skorch_learns_what_it_learns_alone(tmp_path):
    pytest.importorskip("skorch")
    accuracy = [
        numbers(printed(*command, EXAMPLES / "skorch_digits.py", cwd=tmp_path).split("test accuracy")[1])[0]
        for command in ([], [*RUN, "--quiet", "--batch", "global"])
    ]

    assert accuracy[1] == pytest.approx(accuracy[0], abs=0.01)


def test_the_plain_loop_trains_bit_for_bit_what_ddp_by_hand_does(tmp_path):
    """Both read in order here, because the two sides shuffle in other orders."""
    import torch

    weights = []
    for name, launch in (("plain.py", RUN), ("ddp.py", ("-m", "torch.distributed.run", "--nproc-per-node", "2"))):
        source = (EXAMPLES / "coming_from" / name).read_text()
        assert source.count("shuffle=True") == 1
        (tmp_path / name).write_text(source.replace("shuffle=True", "shuffle=False"))
        text = printed(*launch, tmp_path / name, cwd=tmp_path)
        weights.append((torch.load(tmp_path / "model.pt"), epochs(text)))
    (ours, our_lines), (by_hand, lines) = weights

    assert lines == our_lines
    assert all(torch.equal(ours[name], by_hand[name]) for name in by_hand)


@pytest.mark.slow
def test_a_run_that_fails_and_starts_again_prints_the_losses_of_one_without_a_break(tmp_path):
    whole = epochs(printed(*RUN, EXAMPLES / "resume.py", cwd=tmp_path))
    broken = printed(*RUN, "--max-restarts", "1", EXAMPLES / "resume.py", "--fail-at", "33", cwd=tmp_path)

    assert "resumed at step 30" in broken
    assert whole == epochs(broken)


RESUMED = """import os, torch
torch.manual_seed(0)
x = torch.randn(48, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
epochs = 3
def train_epoch(model, optimizer):
    for step, (features, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = (model(features) - targets).square().mean()
        loss.backward()
        optimizer.step()
        if epoch == 1 and step == 2 and os.environ.get("FAILS") and not first:
            raise RuntimeError("in the midst of an epoch")
    print(f"epoch {epoch}: {loss.item():.6f}")
"""


def test_the_loop_of_the_page_on_checkpoints_goes_on_as_without_a_break(tmp_path, monkeypatch):
    page = (EXAMPLES.parent / "docs" / "checkpoints.rst").read_text()
    loop = re.search(r"\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)", page)[1]
    (tmp_path / "train.py").write_text(RESUMED + textwrap.dedent(loop))

    whole = epochs(printed(*RUN, "train.py", cwd=tmp_path))
    (tmp_path / "checkpoint.pt").unlink()
    monkeypatch.setenv("FAILS", "1")
    broken = epochs(printed(*RUN, "--max-restarts", "1", "train.py", cwd=tmp_path))

    assert len(whole) == 3
    assert whole == broken
