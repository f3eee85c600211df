"""What ``torch.compile`` leaves out of its graphs."""

import importlib
import sys

import torch

from parwrap.torch_private import dynamo
from parwrap.torch_private.dynamo import leave_frames, outside


def test_a_function_outside_of_graphs_is_called_directly_where_nothing_compiles():
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # imports the compiler
    caller = outside(lambda: sys._getframe(2).f_code, "a test")
    assert caller() is sys._getframe().f_code


def test_neither_a_function_outside_of_graphs_nor_what_it_calls_is_compiled():
    import torch._dynamo

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def double(x):
        return x * 2

    leave_frames(torch._dynamo)
    left_out = outside(lambda x: double(x), "a test")
    compiled = torch.compile(lambda x: left_out(x + 1) + 1, backend=backend)

    torch.testing.assert_close(compiled(torch.ones(1)), torch.tensor([5.0]))
    nodes = [node.name for graph in graphs for node in graph.graph.nodes]
    assert len(graphs) == 2
    assert not [name for name in nodes if "mul" in name]


def test_what_compiles_this_thread_is_known_and_can_be_left():
    import torch._dynamo

    seen, compiler = [], dynamo.running_compiler()

    def look():
        seen.append(compiler() is None)

    vars(look)["_torchdynamo_disable"] = True
    left = dynamo.without_compiler(look, "a test")
    look()
    torch.compile(lambda: (look(), left()), backend="eager")()

    assert [True, False, True] == seen


def test_a_graph_has_a_backward_if_it_returns_a_tensor_that_requires_grad():
    found, weight = [], torch.ones(2, requires_grad=True)

    def backend(graph, inputs):
        found.append(dynamo.has_backward(graph))
        return graph.forward

    compiled = torch.compile(lambda x: (x * 2, weight * x), backend=backend)
    compiled(torch.ones(2))
    with torch.no_grad():
        compiled(torch.ones(2))

    assert [True, False] == found


def test_the_splitter_of_graphs_compiles_by_its_backend():
    splitter = importlib.import_module(dynamo.GRAPH_SPLITTER).DDPOptimizer(2**20, "a backend")

    assert "a backend" == splitter.backend_compile_fn
    assert callable(splitter.compile_fn)
