"""Which batch norms are shared, and what becomes of ranks that part ways."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import parwrap
from parwrap.group import current
from parwrap.strategies import sharing

ROOT = Path(__file__).parents[2]


def seen(norm=None):
    """The mean that a layer sees of an input that is this rank's number."""
    norm = norm or nn.BatchNorm1d(1, momentum=1.0)
    norm(torch.full((2, 1), float(parwrap.rank())))
    return norm.running_mean.item()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(net, steps, batch=8):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(batch, 2, generator=generator).chunk(parwrap.world_size())[parwrap.rank()]
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    return net


def states(net):
    """How many different states the ranks have."""
    return len({str(each) for each in parwrap.gather(net.state_dict())})


@pytest.mark.ranks(2)
def test_in_distributed_training_the_weights_are_those_of_one_process_with_the_whole_batch():
    def one():
        alone, optimizer = model(), None
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            optimizer.zero_grad()
            alone(torch.randn(8, 2, generator=generator)).square().mean().backward()
            optimizer.step()
        return alone.state_dict()

    expected = one()
    with parwrap.distributed(), parwrap.sync_bn():
        trained = train(model(), 10)

    assert 1 == states(trained)
    for name, value in trained.state_dict().items():
        assert torch.allclose(expected[name], value, atol=1e-5), name


@pytest.mark.ranks(2)
def test_nothing_is_shared_outside_in_eval_or_by_a_rank_that_runs_alone():
    norm = nn.BatchNorm1d(1, momentum=1.0)

    assert [0.0, 1.0] == parwrap.gather(seen())
    with parwrap.sync_bn():
        assert [0.5, 0.5] == parwrap.gather(seen(norm))
        frozen = norm.eval()(torch.full((2, 1), float(parwrap.rank())))
        assert parwrap.rank_zero_only(broadcast=True)(seen)() == 0.0
        nn.InstanceNorm1d(1)(torch.zeros(1 + parwrap.rank(), 1, 4))

    assert 0.5 == norm.running_mean.item()
    assert frozen[0].item() == norm(torch.full((2, 1), float(parwrap.rank())))[0].item()


@pytest.mark.ranks(2)
def test_the_model_stays_what_it_was():
    net = model()
    keys, classes = list(net.state_dict()), [type(module) for module in net.modules()]
    with parwrap.sync_bn():
        net(torch.randn(2, 2))

    assert (keys, classes) == (list(net.state_dict()), [type(module) for module in net.modules()])


@pytest.mark.ranks(4)
def test_groups_of_consecutive_ranks():
    with parwrap.sync_bn(group_size=2):
        assert [0.5, 0.5, 2.5, 2.5] == parwrap.gather(seen())
    with parwrap.sync_bn(group_size=1):
        assert [0.0, 1.0, 2.0, 3.0] == parwrap.gather(seen())


@pytest.mark.ranks(3)
def test_a_process_group_says_who_shares():
    pair = dist.new_group([0, 2])
    single = dist.new_group([1])
    with parwrap.sync_bn(process_group=single if parwrap.rank() == 1 else pair):
        assert [1.0, 1.0, 1.0] == parwrap.gather(seen())


@pytest.mark.ranks(3)
def test_groups_that_do_not_fit_are_named():
    with (
        pytest.raises(parwrap.UsageError, match=r"group_size=2 does not divide the 3 ranks into groups .*: take one of 1, 3\."),
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


def test_one_process_has_torchs_own():
    x = torch.randn(4, 1)
    with parwrap.sync_bn():
        out = nn.BatchNorm1d(1)(x)

    assert torch.equal(nn.BatchNorm1d(1)(x), out)
    assert "BatchNorm" in type(out.grad_fn).__name__


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


@pytest.mark.ranks(2)
def test_layers_that_are_new_in_each_step_are_soon_not_searched_for_any_more(monkeypatch):
    searches = []
    monkeypatch.setattr(sharing, "_named_layers", lambda found=sharing._named_layers: searches.append(1) or found())
    with parwrap.distributed(), parwrap.sync_bn():
        assert [0.5] * 100 == [seen() for _ in range(100)]
        norm = nn.BatchNorm1d(1, momentum=1.0)
        assert [0.5] * 100 == [seen(norm) for _ in range(100)]

    assert 8 + len([16, 32, 64]) == len(searches)


def ended(script, tmp_path, ranks=2, options=("--sync-bn",)):
    """A run of ``script`` that ends by an error."""
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "parwrap.run", "--nproc-per-node", str(ranks), *options, str(path)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)


def test_ranks_in_different_layers_end_with_an_error_that_names_them(tmp_path):
    run = ended(
        """
import torch, parwrap
blocks = torch.nn.ModuleList([torch.nn.BatchNorm1d(2) for _ in range(3)])
for step in range(3):
    x = torch.randn(4, 2)
    for number, block in enumerate(blocks):
        if step < 2 or number != parwrap.rank() + 1:
            x = block(x)
""",
        tmp_path,
    )

    assert run.returncode
    assert "RankMismatchError: the ranks are in different places at the same time" in run.stderr
    assert "Have all ranks run the same layers in the same order, or leave @parwrap.sync_bn out." in run.stderr
    assert "is in the forward of batch norm '1' (2 channels)" in run.stderr
    assert "is in the forward of batch norm '2' (2 channels)" in run.stderr


