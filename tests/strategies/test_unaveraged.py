"""Gradients that no backward made are averaged when they are used, so that ranks take the steps of one process."""

import copy
import time
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.coordination.sync_points import Coordinator
from parwrap.errors import RankMismatchError
from parwrap.loop.loop_state import Loop
from parwrap.strategies.ddp.unaveraged import GRADIENTS

SAID = r"were not computed by backward\(\) .* and differ between ranks\. parwrap uses their mean over the ranks"


def loss_of(model):
    def loss(params, x, y):
        return (functional_call(model, params, (x,)) - y).pow(2).mean()

    return loss


def by_func_grad(model, optimizer, x, y):
    grads = grad(loss_of(model))(dict(model.named_parameters()), x, y)
    for name, p in model.named_parameters():
        p.grad = grads[name]
    optimizer.step()


def by_grad_and_value(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=False)
    grads, _ = grad_and_value(loss_of(model))({k: v.detach() for k, v in model.named_parameters()}, x, y)
    for name, p in model.named_parameters():
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(grads[name])
    optimizer.step()


def by_clipping_each_sample(model, optimizer, x, y):
    """DP-SGD without its noise."""
    params = {k: v.detach() for k, v in model.named_parameters()}
    per_sample = vmap(grad(loss_of(model)), in_dims=(None, 0, 0))(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
    factor = (0.5 / (norms + 1e-6)).clamp(max=1)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("i,i...->...", factor, per_sample[name]) / len(x)
    optimizer.step()


def by_autograd_grad(model, optimizer, x, y):
    loss = (model(x) - y).pow(2).mean()
    for p, each in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = each
    optimizer.step()


def by_autograd_grad_and_clipping(model, optimizer, x, y):
    loss = (model(x) - y).pow(2).mean()
    for p, each in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = each
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def in_place_after_a_backward(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward(retain_graph=True)
    for p, each in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad.copy_(2 * each)
    optimizer.step()


def after_a_backward_for_the_log(model, optimizer, x, y):
    (model(x) - y).pow(2).mean().backward()
    optimizer.zero_grad()
    by_autograd_grad(model, optimizer, x, y)


def head_by_hand(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward(retain_graph=True)
    model[-1].weight.grad = torch.autograd.grad(loss, model[-1].weight)[0] * 3
    optimizer.step()


def in_a_closure(model, optimizer, x, y):
    def closure():
        loss = (model(x) - y).pow(2).mean()
        for p, each in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = each
        return loss

    optimizer.step(closure)


def halved(model, optimizer, x, y):
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    for p in model.parameters():
        p.grad = p.grad / 2
    optimizer.step()


PROGRAMS = [
    by_func_grad,
    by_grad_and_value,
    by_clipping_each_sample,
    by_autograd_grad,
    by_autograd_grad_and_clipping,
    in_place_after_a_backward,
    after_a_backward_for_the_log,
    head_by_hand,
    in_a_closure,
]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def trained(step, make=adam, samples=48, epochs=2):
    """Weights after some epochs of ``step``."""
    torch.manual_seed(0)
    x = torch.randn(samples, 4)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(samples, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model)
    for _ in range(epochs):
        for batch in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True):
            step(model, optimizer, *batch)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_as_one_process(step, make=adam, samples=48, **options):
    expected = trained(step, make, samples)
    with parwrap.distributed(batch="global", seed=0, **options):
        torch.manual_seed(0)
        actual = trained(step, make, samples)
    torch.testing.assert_close(expected, actual, rtol=2e-4, atol=2e-5)
    everybodys = gathered(actual)
    assert all(torch.equal(everybodys[0], each) for each in everybodys)


def gathered(x):
    with parwrap.distributed():
        return parwrap.gather(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", PROGRAMS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_steps_are_those_of_one_process(step, strategy):
    with pytest.warns(UserWarning, match=SAID):
        assert_as_one_process(step, strategy=strategy)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("step", PROGRAMS)
def test_batches_that_do_not_go_round_are_weighed(step):
    with pytest.warns(UserWarning, match=SAID):
        assert_as_one_process(step, samples=50)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_averaged_gradients_that_are_replaced_stay_as_they_are(strategy, nothing_is_warned_of):
    assert_as_one_process(halved, samples=50, strategy=strategy)


def test_a_rank_that_goes_on_without_such_a_step_is_an_error_that_names_both_places(parwrap_run, script):
    path = script("""
import torch
import parwrap

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(3, 2)).sum().backward()
    if step == 2 and parwrap.rank() == 0:
        model.weight.grad = torch.ones(1, 2)
        optimizer.step()
""")
    begun = time.monotonic()
    status, _, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert 1 == status
    assert "rank 0 is at use of gradients that backward() did not compute" in stderr
    assert "rank 1 is at backward" in stderr
    assert time.monotonic() - begun < 60


@pytest.mark.ranks(2)
def test_other_parameters_at_the_same_time_are_an_error():
    def train():
        models = [nn.Linear(2, 1), nn.Linear(3, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for p in models[parwrap.rank()].parameters():
            p.grad = torch.ones_like(p)
        optimizers[parwrap.rank()].step()

    with (
        pytest.raises(RankMismatchError, match="other ranks use such gradients of other parameters at the same time"),
        parwrap.distributed(seed=0),
    ):
        train()


@pytest.mark.ranks(2)
def test_a_rank_with_fewer_such_steps_takes_over_the_weights_of_the_other():
    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3 + 2 * parwrap.rank()):
            for p in model.parameters():
                p.grad = torch.full_like(p, parwrap.rank() + step)
            optimizer.step()
        return model

    with parwrap.distributed(seed=0):
        model = train()
    weights = gathered([p.tolist() for p in model.parameters()])
    torch.manual_seed(0)
    start = nn.Linear(2, 1)

    assert weights[0] == weights[1]
    expected = start.weight - 0.1 * (0.5 + 1.5 + 2.5 + 4 + 5)
    torch.testing.assert_close(expected.detach(), torch.tensor(weights[0][0]))


@pytest.mark.ranks(3)
def test_a_rank_with_fewer_such_steps_counts_those_of_the_others(monkeypatch):
    """Random streams are renewed by that number."""
    loops, ran = set(), Loop.ran_backward
    monkeypatch.setattr(Loop, "ran_backward", lambda self: (loops.add(self), ran(self))[1])

    with parwrap.distributed(seed=0):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3 if parwrap.rank() == 0 else 4):
            for p in model.parameters():
                p.grad = torch.full_like(p, parwrap.rank() + step)
            optimizer.step()

    assert [4] == [loop.backwards for loop in loops]


@pytest.mark.ranks(2)
def test_what_only_rank_zero_does_is_left_alone(nothing_is_warned_of):
    """A norm for the log, and a step in a guarded function on a model of its own."""

    @parwrap.rank_zero_only
    def look(model):
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        alone = copy.deepcopy(model)
        for p in alone.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(alone.parameters(), lr=0.1).step()

    with parwrap.distributed(seed=0):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            look(model)
            optimizer.step()


@pytest.mark.ranks(2)
def test_clipping_every_step_is_looked_at_ever_more_rarely(monkeypatch):
    met, wait = [], Coordinator.wait
    monkeypatch.setattr(Coordinator, "wait", lambda self, kind, *args, **kwargs: (met.append(kind), wait(self, kind, *args, **kwargs))[1])
    with parwrap.distributed(seed=0):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    assert 5 == met.count(GRADIENTS)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [1.0, 3e4, float("inf"), float("nan")])
def test_clipped_gradients_are_the_same_in_half_precision_and_if_not_finite(dtype, value, nothing_is_warned_of):
    with parwrap.distributed(seed=0):
        model = nn.Linear(50, 1, bias=False, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(5):
            optimizer.zero_grad()
            (model.weight * torch.linspace(0.1, 1, 50, dtype=dtype)).sum().mul(value).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 3e4)
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("others", [1.0, float("inf"), float("nan"), 6e4])
def test_gradients_in_half_precision_that_differ_are_averaged(dtype, others):
    mine = torch.tensor(others if parwrap.rank() else 5e4, dtype=dtype)

    @parwrap.distributed(seed=0)
    def train():
        model = nn.Linear(2, 1, bias=False, dtype=dtype)
        model.weight.grad = mine.expand(1, 2).clone()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        return model.weight.grad

    with pytest.warns(UserWarning, match=SAID):
        actual = train()
    expected = torch.stack([torch.tensor(each, dtype=dtype) for each in (5e4, others)]).double().mean().to(dtype)
    torch.testing.assert_close(expected.expand(1, 2), actual, equal_nan=True, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_noise_on_gradients_is_averaged_too():
    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(9):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            if step > 2:  # which the fourth look would miss, if changes of all kinds were counted together
                for p in model.parameters():
                    p.grad.add_(torch.randn_like(p.grad) * (parwrap.rank() + 1))
            optimizer.step()
        return [p.tolist() for p in model.parameters()]

    with pytest.warns(UserWarning, match=SAID), parwrap.distributed(seed=0):
        everybodys = parwrap.gather(train())
    assert everybodys[0] == everybodys[1]


@pytest.mark.ranks(2)
def test_an_end_without_a_backward_compares_weights_too():
    @parwrap.distributed(seed=0)
    def train():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model.weight += parwrap.rank()
        return model, optimizer

    with pytest.warns(UserWarning, match="different values on different ranks at the end, and no gradient was averaged"):
        model, _ = train()
    weights = gathered(model.weight.tolist())
    assert weights[0] == weights[1]


@pytest.mark.ranks(2)
def test_the_warm_up_of_local_sgd_clips_the_mean():
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    with pytest.warns(UserWarning, match=SAID):
        assert_as_one_process(by_autograd_grad_and_clipping, sgd, strategy="local_sgd", every=1, warmup=1000)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", [by_func_grad, by_clipping_each_sample, by_autograd_grad])
def test_local_sgd_averages_the_weights_in_the_end(step):
    models = []

    def sgd(model):
        models.append(model)
        return torch.optim.SGD(model.parameters(), lr=0.02)

    with parwrap.distributed(seed=0, strategy="local_sgd", every=3):
        trained(step, sgd)
    weights = gathered([p.tolist() for p in models[0].parameters()])
    assert weights[0] == weights[1]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("step", [by_func_grad, by_clipping_each_sample, by_autograd_grad])
def test_parameter_servers_average_what_workers_push(step):
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.02)

    expected = trained(step, sgd)
    with parwrap.distributed(batch="global", seed=0, strategy="parameter_server", servers=1, staleness=0):
        torch.manual_seed(0)
        actual = trained(step, sgd)
    torch.testing.assert_close(expected, actual, rtol=2e-4, atol=2e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("skips_clipping", [False, True])
def test_a_rank_that_has_skipped_a_backward_steps_with_the_others(skips_clipping):
    """It has the gradients of the others once it has caught up, and looks at clipped gradients as often as they."""

    def train():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(14):
            optimizer.zero_grad()
            skips = parwrap.rank() == 1 and step in (4, 9)
            if not skips:
                (model(torch.ones(3, 2)).sum() * (parwrap.rank() + 1 + step)).backward()
            if not skips_clipping:
                parwrap.reduce_sum(1.0)
            if not (skips and skips_clipping):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            if skips_clipping and step in (4, 9):
                parwrap.reduce_sum(1.0)
        return [p.tolist() for p in model.parameters()]

    with warnings.catch_warnings(), parwrap.distributed(seed=0):
        warnings.filterwarnings("error", message=".*no backward")
        everybodys = parwrap.gather(train())
    assert everybodys[0] == everybodys[1]
