"""The private names of autograd that parwrap uses."""

import pytest
import torch
from torch import nn

from parwrap.torch_private import autograd


def test_hooks_can_be_read_and_put_in_another_order():
    ran = []
    x = torch.ones(1, requires_grad=True)
    assert not autograd.tensor_hooks(x)
    first = x.register_hook(lambda grad: ran.append("first"))
    x.register_hook(lambda grad: ran.append("second"))
    hooks = autograd.tensor_hooks(x)
    hooks[first.id] = hooks.pop(first.id)
    x.sum().backward()

    assert ["second", "first"] == ran


def test_hooks_that_are_cleared_do_not_run():
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: 2 * grad)
    autograd.tensor_hooks(x).clear()
    x.sum().backward()

    assert torch.ones(1).equal(x.grad)


def test_a_node_knows_the_shape_dtype_and_device_of_its_outputs():
    (kind,) = autograd.input_metadata(torch.ones(3, 2, dtype=torch.float64, requires_grad=True).mul(2).grad_fn)

    assert ((3, 2), torch.float64, torch.device("cpu")) == (tuple(kind.shape), kind.dtype, kind.device)


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_knows_whether_its_gradient_is_sparse(sparse):
    layer = nn.Embedding(3, 2, sparse=sparse)
    output = layer(torch.tensor([1]))
    output.sum().backward()

    assert sparse == autograd.saved_sparse(output.grad_fn)
    assert sparse == layer.weight.grad.is_sparse
    assert not autograd.saved_sparse(output.sum().grad_fn)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_knows_whether_it_is_a_sum(reduction):
    x = torch.ones(3, 2, requires_grad=True)
    losses = nn.functional.mse_loss, nn.functional.binary_cross_entropy, nn.functional.smooth_l1_loss

    assert [reduction == "sum"] * 3 == [autograd.saved_sum(loss(x, torch.ones(3, 2), reduction=reduction).grad_fn) for loss in losses]
    assert not autograd.saved_sum(x.sum().grad_fn)


def test_a_view_knows_its_base():
    base = torch.ones(2, requires_grad=True) * 1

    assert autograd.view_base(base[:1]) is base
    assert autograd.view_base(base) is None


def test_a_tensor_inside_of_a_transform_is_found():
    found = []
    torch.vmap(lambda x: found.append(autograd.is_transformed(x)) or x)(torch.ones(2))

    assert [True] == found
    assert not autograd.is_transformed(torch.ones(2))


def test_it_is_known_whether_a_backward_runs():
    weight, seen = torch.ones(1, requires_grad=True), []
    weight.register_hook(lambda grad: seen.append(autograd.in_backward()))
    weight.sum().backward()

    assert ([True], False) == (seen, autograd.in_backward())


def test_a_running_transform_is_found():
    found = []
    torch.vmap(lambda x: found.append(autograd.current_transform() is not None) or x)(torch.ones(2))

    assert [True] == found
    assert autograd.current_transform() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_running_trace_is_found():
    found = []
    torch.jit.trace(lambda x: found.append(autograd.tracing_state() is not None) or x * 1, torch.ones(2), check_trace=False)

    assert found[0]
    assert autograd.tracing_state() is None
