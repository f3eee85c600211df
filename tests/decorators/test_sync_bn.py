"""``@sync_bn``: which batch norms share their statistics, among whom, and what stays as it was."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import batch_norm
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.errors import LockstepError
from parwrap.ranks.group import alone


def seen(norm=None):
    """The mean that a layer sees of an input that is this rank's number."""
    norm = norm or nn.BatchNorm1d(1, momentum=1.0)
    norm(torch.full((2, 1), float(parwrap.rank())))
    return norm.running_mean.item()


def functional_mean():
    running = torch.zeros(1)
    batch_norm(torch.full((2, 1), float(parwrap.rank())), running, torch.ones(1), training=True, momentum=1.0)
    return running.item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_sise": 2}, "parwrap.sync_bn has no option 'group_sise'; did you mean 'group_size'?"),
        ({"world": 2}, "parwrap.sync_bn has no option 'world'; it takes process_group, group_size."),
        ({"group_size": 0}, "group_size=0 is not a positive integer."),
        ({"group_size": "2"}, "group_size='2' is not a positive integer."),
        ({"group_size": True}, "group_size=True is not a positive integer."),
        ({"process_group": [0, 1]}, "process_group=[0, 1] is not a process group: pass the result of torch.distributed.new_group, or use "),
        (
            {"process_group": 3},
            "process_group=3 is not a process group: pass the result of torch.distributed.new_group",
        ),
        ({"process_group": [0], "group_size": 2}, "parwrap.sync_bn takes either process_group or group_size, because both say which "),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        parwrap.sync_bn(**options)


def test_one_process_has_torchs_own():
    x = torch.randn(4, 1)
    with parwrap.sync_bn():
        out = nn.BatchNorm1d(1)(x)

    assert torch.equal(nn.BatchNorm1d(1)(x), out)
    assert "BatchNorm" in type(out.grad_fn).__name__


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_torchs_function_is_put_back_under_every_name(fails):
    before = F.batch_norm

    @parwrap.sync_bn
    def train():
        assert before is not F.batch_norm
        assert 0.5 == functional_mean()
        if fails:
            raise KeyError("on purpose")

    for _ in range(2):
        try:
            train()
        except KeyError:
            assert fails

        assert before is F.batch_norm
        assert before is batch_norm


@pytest.mark.ranks(2)
def test_nothing_is_shared_outside_in_eval_or_by_a_rank_that_runs_alone():
    norm = nn.BatchNorm1d(1, momentum=1.0)

    assert [0.0, 1.0] == parwrap.gather(seen())
    with parwrap.sync_bn():
        assert [0.5, 0.5] == parwrap.gather(seen(norm))
        norm.eval()(torch.full((2, 1), float(parwrap.rank())))
        with alone():
            assert float(parwrap.rank()) == seen()
        nn.InstanceNorm1d(1)(torch.zeros(1 + parwrap.rank(), 1, 4))

    assert 0.5 == norm.running_mean.item()


@pytest.mark.ranks(2)
def test_the_model_stays_what_it_was():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    keys, classes = list(net.state_dict()), [type(module) for module in net.modules()]
    with parwrap.sync_bn():
        net(torch.randn(2, 2))

    assert (keys, classes) == (list(net.state_dict()), [type(module) for module in net.modules()])


@pytest.mark.ranks(4, fresh=True)
def test_groups_of_consecutive_ranks():
    with parwrap.sync_bn(group_size=2):
        assert [0.5, 0.5, 2.5, 2.5] == parwrap.gather(seen())
    with parwrap.sync_bn(group_size=1):
        assert [0.0, 1.0, 2.0, 3.0] == parwrap.gather(seen())


@pytest.mark.ranks(4, fresh=True)
def test_groups_of_consecutive_ranks_that_come_apart_are_an_error():
    first, second, x = nn.BatchNorm1d(2), nn.BatchNorm1d(2), torch.randn(3, 2)

    @parwrap.distributed
    @parwrap.sync_bn(group_size=2)
    def forward():
        first(x), second(x)
        parwrap.barrier()
        if parwrap.rank() >= 2:
            (first if parwrap.rank() == 2 else second)(x)

    began = time.monotonic()
    with pytest.raises(LockstepError) as raised:
        forward()

    assert time.monotonic() - began < 10
    errors = "".join(parwrap.gather(str(raised.value)))
    assert "rank 2 is in batch norm 1 of 2 channels at test_sync_bn.py" in errors
    assert "rank 3 is in batch norm 2 of 2 channels at test_sync_bn.py" in errors


