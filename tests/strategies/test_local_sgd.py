"""Local SGD and DiLoCo against DDP, and against ranks that are played one after the other in a single process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError

FEATURES = 6


def local(**options):
    return parwrap.distributed(strategy="local_sgd", **options)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def batch(step, rank):
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :1] * 2


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(steps, make=adam, each=lambda model: None):
    """A plain loop, in which every rank has batches of its own; ``each`` sees the model after every step."""
    model = build()
    optimizer = make(model.parameters())
    for step in range(steps):
        train_step(model, optimizer, *batch(step, parwrap.rank()))
        each(model)
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def mean(replicas, old):
    return sum(replicas) / len(replicas)


class DiLoCo:
    """Algorithm 1 of Douillard et al. (2023), with Nesterov's momentum as torch has it."""

    velocity = 0.0

    def __init__(self, lr=0.7, momentum=0.9):
        self.lr, self.momentum = lr, momentum

    def __call__(self, replicas, old):
        gradient = old - mean(replicas, old)
        self.velocity = self.momentum * self.velocity + gradient
        return old - self.lr * (gradient + self.momentum * self.velocity)


def in_one_process(size, every, steps=7, outer=mean, make=adam):
    """The weights that ``size`` ranks come to, which combine theirs by ``outer`` after every ``every`` steps and at the end."""
    replicas = [build() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in replicas]
    old = flat(replicas[0])
    for step in range(steps):
        for rank in range(size):
            train_step(replicas[rank], optimizers[rank], *batch(step, rank))
        if (step + 1) % every == 0 or step + 1 == steps:
            old = outer([flat(model) for model in replicas], old)
            for model in replicas:
                nn.utils.vector_to_parameters(old.clone(), model.parameters())
    return old


def same_on_all_ranks(tensor):
    return all(torch.equal(tensor, each) for each in parwrap.gather(tensor))


# averages

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_ranks_played_in_one_process(every, size):
    actual = flat(local(every=every)(train)(7))

    torch.testing.assert_close(actual, in_one_process(size, every), atol=1e-6, rtol=0)
    assert same_on_all_ranks(actual)


@pytest.mark.parametrize("size", SIZES)
def test_with_an_outer_optimizer_they_are_those_of_dilocos_formula(size):
    actual = flat(local(every=3, outer="nesterov")(train)(7))
    plainly = flat(local(every=3, outer="nesterov", outer_lr=1.0, outer_momentum=0.0)(train)(7))

    torch.testing.assert_close(actual, in_one_process(size, 3, outer=DiLoCo()), atol=1e-6, rtol=0)
    torch.testing.assert_close(plainly, in_one_process(size, 3), atol=1e-6, rtol=0)
    assert same_on_all_ranks(actual)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_average_after_every_step_of_sgd_is_ddp(momentum):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    expected = flat(parwrap.distributed(train)(6, make))

    torch.testing.assert_close(flat(local(every=1)(train)(6, make)), expected, atol=1e-5, rtol=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", [{"uneven": "join"}, {"batch": "global"}, {"batch": "global", "loss": "sum"}], ids=str)
def test_ranks_count_by_their_samples(options):
    """16 samples in batches of 5: the last batches leave ranks with fewer than others, or none."""
    data = TensorDataset(*(torch.cat(each) for each in zip(*(batch(step, 0) for step in range(4)), strict=True)))
    loss_of = nn.MSELoss(reduction=options.get("loss", "mean"))

    def over_a_loader():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=5):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
        return flat(model)

    expected = parwrap.distributed(**options)(over_a_loader)()

    torch.testing.assert_close(local(every=1, **options)(over_a_loader)(), expected, atol=1e-5, rtol=0)


