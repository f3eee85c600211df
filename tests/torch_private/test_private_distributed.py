"""What parwrap needs of private names of process groups, device meshes, DDP and of what is sharded, by a group of one rank."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from parwrap.torch_private import distributed, fsdp


@pytest.fixture(autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def mesh():
    mesh = init_device_mesh("cpu", (1,))
    yield mesh
    distributed.forget_process_groups(mesh)


def test_collectives_are_counted():
    before = distributed.collective_count(dist.group.WORLD)
    dist.all_reduce(torch.ones(1))
    dist.barrier()

    assert before + 2 == distributed.collective_count(dist.group.WORLD)


def test_another_group_can_be_the_default():
    world, other = dist.group.WORLD, dist.new_group([0])
    before, others = distributed.collective_count(world), distributed.collective_count(other)
    distributed.set_default_group(other)
    dist.all_reduce(torch.ones(1))
    assert dist.group.WORLD is other
    distributed.set_default_group(world)

    assert dist.group.WORLD is world
    assert (before, others + 1) == (distributed.collective_count(world), distributed.collective_count(other))


def test_process_groups_are_ended_without_waiting():
    dist.new_group([0])
    distributed.abort_process_groups()

    assert not dist.is_initialized()


def test_ddp_says_when_its_buckets_are_rebuilt():
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert not distributed.has_rebuilt_buckets(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert not distributed.has_rebuilt_buckets(ddp)
    ddp(torch.ones(1, 2))

    assert distributed.has_rebuilt_buckets(ddp)


def test_a_reducer_says_whether_all_parameters_have_taken_part():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 2)).sum().backward()
    distributed.check_reducer_finalized(ddp.reducer)
    ddp(torch.ones(1, 2))
    model[0](torch.ones(1, 2)).sum().backward()

    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        distributed.check_reducer_finalized(ddp.reducer)


def test_a_mesh_holds_a_process_group_that_has_ended_until_it_is_forgotten():
    mesh = init_device_mesh("cpu", (1,))
    group = weakref.ref(mesh.get_group())
    dist.destroy_process_group()
    gc.collect()
    assert group() is not None
    distributed.forget_process_groups(mesh)
    gc.collect()

    assert group() is None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.outer(self.inner(x))


@pytest.fixture
def sharded(mesh):
    """A model with two states, of its inner layer and of itself."""
    model = Model()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def states(model):
    return fully_shard.state(model.inner), fully_shard.state(model)


def params(model):
    return [p for state in states(model) for group in fsdp.param_groups(state) for p in group.fsdp_params]


def whole(param):
    return getattr(param, fsdp.UNSHARDED_PARAM, None)


def test_parameters_know_where_they_are(sharded):
    fsdp.initialize(states(sharded)[1])
    inner, outer = params(sharded)

    assert [(sharded.inner, "weight"), (sharded.outer, "weight")] == [
        (fsdp.module_info(p).module, fsdp.module_info(p).param_name) for p in (inner, outer)
    ]
    assert ["inner.weight", "outer.weight"] == [fsdp.parameter_name(p) for p in (inner, outer)]


def test_the_state_that_is_initialized_first_is_the_root_of_those_below(sharded):
    inner, outer = states(sharded)
    fsdp.initialize(outer)
    sharded.inner(torch.ones(1, 2))

    assert fsdp.communication_context(inner) is fsdp.communication_context(outer)


def test_whole_parameters_are_there_from_the_first_forward_and_have_the_gradient_until_it_is_reduced(sharded):
    fsdp.initialize(states(sharded)[1])
    assert [None, None] == [whole(p) for p in params(sharded)]
    output = sharded(torch.ones(1, 2))
    inner, outer = map(whole, params(sharded))
    assert ((2, 2), (1, 2)) == (tuple(inner.shape), tuple(outer.shape))
    seen = []
    outer.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    output.sum().backward()

    assert [True] == seen
    assert [None, None] == [whole(p).grad for p in params(sharded)]
    assert [True, True] == [p.grad is not None for p in sharded.parameters()]


def test_groups_are_in_the_order_of_the_last_forward(sharded):
    inner, outer = states(sharded)
    fsdp.initialize(outer)
    sharded(torch.ones(1, 2))

    assert [*fsdp.param_groups(inner), *fsdp.param_groups(outer)] == fsdp.communication_context(outer).post_forward_order


def test_a_forward_that_was_broken_off_is_known_until_it_is_forgotten(sharded):
    inner, outer = states(sharded)
    fsdp.initialize(outer)
    assert fsdp.forward_root(outer) is None
    with pytest.raises(RuntimeError, match="shapes"):
        sharded(torch.ones(1, 3))
    assert fsdp.forward_root(inner) is outer
    fsdp.reset_iteration(outer)
    assert fsdp.forward_root(inner) is None
    sharded(torch.ones(1, 2)).sum().backward()

    assert fsdp.forward_root(inner) is None
    assert all(p.grad is not None for p in sharded.parameters())


def test_hooks_that_gather_are_registered_by_a_function_that_can_be_exchanged(sharded):
    inner, outer = states(sharded)
    fsdp.initialize(outer)
    seen, gathered = [], []

    def register(outputs):
        for tensor in fsdp.collect_grad_tensors({"outputs": [outputs, torch.ones(1)]}):
            seen.append(tensor)
            tensor.register_hook(gather)
        return outputs

    def gather(grad):
        fsdp.pre_backward(inner)(grad)
        gathered.append(sharded.inner.weight is whole(params(sharded)[0]))

    fsdp.set_pre_backward_registration(inner, register)
    output = sharded(torch.ones(1, 2))
    assert isinstance(sharded.inner.weight, DTensor)
    output.sum().backward()

    assert [(1, 2)] == [tuple(tensor.shape) for tensor in seen]
    assert [True] == gathered


def test_what_was_gathered_by_hand_is_put_back(sharded):
    fsdp.initialize(states(sharded)[1])
    for state in states(sharded):
        for group in fsdp.param_groups(state):
            group.unshard()
            group.wait_for_unshard()
    assert not any(isinstance(p, DTensor) for p in sharded.parameters())
    for state in states(sharded):
        for group in fsdp.param_groups(state):
            fsdp.to_sharded(group)

    assert all(isinstance(p, DTensor) for p in sharded.parameters())


def test_parameters_are_replaced_wherever_they_are_tied(mesh):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    fsdp.initialize(fully_shard.state(model))
    ((param,),) = [group.fsdp_params for group in fsdp.param_groups(fully_shard.state(model))]
    new = nn.Parameter(torch.ones(2, 2))
    fsdp.replace_on_modules(param, new)

    assert model[0].weight is new
    assert model[1].weight is new


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_state_that_is_forgotten_is_not_found_by_those_above(sharded, forgotten):
    inner, outer = states(sharded)
    if forgotten:
        fsdp.forget_state(inner)
    fsdp.initialize(outer)

    assert (not forgotten) == (fsdp.communication_context(inner) is fsdp.communication_context(outer))


def test_this_ranks_part_is_memory_not_a_view(mesh):
    whole = torch.arange(4.0)
    sharded = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    local = fsdp.local_tensor(sharded)
    with torch.no_grad():
        local.add_(1)

    assert not isinstance(local, DTensor)
    assert [1.0, 2.0, 3.0, 4.0] == sharded.detach().full_tensor().tolist()
    assert sharded.to_local() is not local  # which autograd follows


def test_gradients_are_scaled_to_a_norm_also_where_the_public_function_is_intercepted(monkeypatch):
    def intercepted(*args):
        raise AssertionError("intercepted")

    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", intercepted)
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.full((1,), 4.0)
    fsdp.clip_grads_with_norm_([p], 1.0, torch.tensor(4.0), None)

    assert p.grad.item() == pytest.approx(1.0)
