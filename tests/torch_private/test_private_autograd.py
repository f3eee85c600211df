"""What parwrap needs of autograd's private names."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from parwrap.torch_private import autograd


def test_a_backward_has_a_number_while_it_runs():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(autograd.current_graph_task_id()))

    assert autograd.NO_GRAPH_TASK == autograd.current_graph_task_id()
    x.sum().backward()

    assert autograd.NO_GRAPH_TASK not in seen
    assert 1 == len(seen)
    assert autograd.NO_GRAPH_TASK == autograd.current_graph_task_id()


def test_the_backward_inside_of_a_backward_has_another_number():
    seen = []

    def hook(grad):
        seen.append(autograd.current_graph_task_id())
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True)
            inner.register_hook(lambda grad: seen.append(autograd.current_graph_task_id()))
            inner.sum().backward()

    x = torch.ones(1, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()

    assert 2 == len({*seen} - {autograd.NO_GRAPH_TASK})


def test_nodes_are_numbered_in_the_order_in_which_they_are_built():
    x = torch.ones(1, requires_grad=True)
    begin = autograd.next_sequence_number()
    first = x * 2
    middle = autograd.next_sequence_number()
    second = first * 2
    end = autograd.next_sequence_number()

    assert begin <= autograd.sequence_number(first.grad_fn) < middle <= autograd.sequence_number(second.grad_fn) < end


def test_a_function_of_pythons_is_numbered_too():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    begin = autograd.next_sequence_number()
    node = Double.apply(torch.ones(1, requires_grad=True)).grad_fn

    assert begin <= autograd.sequence_number(node) < autograd.next_sequence_number()


def test_what_is_no_node_has_no_number():
    assert autograd.sequence_number(object()) is None


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


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_knows_whether_it_trains_and_its_input(training):
    x = torch.rand(4, 2, requires_grad=True)
    node = functional.batch_norm(x, torch.zeros(2), torch.ones(2), training=training).grad_fn

    assert "BatchNormBackward0" in node.name()
    assert training == autograd.saved_training(node)
    assert x.equal(autograd.saved_input(node))


def test_what_does_not_say_trains():
    assert autograd.saved_training(torch.ones(1, requires_grad=True).sum().grad_fn)


def test_the_input_is_freed_by_a_backward():
    y = functional.batch_norm(torch.rand(4, 2, requires_grad=True), None, None, training=True)
    y.sum().backward()

    with pytest.raises(RuntimeError):
        autograd.saved_input(y.grad_fn)


def test_a_node_has_saved_its_inputs_until_its_backward():
    x, weight, target = torch.rand(4, 2), torch.rand(3, 2, requires_grad=True), torch.rand(4, 3)
    output = functional.linear(x, weight)
    loss = functional.mse_loss(output, target)

    assert [x.data_ptr()] == [saved.data_ptr() for saved in autograd.saved_tensors(output.grad_fn)]
    assert {output.data_ptr(), target.data_ptr()} == {saved.data_ptr() for saved in autograd.saved_tensors(loss.grad_fn)}
    loss.backward()
    assert [] == autograd.saved_tensors(loss.grad_fn)


def test_a_function_of_pythons_has_saved_tensors_too():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    x = torch.rand(2, requires_grad=True)

    assert [x.data_ptr()] == [saved.data_ptr() for saved in autograd.saved_tensors(Square.apply(x).grad_fn)]


def test_a_checkpoint_is_not_computed_again_to_see_what_it_has_saved():
    calls = []

    def block(x):
        calls.append(x)
        return x.tanh().exp()

    output = checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=False)

    assert [] == autograd.saved_tensors(output.grad_fn)
    assert 1 == len(calls)


def test_a_view_knows_its_base():
    base = torch.ones(2, requires_grad=True) * 1

    assert autograd.view_base(base[:1]) is base
    assert autograd.view_base(base) is None


def test_the_innermost_hooks_on_saved_tensors_are_known():
    def pack(tensor):
        return tensor

    def unpack(tensor):
        return tensor

    assert not autograd.innermost_saved_tensors_hooks()
    with torch.autograd.graph.saved_tensors_hooks(print, print), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert (pack, unpack) == tuple(autograd.innermost_saved_tensors_hooks())
    assert not autograd.innermost_saved_tensors_hooks()
