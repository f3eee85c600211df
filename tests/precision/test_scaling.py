"""fp16 without an edit to the loop, against torch's GradScaler by hand."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parwrap
from scaled import FP16, LOW, Recorder, batches, build, by_hand, loss_of, same


def plain(data, micro=1, clip=None):
    model, recorder = build(), Recorder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(data):
        loss = loss_of(model, x, y) / micro
        loss.backward()
        if (number + 1) % micro == 0:
            recorder.see(model, parwrap.amp_state().scale)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()["state"], parwrap.amp_state().scale, recorder.seen


@pytest.mark.parametrize("policy", [{}, {"growth_interval": 3}, {"init_scale": 2.0**24, "growth_interval": 2, "growth_factor": 4.0}])
@pytest.mark.parametrize("loop", [{}, {"micro": 3}, {"clip": 0.1}, {"micro": 2, "clip": 0.1}], ids=str)
def test_weights_state_gradients_and_scale_are_bit_for_bit_those_by_hand(loop, policy):
    data = batches(overflowing=(4, 5))

    assert same(by_hand(data, **loop, **policy), parwrap.amp(dtype="fp16", **policy)(plain)(data, **loop))


def test_a_step_with_an_overflow_is_skipped_and_counted_and_halves_the_scale():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (x, y), before = batches(1, overflowing=[0])[0], copy.deepcopy(model.state_dict())
        loss_of(model, x, y).backward()

        assert not all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()

        assert same(before, model.state_dict())
        assert (parwrap.amp_state().scale, parwrap.amp_state().skipped_steps) == (32768.0, 1)
        return True

    assert parwrap.amp(dtype="fp16")(train)()


def test_gradients_are_true_scale_also_where_some_were_there_before():
    model = nn.Linear(4, 4, bias=False)
    x = torch.eye(4)
    with parwrap.amp(**LOW):
        model.weight.grad = torch.full((4, 4), 0.1)
        model(x).sum().backward()

    assert torch.equal(model.weight.grad, torch.full((4, 4), 0.1) + 1)


def test_inputs_bare_tensors_and_what_retains_its_gradient_get_true_scale_gradients():
    weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    with parwrap.amp(**LOW):
        hidden = x @ weight
        hidden.retain_grad()
        for times in (1, 2):
            (hidden.float() * 2).sum().backward(retain_graph=True)

            assert {2.0 * times} == set(hidden.grad.flatten().tolist())
            assert {4.0 * times} == set(weight.grad.flatten().tolist())
            assert {6.0 * times} == set(x.grad.flatten().tolist())


def test_backward_for_given_inputs_and_with_a_given_gradient():
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with parwrap.amp(**LOW):
        hidden = weight * other
        hidden.backward(torch.full((3,), 0.5), inputs=[weight], retain_graph=True)
        hidden.sum().backward(inputs=[hidden])

    assert ([0.5] * 3, None, [1.0] * 3) == (weight.grad.tolist(), other.grad, hidden.grad.tolist())


@pytest.mark.parametrize("given", [None, torch.tensor(0.5)])
@pytest.mark.parametrize("within", [{"inputs": True}, {}], ids=["inputs", ""])
def test_backward_of_an_edge_of_the_graph(given, within):
    def gradients():
        weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
        edge = torch.autograd.graph.get_gradient_edge((weight * 2).sum() * other.sum())
        torch.autograd.backward([edge, (other * 3).sum()], [given, None], **({"inputs": [weight, other]} if within else {}))
        return weight.grad, other.grad

    expected = gradients()
    with parwrap.amp(**LOW):
        assert same(expected, gradients())
    with parwrap.amp(**LOW), pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(nn.Parameter(torch.ones(3)) * 2))


def test_a_graph_of_the_gradients_is_true_scale_too():
    p = nn.Parameter(torch.tensor([3.0]))
    with parwrap.amp(**LOW):
        (p**2).sum().backward(create_graph=True)
        first, p.grad = p.grad, None

        assert [6.0] == first.tolist()
        (first**2).sum().backward()

    assert [24.0] == p.grad.tolist()  # of (2 p) ** 2


def test_sparse_gradients():
    embedding = nn.Embedding(5, 2, sparse=True)
    with parwrap.amp(**LOW):
        embedding(torch.tensor([1, 1, 3])).sum().backward()

    assert embedding.weight.grad.is_sparse
    assert [0, 2, 0, 1, 0] == embedding.weight.grad.to_dense()[:, 0].tolist()


def test_hooks_of_the_user_on_parameters_see_true_scale_gradients():
    p, seen = nn.Parameter(torch.ones(2)), []
    handle = p.register_hook(lambda grad: grad.clamp(max=0.25))
    p.register_hook(lambda grad: seen.append(grad.tolist()))
    with parwrap.amp(**LOW):
        (p * 3).sum().backward()

        assert ([[0.25] * 2], [0.25] * 2) == (seen, p.grad.tolist())
    handle.remove()
    p.sum().backward()

    assert [1.0, 1.0] == seen[1]
    assert 1 == len(p._backward_hooks)


KEEPS_GRADIENTS = pytest.mark.needs_torch(2, 11, why="torch's own autocast loses gradients before")


@pytest.mark.parametrize("use_reentrant", [pytest.param(True, marks=KEEPS_GRADIENTS), False])
def test_checkpoints(use_reentrant):
    def gradients(scope):
        model, x = build(), torch.ones(4, 6, requires_grad=True)
        with scope:
            hidden = checkpoint(model[:2], x, use_reentrant=use_reentrant)
            checkpoint(model[2:], hidden, use_reentrant=use_reentrant).float().mean().backward()
        return [p.grad for p in (*model.parameters(), x)]

    plain = gradients(torch.autocast("cpu", dtype=FP16))

    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(plain, gradients(parwrap.amp(**LOW)), strict=True))


@pytest.fixture(params=["dtype", "device"])
def _other_defaults(request):
    if request.param == "dtype":
        torch.set_default_dtype(torch.float64)
    else:
        torch.set_default_device("meta")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_other_defaults")
@pytest.mark.parametrize("asked", [{"dtype": "fp16"}, {"level": "O2"}], ids=str)
def test_other_defaults_of_torch_change_nothing(asked):
    @parwrap.amp(**asked)
    def train():
        model = nn.Linear(4, 1, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (math.inf, 1.0):
            optimizer.zero_grad()
            before = model.weight.clone()
            (model(torch.ones(2, 4, device="cpu")).float().mean() * factor).backward()
            optimizer.step()
        return torch.equal(before, model.weight), parwrap.amp_state()

    stayed, state = train()

    assert (False, 32768.0, 1) == (stayed, state.scale, state.skipped_steps)


def test_a_model_that_is_half_already_is_refused():
    model = build().half()
    with parwrap.amp(dtype="fp16"), pytest.raises(parwrap.UsageError, match="is already float16, so its gradients would underflow"):
        model(torch.ones(1, 6)).sum().backward()
