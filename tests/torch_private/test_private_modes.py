"""What parwrap needs of private names of tracing, transforms, modes and ``torch.compile``."""

import importlib
from pathlib import Path

import pytest
import torch
import wrapt
from torch.overrides import TorchFunctionMode

from parwrap.torch_private import dynamo, modes


def test_a_trace_is_seen():
    seen = []
    torch.jit.trace(lambda x: (seen.append(modes.tracing_state()), x + 1)[1], torch.ones(1), check_trace=False)

    assert modes.tracing_state() is None
    assert [True] == [state is not None for state in seen]


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_transform_is_seen(transform):
    seen = []

    def function(x):
        seen.append((modes.current_transform() is not None, modes.is_transformed(x)))
        return x.sum()

    transform(function)(torch.ones(2))

    assert [(True, True)] == seen
    assert modes.current_transform() is None
    assert not modes.is_transformed(torch.ones(2))


def test_modes_for_functions_are_seen():
    class Mode(TorchFunctionMode):
        pass

    with Mode() as first, Mode() as second:
        assert [first, second] == modes.function_modes()
    assert [] == modes.function_modes()


def test_a_default_device_is_a_mode_of_its_own():
    with torch.device("cpu"):
        assert [modes.DeviceContext] == [type(mode) for mode in modes.function_modes()]


def test_a_dispatch_mode_sees_operators_with_their_names_and_arguments():
    seen = []

    class Mode(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            schema = modes.operator_schema(func)
            seen.append((schema.name, [argument.name for argument in schema.arguments], modes.dispatch_mode_depth()))
            return func(*args, **(kwargs or {}))

    with Mode():
        assert 1 == modes.dispatch_mode_depth()
        torch.dropout(torch.ones(1), 0.5, True)

    assert 0 == modes.dispatch_mode_depth()
    assert ("aten::native_dropout", ["input", "p", "train"], 0) in seen or ("aten::bernoulli_", ["self", "p", "generator"], 0) in seen


@pytest.mark.parametrize(
    "distribution", [torch.distributions.Gamma(torch.ones(2), torch.ones(2)), torch.distributions.Dirichlet(torch.ones(2))]
)
def test_distributions_draw_by_operators_of_these_names(distribution):
    seen = []

    class Mode(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if torch.Tag.nondeterministic_seeded in func.tags:
                seen.append(modes.operator_schema(func).name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with Mode():
        distribution.sample()

    assert 1 == len(seen)
    assert seen[0] in modes.PRIVATE_SAMPLERS


def test_the_tracer_lies_in_its_directory():
    directory = dynamo.source_directory()

    assert Path(directory, "symbolic_convert.py").is_file()
    assert Path(directory, "variables").is_dir()
    assert not Path(directory).relative_to(Path(torch.__file__).parent).parts[1:]
    assert directory.endswith("/")


def test_the_tracer_is_a_module_of_this_name():
    module = importlib.import_module(dynamo.DYNAMO)

    assert module.__file__ == dynamo.source_directory() + "__init__.py"
    assert module.symbolic_convert.__file__ == dynamo.source_directory() + "symbolic_convert.py"


def test_another_function_is_compiled_in_the_place_of_a_wrapped_one():
    called = []

    def untraceable(x):
        called.append(x)
        return x - 1

    function = type("Traced", (wrapt.FunctionWrapper,), dynamo.inlined(lambda x: x + 1))(untraceable, print)
    compiled = torch.compile(lambda x: function(x), backend="eager", fullgraph=True)

    assert [2.0] == compiled(torch.ones(1)).tolist()
    assert [] == called
    assert [dynamo.INLINE] == [*dynamo.inlined(print)]
