"""Updates that bypass ``backward`` are reported where ranks would drift apart, and only there."""

import copy
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError
from parwrap.group.group import Group

UPDATED = (
    r"the parameters that torch.autograd.grad at .*test_bypasses.py:\d+ asks gradients for were changed to different values on "
    r"different ranks: .*grads = parwrap.reduce_mean\(grads\), or call loss.backward\(\)"
)


def data(rank=None):
    """Inputs that differ by rank, as in a shared out loader."""
    return torch.full((4, 3), float(parwrap.rank() if rank is None else rank) + 1)


def in_place(p, grad):
    with torch.no_grad():
        p -= 0.1 * grad


def through_data(p, grad):
    p.data.sub_(0.1 * grad)


def by_new_data(p, grad):
    p.data = p.data - 0.1 * grad


def descend(update, accumulated):
    """Train on gradients of this rank, updating after every so many."""
    model = nn.Linear(3, 1)
    for step in range(4 * accumulated):
        grads = torch.autograd.grad(model(data()).pow(2).sum(), list(model.parameters()))
        if step % accumulated == accumulated - 1:
            for p, grad in zip(model.parameters(), grads, strict=True):
                update(p, grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("update", [in_place, through_data, by_new_data])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_updates_by_hand_with_gradients_of_one_rank_are_refused(update, accumulated):
    with parwrap.distributed(seed=0), pytest.raises(UsageError, match=UPDATED):
        descend(update, accumulated)


@pytest.mark.ranks(2)
def test_updates_by_hand_with_averaged_gradients_are_looked_at_once():
    weight = nn.Parameter(torch.ones(3))
    met, exchange = [], Group.exchange

    def counted(group, topic, value):
        met.append(topic)
        return exchange(group, topic, value)

    with mock.patch.object(Group, "exchange", counted), parwrap.distributed():
        for _ in range(20):
            (grad,) = parwrap.reduce_mean(torch.autograd.grad((data() @ weight).pow(2).mean(), weight))
            in_place(weight, grad / 100)

    assert [weight.tolist()] * 2 == parwrap.gather(weight.tolist())
    assert 1 == sum("torch.autograd.grad" in topic for topic in met)


@pytest.mark.ranks(2)
def test_parameters_that_differ_from_the_start_are_named_as_such():
    weight = nn.Parameter(data()[0])

    def ask_twice():
        for _ in range(2):
            torch.autograd.grad(weight.sum(), weight)

    with (
        parwrap.distributed(),
        pytest.raises(UsageError, match=r"different values on different ranks from the start\. Set the seed before"),
    ):
        ask_twice()


def by_hand(epochs, average=lambda grads: grads):
    """d2l's way with bare tensors, but for ``autograd.grad``; the samples seen in the last epoch."""
    torch.manual_seed(0)
    w, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    loader = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2, shuffle=True)
    for _ in range(epochs):
        seen = []
        for (x,) in loader:
            grads = average(torch.autograd.grad((x * w + b - 3 * x).pow(2).mean(), [w, b]))
            with torch.no_grad():
                for param, grad in zip([w, b], grads, strict=True):
                    param -= 1e-3 * grad
            seen += x.tolist()
    return seen, w, b


@pytest.mark.ranks(2)
def test_bare_tensors_trained_by_hand_are_seen_to_be_trained():
    """Without an optimizer and a backward, the first pass is taken for one that only looks at data; in the next one they drift apart."""
    with parwrap.distributed(), pytest.warns(UserWarning, match="before any optimizer was built, but the loop then trained on"):
        assert list(range(16)) == sorted(by_hand(1)[0])
    with parwrap.distributed(), pytest.warns(UserWarning, match="but the loop then trained on"), pytest.raises(UsageError, match=UPDATED):
        by_hand(2)


@pytest.mark.ranks(2)
def test_bare_tensors_trained_by_hand_and_averaged_share_out_the_data():
    with parwrap.distributed(), pytest.warns(UserWarning, match="but the loop then trained on"):
        seen, *trained = by_hand(3, average=parwrap.reduce_mean)

    assert list(range(16)) == sorted(sample for each in parwrap.gather(seen) for sample in each)
    assert 1 == len({str([p.tolist() for p in each]) for each in parwrap.gather(trained)})


class Trained:
    """A loop that trains as usual; ``extra(x, model)`` is what else it does with ``autograd.grad`` in each step."""

    def __init__(self, extra, steps=12):
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.randn(4 * 2 * steps, 3)), batch_size=4, shuffle=True)
        for (x,) in loader:
            optimizer.zero_grad()
            (self.model(x).pow(2).mean() + extra(x, self.model)).backward()
            optimizer.step()