def test_a_rank_that_fails_ends_those_who_wait_for_it_in_a_layer(tmp_path):
    run = ended(
        """
import torch, parwrap
norm = torch.nn.BatchNorm1d(2)
for step in range(3):
    if step == 2 and parwrap.rank() == 1:
        raise ZeroDivisionError("on purpose")
    norm(torch.randn(4, 2))
""",
        tmp_path,
    )

    assert run.returncode
    assert "ZeroDivisionError: on purpose" in run.stderr


def test_a_rank_that_is_stuck_is_named_after_a_while(tmp_path):
    run = ended(
        """
import time, torch, parwrap
norm = torch.nn.BatchNorm1d(2)
for step in range(3):
    if step == 2 and parwrap.rank() == 1:
        time.sleep(8)
    norm(torch.randn(4, 2))
""",
        tmp_path,
        options=("--sync-bn", "--hang-after", "2"),
    )

    assert "parwrap: a rank has waited for more than 2 s." in run.stderr
    assert "Rank 0 is in the forward of batch norm '' (2 channels)" in run.stderr


def test_one_that_waits_too_long_ends_with_an_error(tmp_path):
    run = ended(
        """
import time, torch, parwrap
norm = torch.nn.BatchNorm1d(2)
for step in range(3):
    if step == 2 and parwrap.rank() == 1:
        time.sleep(20)
    norm(torch.randn(4, 2))
""",
        tmp_path,
        options=("--sync-bn", "--timeout", "3"),
    )

    assert run.returncode
    assert "RankMismatchError: rank 0 waited 3 s for the other ranks at the same point (the statistics of a batch norm)" in run.stderr


@pytest.mark.ranks(2)
def test_ranks_on_different_nodes_share_by_a_process_group():
    group = current()
    group.world = replace(group.world, local_rank=0, local_size=1, node_rank=group.world.rank)
    with parwrap.sync_bn():
        assert [0.5, 0.5] == parwrap.gather(seen())
        net = train(model(), 3)
    assert 1 == len({str(each) for each in parwrap.gather(net[1].running_mean)})


@pytest.mark.ranks(2)
def test_a_process_group_of_the_users_own_is_used():
    """As in a script that wraps its model in DDP itself."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("parwrap.group._current", None)
        with parwrap.sync_bn():
            mean = seen()
        with parwrap.sync_bn(group_size=1):
            own = seen()

    assert [0.5, 0.5] == parwrap.gather(mean)
    assert [0.0, 1.0] == parwrap.gather(own)


@pytest.mark.ranks(2)
def test_beside_a_process_group_of_the_users_own_there_is_one_more_for_all_calls():
    groups = dist.distributed_c10d._world.pg_map
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("parwrap.group._current", None)
        before = len(groups)
        for _ in range(3):
            assert 0.5 == parwrap.sync_bn(seen)()

    assert before + 1 == len(groups)


@pytest.mark.ranks(2)
def test_a_regular_step_meets_nobody_beside_its_backwards():
    counted = []
    net = model()
    with pytest.MonkeyPatch.context() as patched, parwrap.distributed(), parwrap.sync_bn():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(8):
            if step == 3:
                for owner, name in [(dist, "all_reduce"), (dist, "all_gather"), (dist, "broadcast"), (type(current().meetings), "wait")]:
                    patched.setattr(owner, name, lambda *args, name=name, **options: counted.append(name))
            optimizer.zero_grad()
            net(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
        patched.undo()

    assert [] == counted


@pytest.mark.ranks(2)
def test_one_exchange_forward_and_one_backward_a_layer():
    counted = []
    together = sharing.Sharing.together
    with pytest.MonkeyPatch.context() as patched, parwrap.sync_bn():
        patched.setattr(sharing.Sharing, "together", lambda self, how, *rest: counted.append(how) or together(self, how, *rest))
        model()(torch.randn(4, 2)).sum().backward()

    assert [sharing.GATHER] * 2 + [sharing.SUM] * 2 == counted


@pytest.mark.ranks(2)
def test_what_torch_transforms_is_said_to_be_this_ranks_own():
    def mean(x):
        return F.batch_norm(x, None, None, training=True).mean()

    with parwrap.sync_bn(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.func.grad(mean)(torch.randn(4, 2))
        torch.jit.trace(nn.BatchNorm1d(2), torch.randn(4, 2), check_trace=False)

    assert 1 == len([each for each in said if "uses this rank's part of the batch only" in str(each.message)])


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_model_shares():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, momentum=1.0))
    with parwrap.sync_bn():
        compiled = torch.compile(net, backend="eager")
        for _ in range(2):
            compiled(torch.full((2, 1), float(parwrap.rank()))).sum().backward()

    assert 1 == len({str(each) for each in parwrap.gather(net[1].running_mean)})
