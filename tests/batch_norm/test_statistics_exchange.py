"""Which batch norms are shared, among whom, and at what cost."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import parwrap
from normed import model, states, train
from parwrap.batch_norm import statistics_exchange
from parwrap.group.group import current


def seen(norm=None):
    """The mean that a layer sees of an input that is this rank's number."""
    norm = norm or nn.BatchNorm1d(1, momentum=1.0)
    norm(torch.full((2, 1), float(parwrap.rank())))
    return norm.running_mean.item()


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


def test_one_process_has_torchs_own():
    x = torch.randn(4, 1)
    with parwrap.sync_bn():
        out = nn.BatchNorm1d(1)(x)

    assert torch.equal(nn.BatchNorm1d(1)(x), out)
    assert "BatchNorm" in type(out.grad_fn).__name__


@pytest.mark.ranks(2)
def test_layers_that_are_new_in_each_step_are_soon_not_searched_for_any_more(monkeypatch):
    searches = []
    monkeypatch.setattr(statistics_exchange, "_named_layers", lambda found=statistics_exchange._named_layers: searches.append(1) or found())
    with parwrap.distributed(), parwrap.sync_bn():
        assert [0.5] * 100 == [seen() for _ in range(100)]
        norm = nn.BatchNorm1d(1, momentum=1.0)
        assert [0.5] * 100 == [seen(norm) for _ in range(100)]

    assert 8 + len([16, 32, 64]) == len(searches)


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
        patched.setattr("parwrap.group.group._current", None)
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
        patched.setattr("parwrap.group.group._current", None)
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
                for owner, name in [(dist, "all_reduce"), (dist, "all_gather"), (dist, "broadcast"), (type(current().coordinator), "wait")]:
                    patched.setattr(owner, name, lambda *args, name=name, **options: counted.append(name))
            optimizer.zero_grad()
            net(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
        patched.undo()

    assert [] == counted


@pytest.mark.ranks(2)
def test_one_exchange_forward_and_one_backward_a_layer():
    counted = []
    together = statistics_exchange.StatisticsExchange.together
    with pytest.MonkeyPatch.context() as patched, parwrap.sync_bn():
        patched.setattr(
            statistics_exchange.StatisticsExchange, "together", lambda self, how, *rest: counted.append(how) or together(self, how, *rest)
        )
        model()(torch.randn(4, 2)).sum().backward()

    assert [statistics_exchange.GATHER] * 2 + [statistics_exchange.SUM] * 2 == counted


@pytest.mark.ranks(2)
def test_what_torch_transforms_is_said_to_be_this_ranks_own():
    def mean(x):
        return F.batch_norm(x, None, None, training=True).mean()

    with parwrap.sync_bn(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.func.grad(mean)(torch.randn(4, 2))
        torch.jit.trace(nn.BatchNorm1d(2), torch.randn(4, 2), check_trace=False)

    assert 1 == len([each for each in said if "uses only this rank's part of the batch" in str(each.message)])


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_model_shares():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, momentum=1.0))
    with parwrap.sync_bn():
        compiled = torch.compile(net, backend="eager")
        for _ in range(2):
            compiled(torch.full((2, 1), float(parwrap.rank()))).sum().backward()

    assert 1 == len({str(each) for each in parwrap.gather(net[1].running_mean)})
