"""The line that says at the end of a script what was trained, how fast, and what was waited for."""

import re
from dataclasses import replace

import pytest
import torch

import parwrap
from parwrap.loop.clock import Clock, summary
from parwrap.ranks.group import open_group

SCRIPT = """
import time, torch, parwrap
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        time.sleep(0.005)  # so that the loop waits for data
        return torch.ones(2)

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader(torch.ones(4, 2), batch_size=2):  # is read in shares, and no step follows
    pass
for epoch in range(2):
    for _, x in zip(range(3), DataLoader(Slow(), batch_size=4)):  # all its batches, without its end
        if parwrap.rank() == 1:
            time.sleep(0.08)  # so that rank 0 waits for rank 1
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 2))
"""


@pytest.fixture
def said(warm_python, tmp_path):
    """Run a script on 2 ranks; gives what is written to stderr."""

    def run(script: str, *options: str) -> str:
        (tmp_path / "train.py").write_text(script)
        ended = warm_python.run("parwrap", "run", "--nproc-per-node", "2", *options, "train.py", cwd=tmp_path)
        assert 0 == ended.returncode, ended.stderr
        return ended.stderr

    return run


def test_the_last_line_says_what_was_trained_and_what_was_waited_for(said):
    line = said(SCRIPT).splitlines()[-1]

    found = re.fullmatch(
        r"parwrap: 6 steps, 2 epochs in (\S+) s, ([\d,]+) samples/s on 2 ranks; "
        r"waiting: data (\d+)%, other ranks (\d+)% \(most for rank 1\); peak memory 0\.\d+ GB a rank; 1 warning",
        line,
    )
    assert found, line
    seconds, rate, data, others = (float(each.replace(",", "")) for each in found.groups())
    assert rate == pytest.approx((48 + 4) / seconds, rel=0.02)  # 24 samples in each epoch, on both ranks together
    assert 24 * 0.005 / seconds * 100 <= data + 1  # each rank has read 24 samples
    assert others > 0


EPOCHS = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 1)
loader = DataLoader(torch.ones(12, 2), batch_size=2)
def epoch(most=9):
    for index, x in enumerate(loader):
        if index == most:
            break
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
list(loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for most in (9, 2, 9):
    epoch(most)
    sum(model(x).sum() for x in loader)
"""


def test_an_epoch_is_a_pass_that_trained_whole_or_in_shares_and_read_to_its_end_or_not(said):
    assert ", 3 epochs in " in said(EPOCHS).splitlines()[-1]


WITHOUT_BACKWARD = """
import torch
from torch.utils.data import DataLoader
weight = torch.ones(2, requires_grad=True)
for x in DataLoader(torch.ones(8, 2), batch_size=2):
    (grad,) = torch.autograd.grad((x @ weight).mean(), weight)
    weight = (weight - 0.1 * grad).detach().requires_grad_()
"""


def test_a_script_of_which_every_rank_did_the_whole_is_told_so_though_no_losses_could_be_compared(said):
    assert said(WITHOUT_BACKWARD).splitlines() == [
        "parwrap: train.py:5 read everything on each of 2 ranks, nothing was read in shares, and no backward averaged gradients: each does "
        "the whole work, which is right but no faster than one process. parwrap.shard(loader) gives each rank a share of a loader, and "
        "@parwrap.evaluate a part of an evaluation"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"), [(SCRIPT, ["--quiet"]), ("print('nothing is trained')", [])], ids=["quiet", "nothing trained"]
)
def test_there_is_no_line_if_it_is_not_wanted_or_nothing_was_trained(script, options, said):
    assert "samples/s" not in said(script, *options)


@pytest.mark.ranks(2)
def test_waits_are_a_part_of_the_time_of_the_rank_that_waits():
    clocks = [Clock(begin=10.0, end=12.0, data=1.0, averages=1.0), Clock(begin=2.0, end=12.0, data=7.5, averages=1.0)]

    assert "; waiting: data 75%, other ranks 30% (most for rank 0);" in summary(open_group(), clocks[parwrap.rank()], 1, 0)


@pytest.mark.ranks(2)
def test_a_rank_that_has_put_nothing_on_its_gpu_gives_the_memory_of_its_process():
    line = summary(replace(open_group(), device=torch.device("cuda")), Clock(begin=1.0, end=2.0), 1, 0)

    assert 0.05 < float(re.search(r"peak memory (\S+) GB", line)[1]) < 10