@pytest.mark.ranks(2)
def test_class_weights_of_a_global_batch_count_as_in_ddp():
    def over_a_loader():
        torch.manual_seed(0)
        model, weight = nn.Linear(FEATURES, 3), torch.tensor([1.0, 5.0, 0.2])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(batch(0, 0)[0].repeat(3, 1), torch.arange(12) % 3), batch_size=4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, weight=weight).backward()
            optimizer.step()
        return flat(model)

    expected = parwrap.distributed(batch="global")(over_a_loader)()

    torch.testing.assert_close(local(every=1, batch="global")(over_a_loader)(), expected, atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_the_warm_up_is_ddp_bit_for_bit_and_then_ranks_go_on_by_themselves():
    synchronous, seen = [], []
    parwrap.distributed(train)(4, each=lambda model: synchronous.append(flat(model)))
    final = local(every=4, warmup=4, bucket_cap_mb=1)(train)(7, each=lambda model: seen.append(flat(model)))

    assert all(map(torch.equal, synchronous, seen[:4]))
    assert not same_on_all_ranks(seen[4])
    assert same_on_all_ranks(flat(final))


@pytest.mark.ranks(2)
def test_steps_between_averages_send_nothing(monkeypatch):
    sent, original = [0], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent[-1] += tensor.numel()
        return original(tensor, *args, **kwargs)

    with local(every=3):
        monkeypatch.setattr(dist, "all_reduce", counted)
        model = train(12, each=lambda model: sent.append(0))
    weights = flat(model).numel()

    assert {0} == {count for step, count in enumerate(sent[:12]) if step and step % 3 != 2}
    assert weights <= sent[11] <= weights + 20


@pytest.mark.ranks(2)
def test_half_precision_weights_are_averaged_in_single_precision():
    weight = nn.Parameter(torch.tensor([60000.0, 1.0], dtype=torch.float16))
    with local(every=1):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight[1] * parwrap.rank()).backward()
        optimizer.step()

    assert [60000.0, 0.5] == weight.tolist()


@pytest.mark.ranks(2)
def test_a_function_inside_averages_as_often_as_it_says():
    def history():
        weight, seen = nn.Parameter(torch.zeros(1)), []
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(4):
            optimizer.zero_grad()
            (weight * parwrap.rank()).sum().backward()
            optimizer.step()
            seen.append(-weight.item())
        return seen

    with local(every=4):
        assert [0.5, 1.0, 1.5, 2.0] == local(every=1)(history)()
        assert ([0, 0, 0, 2] if parwrap.rank() == 0 else [1, 2, 3, 2]) == history()


# what a step is


@pytest.mark.ranks(2)
def test_optimizers_are_counted_by_themselves_and_average_their_own_parameters():
    """The second steps in every other batch."""
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    history = []
    with local(every=2):
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (one, two)]
        for step in range(6):
            for p, optimizer in list(zip((one, two), optimizers, strict=True))[: 1 + step % 2]:
                p.grad = None
                (p * (parwrap.rank() + 1)).sum().backward()
                optimizer.step()
            history.append((-one.item(), -two.item()))

    expected = {0: [(1, 0), (3, 1), (4, 1), (6, 3), (7, 3), (9, 4)], 1: [(2, 0), (3, 2), (5, 2), (6, 3), (8, 3), (9, 5)]}
    assert expected[parwrap.rank()] == history
    assert (-9.0, -4.5) == (one.item(), two.item())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_an_optimizer_built_anew_first_averages_what_another_has_trained(outer):
    parts = [2, 3]

    def in_parts():
        model, step = build(), 0
        for steps in parts:
            optimizer = sgd(model.parameters())
            for _ in range(steps):
                train_step(model, optimizer, *batch(step, parwrap.rank()))
                step += 1
        return model

    replicas, combine, step = [build(), build()], DiLoCo(momentum=0.0) if outer else mean, 0
    old = flat(replicas[0])
    for steps in parts:
        for taken in range(steps):
            gradients = []
            for rank, model in enumerate(replicas):
                x, y = batch(step, rank)
                loss = nn.functional.mse_loss(model(x), y)
                gradients.append(nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))))
            if step and taken == 0:
                old = combine([flat(model) for model in replicas], old)
            for model, gradient in zip(replicas, gradients, strict=True):
                begun = old if taken == 0 else flat(model)
                nn.utils.vector_to_parameters(begun - 0.1 * gradient, model.parameters())
            step += 1
    expected = combine([flat(model) for model in replicas], old)

    options = {"outer": outer, "outer_momentum": 0.0} if outer else {}

    torch.testing.assert_close(flat(local(every=8, **options)(in_parts)()), expected, atol=1e-6, rtol=0)


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer of the same parameters."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.0})

    def step(self, closure=None):
        self.inner.step(closure)


