"""The DDP strategy against torch's own DDP by hand, and against a single process where theory gives the numbers."""

import gc
import random
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.errors import RankMismatchError
from parwrap.group.group import current
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import seed_all
from parwrap.options import Options
from parwrap.strategies.ddp.call_sites import SETTLING, CallSites
from parwrap.strategies.ddp.ddp import DDP


def dataset(samples=101):
    features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(features, features[:, :1] * 2)


def build(normalised=True):
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(16)] if normalised else []
    return nn.Sequential(nn.Linear(6, 16), *norm, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def train(model, forward, loader, epochs=3, before_epoch=lambda epoch: None):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        before_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(forward(x), y).backward()
            optimizer.step()
    return model


def plain(**options):
    model = build(**options)
    return train(model, model, DataLoader(dataset(), batch_size=8, shuffle=True))


def by_hand(shuffle=True):
    model = build()
    sampler = DistributedSampler(dataset(), shuffle=shuffle, seed=0)
    loader = DataLoader(dataset(), batch_size=8, sampler=sampler)
    return train(model, DistributedDataParallel(model), loader, before_epoch=sampler.set_epoch)


def different(one, other):
    return [key for key, value in one.state_dict().items() if not torch.equal(value, other.state_dict()[key])]


def same_on_all_ranks(model):
    return all(
        torch.equal(mine, theirs)
        for each in parwrap.gather(model.state_dict())
        for mine, theirs in zip(model.state_dict().values(), each.values(), strict=True)
    )


def distance(one, other):
    return max((one[key] - other[key]).abs().max().item() for key in one)


@pytest.mark.ranks(2)
def test_parameters_and_buffers_are_bit_for_bit_those_of_ddp_by_hand():
    expected = by_hand()
    actual = parwrap.distributed(plain)()

    # DDP's rule for buffers is rank 0's; the other ranks get them when evaluation starts
    ours = [] if parwrap.rank() == 0 else ["1.running_mean", "1.running_var"]
    assert ours == different(expected, actual)


@pytest.mark.ranks(2)
def test_buffers_are_rank_zeros_when_evaluation_starts():
    expected = parwrap.broadcast(by_hand().state_dict())

    def train_and_evaluate():
        return plain().eval()

    actual = parwrap.distributed(train_and_evaluate)().state_dict()

    assert [] == [key for key, value in expected.items() if not torch.equal(value, actual[key])]


@pytest.mark.ranks(2)
def test_a_sequential_loader_is_shared_out_as_by_an_unshuffled_distributed_sampler():
    expected = by_hand(shuffle=False)

    def in_order():
        model = build()
        return train(model, model, DataLoader(dataset(), batch_size=8))

    assert all(map(torch.equal, expected.parameters(), parwrap.distributed(in_order)().parameters()))


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)])
def test_a_global_batch_gives_the_weights_of_a_single_process(size):
    expected = plain(normalised=False).state_dict()
    actual = parwrap.distributed(batch="global")(plain)(normalised=False).state_dict()

    assert distance(expected, actual) < 1e-5


@pytest.mark.ranks(3)
def test_a_global_batch_smaller_than_the_ranks_counts_right():
    """101 samples in batches of 4 leave one sample for three ranks, and an uneven share of every other batch."""

    def small_batches():
        model = build(normalised=False)
        return train(model, model, DataLoader(dataset(), batch_size=4, shuffle=True), epochs=2)

    assert distance(small_batches().state_dict(), parwrap.distributed(batch="global")(small_batches)().state_dict()) < 1e-5


@pytest.mark.ranks(3)
def test_layer_drop_that_differs_by_rank_keeps_weights_equal():
    coin = random.Random(parwrap.rank())

    def with_layer_drop():
        model = build(normalised=False)

        def forward(x):
            for layer in model:
                x = layer(x) if layer is not model[2] or coin.random() < 0.5 else x
            return x

        return train(model, forward, DataLoader(dataset(), batch_size=8, shuffle=True))

    assert same_on_all_ranks(parwrap.distributed(with_layer_drop)())


@pytest.mark.ranks(2)
def test_gradients_accumulate_over_backwards():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            weight.grad = None
            for micro in range(3):
                (weight * (parwrap.rank() + 1)).sum().backward()

                assert [1.5 * (micro + 1)] * 3 == weight.grad.tolist()
        assert optimizer


@pytest.mark.ranks(2)
def test_several_losses_and_their_gradients_in_one_backward():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        scale = parwrap.rank() + 1.0
        for _ in range(3):
            weight.grad = None
            torch.autograd.backward([(weight * scale).sum(), weight * scale], [None, torch.full((3,), 2.0)])

            assert [4.5] * 3 == weight.grad.tolist()


@pytest.mark.ranks(2)
def test_weights_built_differently_become_rank_zeros_with_a_warning():
    seed_all(parwrap.rank())
    model = nn.Linear(3, 1)
    with parwrap.distributed(), pytest.warns(UserWarning, match="2 of 2 parameters have different values"):
        train(model, model, DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=4), epochs=2)

    assert same_on_all_ranks(model)


