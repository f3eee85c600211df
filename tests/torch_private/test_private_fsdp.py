"""The private names of ``fully_shard`` and ``DTensor`` that parwrap uses."""

import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parwrap.torch_private import fsdp, modules, tensors


@pytest.fixture(autouse=True)
def _group(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def mesh():
    mesh = init_device_mesh("cpu", (1,))
    yield mesh
    fsdp.forget_process_groups(mesh)


@pytest.fixture
def sharded(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def test_a_state_has_its_parameters_with_their_places_and_whole_values_after_a_forward(sharded):
    root, inner = fully_shard.state(sharded), fully_shard.state(sharded[0])
    fsdp.initialize(root)
    (group,) = fsdp.param_groups(inner)
    info = fsdp.module_info(group.fsdp_params[0])

    assert (sharded[0], "weight") == (info.module, info.param_name)
    assert [None, None] == [fsdp.unsharded_parameter(param) for param in group.fsdp_params]
    sharded(torch.ones(1, 2))
    assert [(2, 2), (2,)] == [fsdp.unsharded_parameter(param).shape for param in group.fsdp_params]
    assert torch.equal(sharded[0].weight.to_local(), fsdp.local_tensor(sharded[0].weight))


def test_a_parameter_is_registered_as_its_stand_in_while_it_is_sharded(sharded):
    root, stand_in, seen = fully_shard.state(sharded), nn.Parameter(torch.ones(2, 1)), []
    fsdp.initialize(root)
    param = fsdp.param_groups(root)[0].fsdp_params[0]
    fsdp.register_as(param, stand_in)
    assert sharded[2].weight is stand_in
    sharded[2].register_forward_pre_hook(lambda module, inputs: seen.append(module.weight))
    with torch.no_grad():
        sharded(torch.ones(1, 2))
    fsdp.param_groups(root)[0].reshard()
    sharded.load_state_dict(sharded.state_dict(), strict=False)
    new = nn.Parameter(torch.zeros(1, 2))

    assert seen[0] is fsdp.unsharded_parameter(param)
    assert sharded[2].weight is stand_in
    fsdp.replace_on_modules(param, new)
    assert sharded[2].weight is new


def test_a_backward_gathers_when_it_reaches_an_output(sharded):
    state, outputs = fully_shard.state(sharded), []
    fsdp.initialize(state)
    fsdp.set_pre_backward_registration(state, lambda output: outputs.append(output) or output)
    out = sharded(torch.ones(1, 2))
    out.register_hook(fsdp.pre_backward(state))
    out.sum().backward()

    assert [id(out)] == [id(each) for each in outputs] == [id(each) for each in fsdp.collect_grad_tensors([{"out": out}, 1])]
    assert sharded[2].weight.grad is not None


def test_a_parameter_is_gathered_in_full_among_others_in_low_precision_and_their_gradients_are_reduced_together(mesh):
    model = nn.Linear(2, 1)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False))
    fsdp.initialize(fully_shard.state(model))
    (group,) = fsdp.param_groups(fully_shard.state(model))
    fsdp.gather_in_full(group.fsdp_params[1])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 2))
    leaves = [fsdp.unsharded_parameter(param) for param in group.fsdp_params]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf, dtype=leaf.grad_dtype)
    fsdp.same_dtype(group.fsdp_params)
    group.post_backward()
    group.finalize_backward()

    assert [torch.bfloat16, torch.float32] == [leaf.dtype for leaf in leaves]
    assert [torch.float32] * 2 == [p.grad.dtype for p in model.parameters()]


def test_an_interrupted_forward_is_forgotten(sharded):
    sharded[2].register_forward_pre_hook(lambda module, inputs: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            sharded(torch.ones(1, 2))
        fsdp.reset_iteration(fully_shard.state(sharded))


def test_a_forgotten_state_is_hidden_and_its_groups_can_be_released(sharded):
    states = [fully_shard.state(module) for module in (sharded[0], sharded)]
    fsdp.initialize(states[1])
    for state in states:
        fsdp.forget_state(state)
        fsdp.release_groups(state)

    assert [[], []] == [fsdp.param_groups(state) for state in states]


def test_gradients_are_scaled_to_a_norm():
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.tensor([4.0])
    fsdp.clip_grads_with_norm_([p], 2.0, torch.tensor(4.0))

    assert pytest.approx(2.0) == p.grad.item()


def test_a_mesh_that_has_forgotten_its_process_groups_does_not_keep_them():
    mesh = init_device_mesh("cpu", (1,))
    group = weakref.ref(mesh.get_group())
    fsdp.forget_process_groups(mesh)
    dist.destroy_process_group()

    assert group() is None


def test_a_method_in_python_runs_where_subclasses_are_disabled_if_this_torch_can_do_that():
    with tensors.disable_torch_function():
        norm = torch.ones(4).as_subclass(type("Sub", (torch.Tensor,), {})).norm if fsdp.DISABLED_SUBCLASSES_WORK else torch.ones(4).norm

        assert 2.0 == norm()


def test_a_subclass_can_use_the_plain_operation():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with tensors.disable_torch_function():
        assert torch.equal(torch.ones(2), torch.ones(2).as_subclass(Loud) + 0)


def test_the_children_of_a_module_are_listed_with_none():
    module = nn.Module()
    module.register_module("first", None)

    assert {"first": None} == modules.registered_modules(module)
