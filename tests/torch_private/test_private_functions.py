"""Private names around torch's functions, on which whole batches rest."""

import torch
from torch import nn
from torch.func import grad, vmap

from parwrap.torch_private import autograd, functions, jit


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "heard"


def test_torch_function_can_be_turned_on_inside_of_a_call_that_has_it_off():
    x = torch.zeros(2).as_subclass(Loud)

    with torch._C.DisableTorchFunctionSubclass():
        assert (x + 1).tolist() == [1.0, 1.0]
        with functions.enable_torch_function():
            assert x + 1 == "heard"


def test_the_native_module_has_the_functions_of_layers():
    assert functions.NATIVE.linear(torch.ones(1, 2), torch.ones(3, 2)).tolist() == [[2.0, 2.0, 2.0]]


def test_optimizers_step_by_the_foreach_functions():
    x = [torch.zeros(2)]
    next(each for each in functions.FOREACH if each.__name__ == "_foreach_add_")(x, 1)

    assert x[0].tolist() == [1.0, 1.0]


def test_transforms_get_their_arguments_where_the_table_says(monkeypatch):
    seen = []
    for owner, name in functions.TRANSFORMS:
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, _original=original, _name=name, **kwargs: (seen.append(_name), _original(*args, **kwargs))[1]
        )
    vmap(torch.sin)(torch.ones(2))
    grad(torch.sin)(torch.ones(()))
    torch.func.grad_and_value(torch.sin)(torch.ones(()))
    torch.func.vjp(torch.sin, torch.ones(2))
    torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))

    assert {*seen} == {name for _, name in functions.TRANSFORMS}


def test_criteria_have_one_base():
    assert isinstance(nn.CrossEntropyLoss(), functions.Criterion)
    assert not isinstance(nn.Linear(1, 1), functions.Criterion)


def test_trees_hold_what_libraries_hold():
    leaves, structure = functions.pytree.tree_flatten({"a": [1, (2,)]})

    assert (leaves, functions.pytree.tree_unflatten(leaves, structure)) == ([1, 2], {"a": [1, (2,)]})


def test_views_are_known():
    x = torch.zeros(2, 2)

    assert functions.is_view(x[0])
    assert not functions.is_view(x)


def test_forward_hooks_are_in_two_dicts():
    module, hook, before = nn.Linear(1, 1), print, repr
    module.register_forward_hook(hook)
    module.register_forward_pre_hook(before)

    assert [[*each.values()] for each in functions.forward_hooks(module)] == [[hook], [before]]


def test_no_transform_runs_outside_of_transforms():
    def inner(x):
        with autograd.outside_of_transforms():
            assert autograd.current_transform() is None
        assert autograd.current_transform() is not None
        return x

    vmap(vmap(inner))(torch.ones(2, 2))


def test_scripted_code_may_call_a_patched_function():
    def rand(*args):
        raise AssertionError

    def code(x):
        return patched(x.size())  # noqa: F821

    code.__globals__["patched"] = rand
    with jit.scripted_as(torch.ones, rand):
        scripted = torch.jit.script(code)

    assert scripted(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_hooks_on_the_gradients_of_a_module_are_known():
    module = nn.Linear(1, 1)
    assert not functions.has_backward_hooks(module)
    module.register_full_backward_hook(print)

    assert functions.has_backward_hooks(module)
    assert len(functions.all_hooks(nn.Sequential(module))) == 1


def test_what_a_compiler_records_is_known():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not autograd.is_traced()
    with FakeTensorMode():
        assert autograd.is_traced()
