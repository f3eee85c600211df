"""The DDP strategy against torch's own DDP by hand, and against a single process where theory gives the numbers."""

import gc
import os
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.errors import RankMismatchError
from parwrap.group import current
from parwrap.loop import Loop
from parwrap.options import Options
from parwrap.strategies.ddp import DDP
from parwrap.streams import seed_all


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


def gradients(backward, parameters):
    """What one training step leaves in ``.grad``; each rank has its own inputs."""
    for p in parameters:
        p.grad = None
    backward(torch.full((3,), float(parwrap.rank() + 1)))
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


@pytest.mark.ranks(2)
def test_a_parameter_that_no_rank_uses_keeps_none():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        torch.optim.SGD([used, unused], lr=0.1)
        for _ in range(4):
            assert [[1.5] * 3, None] == gradients(lambda x: (used * x).sum().backward(), [used, unused])


@pytest.mark.ranks(2)
def test_branches_that_differ_by_rank_average_with_zeros():
    """Rank 0 uses the first, rank 1 the second, nobody the third: as hand-written DDP with find_unused_parameters averages."""
    first, second, _ = parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(5):
            mine = first if parwrap.rank() == 0 else second

            assert [[0.5] * 3, [1.0] * 3, None] == gradients(lambda x, mine=mine: (mine * x).sum().backward(), parameters), step
        assert optimizer


@pytest.mark.ranks(2)
def test_branches_that_differ_by_step_keep_what_no_rank_used_in_that_step_none():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(9):
            chosen = step % 3
            expected = [[1.5] * 3 if index == chosen else None for index in range(3)]

            assert expected == gradients(lambda x, chosen=chosen: (parameters[chosen] * x).sum().backward(), parameters), step
        assert optimizer


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
def test_parameters_frozen_and_unfrozen_later():
    frozen, other = parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(12):
            frozen.requires_grad_(step // 3 % 2 == 0)
            expected = [[1.5] * 3 if frozen.requires_grad else None, [1.5] * 3]

            assert expected == gradients(lambda x: ((frozen + other) * x).sum().backward(), parameters), step
        assert optimizer


@pytest.mark.ranks(2)
def test_two_optimizers_behind_one_helper_each_get_their_own():
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def step(loss):
        loss.backward()

    with parwrap.distributed():
        optimizers = [torch.optim.SGD([one], lr=0.1), torch.optim.SGD([two], lr=0.1)]
        for _ in range(4):
            assert [[1.5] * 3, None] == gradients(lambda x: step((one * x).sum()), [one, two])
            assert [None, [1.5] * 3] == gradients(lambda x: step((two * x).sum()), [one, two])
        assert optimizers


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
def test_reentrant_checkpoints_are_averaged_though_the_graph_hides_their_parameters():
    from torch.utils.checkpoint import checkpoint

    inner, outer = parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(4):

            def backward(x):
                hidden = checkpoint(lambda h: h * inner, x.requires_grad_(), use_reentrant=True)
                (hidden * outer).sum().backward()

            assert [[1.5] * 3, [1.5] * 3] == gradients(backward, parameters), step
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
def test_backward_with_inputs_leaves_other_gradients_untouched():
    wanted, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        for _ in range(3):
            assert [[1.5] * 3, None] == gradients(lambda x: ((wanted + other) * x).sum().backward(inputs=[wanted]), [wanted, other])


@pytest.mark.ranks(2)
def test_bare_tensors_made_alike_are_parameters_and_inputs_are_not():
    weight = torch.ones(3, requires_grad=True)
    with parwrap.distributed():
        for _ in range(4):
            x = torch.full((3,), float(parwrap.rank() + 1), requires_grad=True)
            weight.grad = None
            (weight * x).sum().backward()

            assert [1.5] * 3 == weight.grad.tolist()
            assert weight.tolist() == x.grad.tolist()


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
            RankMismatchError, match=r"different parameters: rank 0 at .*test_ddp.py:\d+ reaches 0 of optimizers and 1 of none; rank 1"
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
def test_parameters_known_to_another_site_are_averaged_where_they_are_reached_later():
    """As an encoder that is trained on its own first, then held fixed by a detach, then trained again."""
    encoder, head = parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with parwrap.distributed():
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters]
        for _ in range(3):
            assert [[1.5] * 3, None] == gradients(lambda x: (encoder * x).sum().backward(), parameters)
        for step in range(8):
            through = encoder if step > 3 else encoder.detach()
            expected = [[1.5] * 3 if step > 3 else None, [1.5] * 3]

            assert expected == gradients(lambda x, through=through: (through * head * x).sum().backward(), parameters), step
        assert optimizers