@pytest.mark.ranks(3, fresh=True)
def test_a_process_group_says_who_shares():
    pair = dist.new_group([0, 2])
    single = dist.new_group([1])
    with parwrap.distributed(), parwrap.sync_bn(process_group=single if parwrap.rank() == 1 else pair):
        assert [1.0, 1.0, 1.0] == parwrap.gather(seen())


@pytest.mark.ranks(3, fresh=True)
def test_groups_that_do_not_fit_are_named():
    with (
        pytest.raises(parwrap.UsageError, match=r"group_size=2 does not divide the 3 ranks into groups .*: choose one of 1, 3\."),
        parwrap.sync_bn(group_size=2),
    ):
        pass
    pair = dist.new_group([0, 1])
    if parwrap.rank() == 2:
        with (
            pytest.raises(parwrap.UsageError, match=r"rank 2 is not in the process_group of parwrap.sync_bn"),
            parwrap.sync_bn(process_group=pair),
        ):
            pass


@pytest.mark.ranks(2)
def test_a_function_inside_may_share_in_smaller_groups():
    with parwrap.sync_bn():
        assert [0.0, 1.0] == parwrap.gather(parwrap.sync_bn(group_size=1)(seen)())
        assert 0.5 == seen()
        assert 0.5 == parwrap.sync_bn(seen)()


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 2).cumsum(0) * (1 + step + parwrap.rank())).square().mean().backward()
        optimizer.step()
    return str(model.state_dict())


@pytest.mark.ranks(2)
def test_the_order_of_decorators_does_not_matter():
    one = parwrap.sync_bn(parwrap.distributed(trained))()

    assert one == parwrap.distributed(parwrap.sync_bn(trained))()
    assert one != parwrap.distributed(trained)()
    with parwrap.sync_bn():
        assert one == parwrap.distributed(trained)()


@torch.no_grad()
def forward_all(loader, model):
    for (x,) in loader:
        model(x)


def trained_and(look):
    """The running statistics after passes that ``look`` at data in the midst of training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    samples = TensorDataset(torch.randn(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(samples, batch_size=6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        look(DataLoader(samples, batch_size=4), model)
    return torch.cat([model[1].running_mean, model[1].running_var])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("look", [update_bn, forward_all])
def test_what_all_ranks_read_whole_counts_once(look):
    with alone():
        expected = trained_and(look)
    actual = parwrap.distributed(batch="global")(parwrap.sync_bn(trained_and))(look)

    assert (actual - expected).abs().max() < 1e-6


@pytest.mark.ranks(2)
def test_a_forward_without_gradients_on_a_training_batch_shares():
    """As of a teacher that follows the model."""

    @parwrap.distributed(batch="global")
    @parwrap.sync_bn
    def train():
        weight, teacher = nn.Parameter(torch.ones(1)), nn.BatchNorm1d(1, momentum=1.0)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for x in DataLoader(torch.arange(4.0).view(4, 1), batch_size=4):
            (weight * x).sum().backward()
            optimizer.step()
            with torch.no_grad():
                teacher(x)
        return teacher.running_mean.item()

    assert [1.5, 1.5] == parwrap.gather(train())


@pytest.mark.ranks(2)
def test_what_the_scripts_own_sampler_divides_shares():
    @parwrap.distributed
    @parwrap.sync_bn
    def train():
        weight, norm = nn.Parameter(torch.ones(1)), nn.BatchNorm1d(1, momentum=1.0)
        torch.optim.SGD([weight], lr=0.1)
        loader = DataLoader(torch.arange(4.0).view(4, 1), 2, sampler=DistributedSampler(range(4), 2, parwrap.rank(), shuffle=False))
        for x in loader:
            norm(weight * x).sum().backward()
        return norm.running_mean.item()

    assert [1.5, 1.5] == parwrap.gather(train())


@pytest.mark.ranks(2)
def test_torch_func_is_said_to_be_of_one_rank():
    with parwrap.sync_bn(), pytest.warns(UserWarning, match=r"uses only this rank's part of the batch: parwrap\.sync_bn supports only"):
        torch.vmap(nn.BatchNorm1d(1, track_running_stats=False))(torch.randn(2, 3, 1))