def gradient_penalty(x, model):
    x = (x + torch.rand(1)).requires_grad_(True)
    return sum(grad.norm() for grad in torch.autograd.grad(model(x).sum(), x, create_graph=True))


def attack(x, model):
    """Projected gradient descent on the inputs."""
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(5):
        (grad,) = torch.autograd.grad(model(x + delta).pow(2).mean(), delta)
        delta.data = (delta + 0.1 * grad.sign()).clamp(-0.3, 0.3)
    for _ in range(5):
        (grad,) = torch.autograd.grad(model(x + delta).pow(2).mean(), delta)
        delta = (delta + 0.1 * grad.sign()).detach().requires_grad_()
    return model(x + delta.detach()).pow(2).mean()


def inner_loop(x, model):
    """MAML: the weights of the inner loop are no leaves."""
    names, weights = zip(*model.named_parameters(), strict=True)
    for _ in range(2):
        loss = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), x).pow(2).mean()
        weights = [w - 0.01 * grad for w, grad in zip(weights, torch.autograd.grad(loss, weights, create_graph=True), strict=True)]
    return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), x).pow(2).mean()


def gradient_norm(x, model):
    """Logged from time to time."""
    grads = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()))
    return 0 * sum(grad.norm().item() for grad in grads)


def copy_of_the_model(x, model):
    other = copy.deepcopy(model)
    torch.autograd.grad(other(x).sum(), list(other.parameters()))
    return 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("extra", [gradient_penalty, attack, inner_loop, gradient_norm, copy_of_the_model])
def test_what_does_not_update_parameters_by_hand_is_left_alone(extra):
    with parwrap.distributed(seed=0), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Trained(extra).model

    assert 1 == len({str([p.tolist() for p in each]) for each in parwrap.gather(list(model.parameters()))})


@pytest.mark.ranks(2)
def test_an_optimizer_that_steps_inside_of_the_backward_is_refused():
    with parwrap.distributed():
        model = nn.Linear(3, 1)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        with pytest.raises(
            UsageError,
            match=r"^SGD.step\(\) at .*test_bypasses.py:\d+ runs inside a backward pass, for example in a hook of "
            r"register_post_accumulate_grad_hook\. Gradients are averaged over the ranks only when the backward pass ends.*Call "
            r"step\(\) after loss.backward\(\)\.$",
        ):
            model(data()).sum().backward()


@pytest.mark.ranks(2)
def test_a_closure_that_runs_a_backward_inside_of_a_step_may():
    with parwrap.distributed():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = model(data()).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    assert 1 == len({str([p.tolist() for p in each]) for each in parwrap.gather(list(model.parameters()))})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("devices", [{}, {"device_ids": [0, 1]}, {"device_ids": [0, 1, 2, 3], "output_device": 3, "dim": 0}])
def test_data_parallel_is_a_wrapper_that_does_nothing(devices):
    x = torch.randn(5, 3)
    with parwrap.distributed(seed=0), mock.patch("torch.nn.parallel.data_parallel._get_available_device_type", return_value="cuda"):
        inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model = nn.DataParallel(inner, **devices)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        assert inner is model.module
        assert torch.equal(inner.eval()(x), model.eval()(x))
        assert [f"module.{key}" for key in inner.state_dict()] == list(model.state_dict())
        for _ in range(3):
            model.train()
            optimizer.zero_grad()
            model(data() + torch.randn(4, 3) * (1 + parwrap.rank())).sum().backward()
            optimizer.step()
            model.eval()

    assert 1 == len({str(list(each.items())) for each in parwrap.gather(model.state_dict())})


def test_data_parallel_takes_this_ranks_gpu():
    """Without a GPU: what torch's constructor would be asked for."""
    from parwrap.coordination.status_board import StatusBoard
    from parwrap.coordination.sync_points import Coordinator
    from parwrap.strategies.ddp.bypasses import Bypasses
    from parwrap.world.world import World

    asked = []
    status_board = StatusBoard(World(), bytearray(StatusBoard.size(World())))
    group = Group(
        World(1, 2, 1, 2), "nccl", torch.device("cuda", 1), store=None, timeout=None, coordinator=Coordinator(status_board, timedelta(1))
    )
    Bypasses(group, loop=None).data_parallel(None, nn.Linear(1, 1), asked.append)

    assert [[1]] == asked


@pytest.mark.ranks(2)
def test_a_gradient_inside_of_a_compiled_function_is_not_traced_into():
    @torch.compile(backend="eager")
    def twice(x):
        return torch.autograd.grad((x * 2).pow(2).sum(), x)[0] * 2

    x = torch.ones(3, requires_grad=True)
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        for _ in range(3):
            assert [16.0] * 3 == twice(x).tolist()