@pytest.mark.ranks(2)
def test_a_new_model_at_the_same_place_needs_no_optimizer():
    with parwrap.distributed():
        for _ in range(3):
            weight = nn.Parameter(torch.ones(3))
            for _ in range(4):
                assert [[1.5] * 3] == gradients(lambda x, weight=weight: (weight * x).sum().backward(), [weight])


@pytest.mark.ranks(2)
def test_a_parameter_exchanged_in_its_optimizer():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0]["params"][0] = weight = nn.Parameter(torch.ones(5))
            weight.grad = None
            (weight * (parwrap.rank() + 1.0)).sum().backward()

            assert [1.5] * len(weight) == weight.grad.tolist(), step


@pytest.mark.ranks(2)
def test_optimizers_that_are_garbage_on_one_rank_only_confuse_nobody():
    with parwrap.distributed():
        kept = []
        for _ in range(4):
            weight = nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            if parwrap.rank() == 0:
                kept.append(optimizer)
            for _ in range(3):
                assert [[1.5] * 3] == gradients(lambda x, weight=weight: (weight * x).sum().backward(), [weight])


@pytest.mark.ranks(2)
def test_gradients_with_a_graph_of_their_own_are_averaged():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        for _ in range(4):
            weight.grad = None
            (weight * (parwrap.rank() + 1.0)).pow(2).sum().backward(create_graph=True)

            assert [5.0] * 3 == weight.grad.tolist()


@pytest.mark.ranks(2)
def test_what_nobody_uses_is_none_on_every_rank_though_one_has_looked_at_its_graph_before():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    used = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1) if parwrap.rank() == 0 else (0, 1, 2), (0, 1), (0,), (0, 1, 2)]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for chosen in used:
            left = gradients(lambda x, chosen=chosen: sum(parameters[index] for index in chosen).mul(x).sum().backward(), parameters)

            assert 1 == len({str(each) for each in parwrap.gather(left)})
        assert optimizer


@pytest.mark.ranks(2)
def test_ddp_lets_go_of_the_parameters():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        strategy = DDP(current(), Loop(), Options)
        from parwrap.verbs.backward import Backward

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
def test_weights_that_are_made_anew_for_each_step_are_averaged():
    weights = [torch.ones(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    with parwrap.distributed():
        for _ in range(5):
            sum((weight * (parwrap.rank() + 1.0)).sum() for weight in weights).backward()
            weights = [(weight - 0.1 * weight.grad).detach().requires_grad_() for weight in weights]

    assert [0.25] * 3 + [-0.75] * 2 == pytest.approx(torch.cat(weights).tolist())


@pytest.mark.ranks(2)
def test_inputs_that_are_made_anew_for_each_step_are_not():
    model = nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    with parwrap.distributed():
        for _ in range(4):
            x = torch.full((1, 2), parwrap.rank() + 1.0, requires_grad=True)
            (model(x) * (parwrap.rank() + 1)).sum().backward()

            assert [[parwrap.rank() + 1.0] * 2] == x.grad.tolist()


@pytest.mark.ranks(2)
def test_a_gradient_of_zeros_on_one_rank_is_one_on_all():
    used, rare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.AdamW([used, rare], lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            everything = step < 2 or (step == 5 and parwrap.rank() == 1)
            (used.sum() + (0 * rare.sum() if everything else 0)).backward()

            assert (step < 2 or step == 5) == (rare.grad is not None), step
            optimizer.step()

    assert 1 == len({str(each) for each in parwrap.gather(rare.detach())})


@pytest.mark.ranks(2)
def test_parameters_put_into_a_group_by_hand_are_averaged():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([one], lr=0.1)
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0]["params"].append(other)
            optimizer.zero_grad()
            ((one + (other if step >= 3 else 0)) * (parwrap.rank() + 1.0)).sum().backward()

            assert step < 3 or [1.5, 1.5] == other.grad.tolist(), step
            optimizer.step()


@pytest.mark.ranks(2)
def test_each_set_of_parameters_has_one_ddp_however_many_call_sites():
    weight, loop = nn.Parameter(torch.ones(3)), Loop()
    strategy = DDP(current(), loop, Options)
    optimizer = torch.optim.SGD([weight])
    loop.own_parameters(optimizer)
    from parwrap.verbs.backward import Backward

    for _ in range(3):
        strategy.backward(Backward((weight.sum(),), (None,), {}, torch.autograd.backward))
    strategy.backward(Backward(((weight * 2).sum(),), (None,), {}, torch.autograd.backward))

    assert 2 == len(strategy._sites)
    assert 1 == len({id(site.averager) for site in strategy._sites.values()})


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.ranks(2)
def test_parameters_on_gpus_are_bit_for_bit_those_of_ddp_by_hand():
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    torch.cuda.set_device(parwrap.rank())

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
