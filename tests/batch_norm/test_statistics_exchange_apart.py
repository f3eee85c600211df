"""Shared batch norms when ranks take different paths."""

import io
import os
import sys
import time
import warnings
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import parwrap
from normed import model, states, train
from parwrap.errors import RankMismatchError
from parwrap.group.group import current
from warm_command import run as run_command

ROOT = Path(__file__).parents[2]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("between", [False, True], ids=["before a forward", "between forward and backward"])
def test_a_rank_that_leaves_early_counts_for_nothing_and_nobody_hangs(between):
    steps = {0: 2, 1: 5, 2: 4}[parwrap.rank()]

    @parwrap.distributed
    @parwrap.sync_bn
    def run():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
        if between:
            net(torch.randn(4, 2))
        return net

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = run()

    assert 1 == states(net)
    assert 5 + between == net[1].num_batches_tracked.item()


@pytest.mark.ranks(2)
def test_the_statistics_of_who_is_left_are_those_of_its_own_part():
    norm = nn.BatchNorm1d(1, momentum=1.0, affine=False)
    weight = nn.Parameter(torch.ones(1))

    @parwrap.distributed
    @parwrap.sync_bn
    def run():
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for _ in range(1 + parwrap.rank()):
            norm(weight * torch.tensor([[0.0], [2.0]]) + parwrap.rank()).sum().backward()
            optimizer.step()
        return norm.running_mean.item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [1.5, 2.0] == parwrap.gather(run())


@pytest.mark.ranks(2)
def test_a_rank_whose_loss_does_not_reach_a_layer_lets_the_other_finish():
    net = model()
    with parwrap.distributed(), parwrap.sync_bn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            out = net(torch.randn(4, 2))
            loss = net[0](torch.ones(1, 2)).sum() if step == 2 and parwrap.rank() == 0 else out.square().mean()
            loss.backward()
            optimizer.step()

    assert 1 == states(net)


@pytest.mark.ranks(2)
def test_models_that_are_new_wait_for_ranks_that_still_train_the_old():
    with parwrap.distributed(), parwrap.sync_bn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = [train(model(), 2 + (number + parwrap.rank()) % 3 * 2) for number in range(3)]

    assert [1, 1, 1] == [states(net) for net in nets]


@pytest.mark.ranks(2, timeout=30)
def test_opened_around_functions_it_has_who_leaves_early_answer_in_each():
    @parwrap.distributed
    def run():
        net = train(model(), 1)
        if parwrap.rank() == 1:
            train(model(), 2)
        return net

    with parwrap.sync_bn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert 1 == states(run())


def normalize(last=lambda: None, left_out=()):
    """Three batches through three layers; ``last`` is called before the last one, in which layers may be left out."""
    blocks = nn.ModuleList([nn.BatchNorm1d(2) for _ in range(3)])
    for step in range(3):
        if step == 2:
            last()
        x = torch.randn(4, 2)
        for number, block in enumerate(blocks):
            if step < 2 or number not in left_out:
                x = block(x)


@pytest.mark.ranks(2)
def test_ranks_in_different_layers_end_with_an_error_that_names_them():
    with pytest.raises(RankMismatchError) as error, parwrap.distributed(), parwrap.sync_bn():
        normalize(left_out=[parwrap.rank() + 1])

    said = str(error.value)
    assert said.startswith("the ranks are in different places at the same time")
    assert "Run the same layers in the same order on all ranks, or remove @parwrap.sync_bn." in said
    assert "is in the forward pass of batch norm '1' (2 channels)" in said
    assert "is in the forward pass of batch norm '2' (2 channels)" in said


def test_a_rank_that_fails_ends_those_who_wait_for_it_in_a_layer(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("""
import torch, parwrap
norm = torch.nn.BatchNorm1d(2)
for step in range(3):
    if step == 2 and parwrap.rank() == 1:
        raise ZeroDivisionError("on purpose")
    norm(torch.randn(4, 2))
""")
    command = [sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", "--sync-bn", str(path)]
    run = run_command(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)

    assert run.returncode
    assert "ZeroDivisionError: on purpose" in run.stderr


@pytest.mark.ranks(2)
def test_a_rank_that_is_stuck_is_named_after_a_while():
    heard = io.StringIO()
    with redirect_stderr(heard), parwrap.distributed(hang_after=0.4), parwrap.sync_bn():
        normalize(lambda: time.sleep(1.5 * parwrap.rank()))

    if parwrap.rank() == 0:
        assert "parwrap: a rank has waited for more than 0.4 s." in heard.getvalue()
        assert "Rank 0 has been in the forward pass of batch norm '0' (2 channels)" in heard.getvalue()


@pytest.mark.ranks(2)
def test_one_that_waits_too_long_ends_with_an_error():
    def impatient():
        current().timeout = current().coordinator.timeout = timedelta(seconds=0.3)
        time.sleep(parwrap.rank())

    with pytest.raises(RankMismatchError) as error, parwrap.distributed(), parwrap.sync_bn():
        normalize(impatient)

    if parwrap.rank() == 0:
        assert "rank 0 timed out after waiting 0.3 s for the other ranks to reach the same point (the statistics of a batch norm)" in str(
            error.value
        )