class Renamed(torch.optim.SGD):
    """Torch calls its hooks twice in a step: for this class, and for the one that it derives from."""

    def step(self, closure=None):
        return super().step(closure)


def around_another(parameters):
    return Lookahead(sgd(parameters))


def renamed(parameters):
    return Renamed(parameters, lr=0.1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [around_another, renamed])
def test_a_step_inside_another_is_a_part_of_it(make):
    sgd([torch.ones(1)])  # hooks its class
    actual = flat(local(every=3)(train)(7, make))

    torch.testing.assert_close(actual, in_one_process(2, 3, make=sgd), atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("own_scaler", [False, True], ids=["amp", "GradScaler"])
def test_a_step_that_a_loss_scale_leaves_out_on_one_rank_counts(own_scaler):
    weight = nn.Parameter(torch.zeros(1))
    history = []
    with local(every=2), nullcontext() if own_scaler else parwrap.amp(dtype="fp16", init_scale=2.0):
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0, enabled=own_scaler)
        for step in range(4):
            optimizer.zero_grad()
            loss = (weight * (float("inf") if (step, parwrap.rank()) == (1, 1) else parwrap.rank() + 1)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(-weight.item())

    assert [[1.0, 2.0, 3.0, 5.0], [2.0, 2.0, 4.0, 5.0]] == [[-0.0 + each for each in rank] for rank in parwrap.gather(history)]


@pytest.mark.ranks(2)
def test_a_rank_whose_scaler_leaves_out_all_steps_gets_the_average_too():
    weight = nn.Parameter(torch.zeros(1))
    with local(every=2):
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((weight * (float("inf") if parwrap.rank() else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert [-1.0, -1.0] == parwrap.gather(weight.item())


@pytest.mark.ranks(2)
def test_what_is_frozen_or_made_for_a_batch_keeps_its_values():
    model, data = build(), TensorDataset(torch.randn(16, FEATURES))
    frozen, noises = model[0].weight.clone(), []
    with local(every=2):
        model[0].weight.requires_grad_(False)
        optimizer = sgd(model.parameters())
        for (x,) in DataLoader(data, batch_size=2):
            noise = nn.Parameter(torch.zeros(1))
            attack = torch.optim.SGD([noise], lr=1.0)
            (model(x).sum() * 0 + noise * (parwrap.rank() + 1)).sum().backward()
            attack.step()
            optimizer.step()
            noises.append(noise.item())

    assert torch.equal(frozen, model[0].weight)
    assert [-(parwrap.rank() + 1.0)] * 4 == noises


# when ranks hold the same weights


@pytest.mark.ranks(2)
def test_evaluation_sees_the_average_and_rank_zeros_buffers():
    data = TensorDataset(*batch(0, 0))

    def seen(look):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = sgd(model.parameters())
        for step in range(2):
            train_step(model, optimizer, *batch(step, parwrap.rank()))
        before = torch.cat([flat(model), model[1].running_mean])
        look(model)
        return before, torch.cat([flat(model), model[1].running_mean])

    def evaluates(model):
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(data, batch_size=2):
                model(x)

    def goes_to_eval(model):
        model.eval()

    def reads(model):
        with torch.no_grad():
            for x, _ in DataLoader(data, batch_size=2):
                model[0](x)

    for look, buffers in ((evaluates, True), (goes_to_eval, True), (reads, False)):
        before, after = local(every=8)(seen)(look)
        (first, other), both = parwrap.gather(before), parwrap.gather(after)

        assert not torch.equal(first, other)
        torch.testing.assert_close(both[0][:-4], (first[:-4] + other[:-4]) / 2)
        assert torch.equal(both[0][:-4], both[1][:-4])
        assert buffers == torch.equal(both[0], both[1])


@pytest.mark.ranks(2)
def test_a_copy_that_follows_the_weights_is_each_ranks_own():
    """A moving average of weights, updated after each step."""
    with local(every=2):
        model = build()
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = sgd(model.parameters())
        for step in range(5):
            train_step(model, optimizer, *batch(step, parwrap.rank()))
            average.update_parameters(model)

    assert not same_on_all_ranks(flat(average))


@pytest.mark.ranks(2)
def test_weights_that_differ_at_the_first_step_are_rank_zeros_with_a_warning():
    def different():
        weight = nn.Parameter(torch.full((1,), float(parwrap.rank() + 3)))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        weight.sum().backward()
        optimizer.step()
        return weight.item()

    with pytest.warns(UserWarning, match="the weights of the ranks differ at their first step, so rank 0's are used on all"):
        assert 3.0 == local(every=2)(different)()


# checks


@pytest.mark.ranks(2)
def test_the_loss_and_gradients_are_this_ranks():
    def run():
        model = build()
        optimizer = sgd(model.parameters())
        loss = train_step(model, optimizer, *batch(0, parwrap.rank()))
        return loss, model[0].weight.grad.clone()

    loss, grad = local(every=8)(run)()
    model = build()
    expected = nn.functional.mse_loss(model(batch(0, parwrap.rank())[0]), batch(0, parwrap.rank())[1])
    expected.backward()

    assert expected.item() == loss
    assert torch.equal(model[0].weight.grad, grad)


@pytest.mark.ranks(2)
def test_learning_rates_that_differ_are_an_error_after_an_average():
    def run():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0 + parwrap.rank())
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()

    with pytest.raises(RankMismatchError, match="the options of the optimizers differ between rank 0 and rank 1 after step 2"):
        local(every=2)(run)()


@pytest.mark.ranks(2)
def test_data_that_differ_are_an_error_at_the_first_average():
    def run():
        model = build()
        optimizer = sgd(model.parameters())
        data = torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(parwrap.rank()))
        for (x,) in DataLoader(TensorDataset(data), batch_size=4):
            model(x).sum().backward()
            optimizer.step()

    with pytest.raises(RankMismatchError, match=r"the ranks have read different numbers .*in the pass at .*test_local_sgd.py:\d+"):
        local(every=2)(run)()


@pytest.mark.ranks(2)
def test_other_parameters_on_another_rank_are_an_error():
    def run():
        weight = nn.Parameter(torch.zeros(1 + parwrap.rank()))
        optimizer = sgd([weight])
        weight.sum().backward()
        optimizer.step()

    text = r"the ranks step different parameters: parameter 0 .*: rank 0 has one of shape \(1,\) and torch.float32, and rank 1 .* \(2,\)"
    with pytest.raises(RankMismatchError, match=text):
        local(every=2)(run)()


@pytest.mark.ranks(2)
def test_what_is_trained_without_an_optimizer_is_said():
    with pytest.warns(UserWarning, match="no optimizer of torch.optim has stepped, but strategy='local_sgd' averages only"), local(every=2):
        nn.Parameter(torch.ones(3)).sum().backward()


@pytest.mark.ranks(2)
def test_a_step_inside_of_a_backward_is_refused():
    weight = nn.Parameter(torch.ones(1))

    def run():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        hook = weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(UsageError, match=r"test_local_sgd.py:\d+ steps inside a backward"):
            weight.sum().backward()
        hook.remove()

    local(every=2)(run)()


def test_one_rank_is_a_plain_loop():
    assert torch.equal(flat(train(5)), flat(local(every=2, outer="nesterov")(train)(5)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0 is not a positive integer"),
        ({"every": 2.5}, "every=2.5 is not a positive integer"),
        ({"warmup": -1}, "warmup=-1 is not a number of steps: pass an integer, 0 or more"),
        (
            {"outer": "adam"},
            "outer='adam' is not a valid value. Choose one of: None: weights are averaged, without an outer optimizer; 'nesterov': SGD",
        ),
        ({"outer": "nesterov", "outer_lr": 0}, "outer_lr=0 is not a positive learning rate"),
        ({"outer": "nesterov", "outer_momentum": 1}, r"outer_momentum=1 is not in the range \[0, 1\)"),
        ({"outer_lr": 0.5}, "outer_lr=0.5 is an option of the outer optimizer: add outer='nesterov', or remove it"),
        (
            {"strategy": "ddp", "every": 4},
            "every=4 has no effect with strategy='ddp': remove it, or choose a strategy that has this option: 'local_sgd'",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "local_sgd", **options})
