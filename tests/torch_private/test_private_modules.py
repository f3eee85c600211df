"""What parwrap needs of private names of modules, and of replicas of them."""

import copy

import pytest
import torch
from torch import nn

from parwrap.torch_private import autograd, data_parallel, modules


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_parameter("bias", None)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("missing", None)
        self.layer = self.same = nn.Linear(1, 1)
        self.nothing = None

    def forward(self, x):
        return self.weight * x


def test_what_is_registered_can_be_read_also_where_it_is_none_or_twice_there():
    model = Model()

    assert {"weight": model.weight, "bias": None} == {**modules.registered_parameters(model)}
    assert {"count": model.count, "missing": None} == {**modules.registered_buffers(model)}
    assert {"layer": model.layer, "same": model.layer} == {**modules.registered_modules(model)}
    for name, registered in [
        (modules.PARAMETERS, modules.registered_parameters),
        (modules.BUFFERS, modules.registered_buffers),
        (modules.MODULES, modules.registered_modules),
    ]:
        assert vars(model)[name] is registered(model)


def test_what_is_registered_can_be_written_also_bare_tensors():
    model, tensor, buffer, child = Model(), torch.ones(2, requires_grad=True), torch.ones(3), nn.Identity()
    modules.registered_parameters(model)["weight"] = tensor
    modules.registered_buffers(model)["count"] = buffer
    modules.registered_modules(model)["layer"] = child

    assert [tensor, buffer, child] == [model.weight, model.count, model.layer]
    assert tensor in [*model.parameters()]


def test_a_call_goes_through_one_method(monkeypatch):
    original, called = getattr(nn.Module, modules.CALL), []
    monkeypatch.setattr(nn.Module, modules.CALL, lambda self, *args: (called.append(self), original(self, *args))[1])
    model = Model()

    assert 2 == model(2)
    assert [model] == called


@pytest.mark.parametrize(
    "move", [nn.Module.double, nn.Module.cpu, lambda module: module.to("cpu"), lambda module: module.to_empty(device="cpu")]
)
def test_all_that_moves_a_module_goes_through_one_method(move, monkeypatch):
    original, moved = getattr(nn.Module, modules.APPLY), []

    def apply(self, *args, **kwargs):
        moved.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, modules.APPLY, apply)
    model = nn.Linear(1, 1)
    move(model)

    assert [model] == moved


def test_a_recurrent_layer_has_a_list_of_its_weights_which_assignments_renew():
    layer = nn.RNN(1, 1)
    layer.weight_hh_l0 = weight = nn.Parameter(torch.zeros(1, 1))

    assert [id(each) for each in layer.parameters()] == [id(each) for each in vars(layer)[modules.FLAT_WEIGHTS]]
    assert any(each is weight for each in vars(layer)[modules.FLAT_WEIGHTS])


def test_a_lazy_module_has_hooks_in_attributes():
    lazy = nn.LazyLinear(1)

    assert [*modules.LAZY_HOOKS] == [name for name in modules.LAZY_HOOKS if name in vars(lazy)]
    assert {*modules.LAZY_HOOKS} >= {*vars(lazy)} - {*vars(nn.Linear(1, 1))}


BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_batch_norms_have_a_base(kind):
    assert issubclass(kind, modules.BatchNorm)
    assert issubclass(kind, modules.NormBase)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_instance_norms_have_the_base_of_running_statistics_only(kind):
    assert issubclass(kind, modules.NormBase)
    assert not issubclass(kind, modules.BatchNorm)
    assert not issubclass(nn.LayerNorm, modules.NormBase)


def test_a_module_that_is_only_made_is_not_initialized():
    assert not modules.is_initialized(Model.__new__(Model))
    assert modules.is_initialized(Model())
    assert modules.is_initialized(torch.jit.script(nn.Linear(1, 1)))


def test_a_compiled_module_is_known():
    layer = nn.Linear(1, 1)
    assert modules.compiled_call(layer) is None
    wrapped = torch.compile(layer, backend="eager")

    assert modules.registered_modules(wrapped)[modules.ORIGINAL_MODULE] is layer
    assert modules.compiled_call(layer) is None
    layer.compile(backend="eager")
    assert modules.compiled_call(layer) is not None


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ],
)
def test_each_hook_is_seen(register):
    layer = nn.Linear(1, 1)
    assert [] == [hook for hooks in modules.module_hooks(layer) for hook in hooks.values()]
    register(layer, print)

    assert [print] == [hook for hooks in modules.module_hooks(layer) for hook in hooks.values()]


def test_a_replica_has_dicts_of_its_own():
    model = Model()
    replica = data_parallel.shallow_replica(model)
    modules.registered_modules(replica)["layer"] = nn.Identity()
    modules.registered_buffers(replica)["count"] = torch.ones(1)

    assert getattr(replica, data_parallel.IS_REPLICA)
    assert not getattr(model, data_parallel.IS_REPLICA, False)
    assert {} == {**modules.registered_parameters(replica)}
    assert isinstance(model.layer, nn.Linear)
    assert [0.0] == model.count.tolist()
    assert Model is type(replica)
    assert modules.registered_modules(copy.copy(model)) is modules.registered_modules(model)  # hence no such copy


def test_another_shape_is_no_view():
    parts = torch.unsafe_split_with_sizes(torch.ones(4, requires_grad=True) * 1, [2, 2])
    shaped = data_parallel.unsafe_view(parts[0], (2, 1))
    shaped.mul_(2)  # which torch refuses for one of several views

    assert (2, 1) == tuple(shaped.shape)
    assert autograd.view_base(shaped) is None
    assert shaped.data_ptr() == parts[0].data_ptr()


def test_gpus_are_scattered_to_and_gathered_from(monkeypatch):
    sent = []
    monkeypatch.setattr("torch.nn.parallel.comm.scatter", lambda *args: (sent.append(args[1:4]), args[0].split(args[2]))[1])
    parts = data_parallel.Scatter.apply([torch.device("cuda", 1), torch.device("cuda", 0)], [1, 2], 0, torch.ones(3))

    assert [((1, 0), [1, 2], 0)] == [(tuple(devices), sizes, dim) for devices, sizes, dim in sent]
    assert [1, 2] == [len(part) for part in parts]
    with pytest.raises(AssertionError, match="not implemented for CPU"):
        data_parallel.Gather.apply(torch.device("cuda", 0), 0, torch.ones(1))