@pytest.mark.ranks(2)
def test_different_parameters_on_different_ranks_are_refused_by_name():
    weights = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    with (
        parwrap.distributed(),
        pytest.raises(
            RankMismatchError,
            match=r"different parameters: rank 0 at .*test_ddp.py:\d+ reaches 0 parameters of optimizers and 1 that no optimizer has; "
            r"rank 1",
        ),
    ):
        weights[parwrap.rank()].sum().backward()


@pytest.mark.ranks(2)
def test_a_backward_that_fails_half_way_can_be_tried_again():
    weight = nn.Parameter(torch.ones(3))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("on purpose")

    with parwrap.distributed():
        for _ in range(3):
            (weight * (parwrap.rank() + 1)).sum().backward()
        with pytest.raises(MemoryError):
            Fails.apply(weight).sum().backward()
        weight.grad = None
        (weight * (parwrap.rank() + 1)).sum().backward()

    assert [1.5] * 3 == weight.grad.tolist()


@pytest.mark.ranks(2)
def test_gradients_with_a_graph_of_their_own_are_averaged():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        for _ in range(4):
            weight.grad = None
            (weight * (parwrap.rank() + 1.0)).pow(2).sum().backward(create_graph=True)

            assert [5.0] * 3 == weight.grad.tolist()


@pytest.mark.ranks(2)
def test_ddp_lets_go_of_the_parameters():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        strategy = DDP(current(), Loop(), Options)
        from parwrap.intercept.backward import Backward

        strategy.backward(Backward(((weight * 2).sum(),), (None,), {}, torch.autograd.backward.__wrapped__))
        (site,) = strategy._sites.values()
        averager = weakref.ref(site.averager)
        ddp = weakref.ref(site.averager._reducer)
        del site
        strategy.close()
        gc.collect()

        assert (None, None) == (averager(), ddp())
        assert optimizer


@pytest.mark.ranks(2)
def test_each_set_of_parameters_has_one_ddp_however_many_call_sites():
    weight, loop = nn.Parameter(torch.ones(3)), Loop()
    strategy = DDP(current(), loop, Options)
    optimizer = torch.optim.SGD([weight])
    loop.own_parameters(optimizer)
    from parwrap.intercept.backward import Backward

    for _ in range(3):
        strategy.backward(Backward((weight.sum(),), (None,), {}, torch.autograd.backward))
    strategy.backward(Backward(((weight * 2).sum(),), (None,), {}, torch.autograd.backward))

    assert 2 == len(strategy._sites)
    assert 1 == len({id(site.averager) for site in strategy._sites.values()})


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint that is not torch's: its graph does not show that it runs a backward inside the other."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, ctx.x = layer, x.detach()
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


@pytest.mark.ranks(2)
def test_a_backward_inside_of_another_is_agreed_on_once(monkeypatch):
    agreements, agree = [], CallSites.agree
    monkeypatch.setattr(CallSites, "agree", lambda self, *args: (agreements.append(1), agree(self, *args)))
    first, inner, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *inner.parameters(), *last.parameters()], lr=1e-4)
    with parwrap.distributed():
        for step in range(12):
            optimizer.zero_grad()
            last(OwnCheckpoint.apply(first(torch.full((2, 4), step + parwrap.rank() + 1.0)), inner)).mean().backward()
            gradients = parwrap.gather(inner.weight.grad)
            assert torch.equal(gradients[0], gradients[1])
            optimizer.step()

    assert SETTLING == len(agreements)


@pytest.mark.ranks(2)
def test_a_steady_backward_enters_only_the_files_of_the_regular_step():
    package, entered = Path(parwrap.__file__).parent, set()

    def enter(frame, event, argument):
        if event == "call" and package in (file := Path(frame.f_code.co_filename)).parents:
            entered.add(str(file.relative_to(package)))

    with parwrap.distributed():
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (x, _) in enumerate(DataLoader(dataset(200), batch_size=4)):
            optimizer.zero_grad()
            loss = model(x).sum()
            # not one of those, ever rarer, in which ranks compare weights or look closely at what the call site reaches
            sys.setprofile(enter if step == 14 else None)
            loss.backward()
            sys.setprofile(None)
            optimizer.step()

    assert {
        "intercept/backward.py",
        "strategies/ddp/ddp.py",
        "coordination/call_site.py",
        "loop/loop_state.py",
        "coordination/status_board.py",
        "strategies/ddp/gradient_averager.py",
    } == entered


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU here")
@pytest.mark.ranks(2)
def test_parameters_on_gpus_are_bit_for_bit_those_of_ddp_by_hand():
    def on_gpu(wrap):
        model = build().cuda()
        forward = wrap(model)
        return train(model, lambda x: forward(x.cuda()).cpu(), DataLoader(dataset(), batch_size=8, sampler=DistributedSampler(dataset())))

    assert not different(on_gpu(DistributedDataParallel), parwrap.distributed(on_gpu)(lambda model: model))


@pytest.mark.ranks(2)
def test_an_optimizer_that_only_rank_zero_builds_does_not_shift_the_others():
    @parwrap.rank_zero_only
    def probe():
        torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)

    with parwrap.distributed():
        kept = probe()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4 + parwrap.rank()):
            optimizer.zero_grad()
            (model(torch.ones(1, 1)) * (1 + parwrap.rank() + step)).sum().backward()
            optimizer.step()
    weights = parwrap.gather(model.weight.item())

    assert (None, weights[0]) == (kept, weights[1])
