"""The private names of modules that parwrap uses."""

import pytest
import torch
from torch import nn

from parwrap.torch_private import modules


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


def test_registered_objects_can_be_read_with_none_and_duplicates():
    model = Model()

    assert {"weight": model.weight, "bias": None} == {**modules.registered_parameters(model)}
    assert {"count": model.count, "missing": None} == {**modules.registered_buffers(model)}


def test_registered_objects_can_be_written_as_bare_tensors_too():
    model, tensor, buffer, child = Model(), torch.ones(2, requires_grad=True), torch.ones(3), nn.Identity()
    modules.registered_parameters(model)["weight"] = tensor
    modules.registered_buffers(model)["count"] = buffer
    modules.registered_modules(model)["layer"] = child

    assert [tensor, buffer, child] == [model.weight, model.count, model.layer]
    assert tensor in [*model.parameters()]


@pytest.mark.parametrize(
    "move", [nn.Module.double, nn.Module.cpu, lambda module: module.to("cpu"), lambda module: module.to_empty(device="cpu")]
)
def test_every_move_of_a_module_goes_through_one_method(move, monkeypatch):
    original, moved = getattr(nn.Module, modules.APPLY), []

    def apply(self, *args, **kwargs):
        moved.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, modules.APPLY, apply)
    model = nn.Linear(1, 1)
    move(model)

    assert [model] == moved


NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]


@pytest.mark.parametrize("kind", NORMS)
def test_norms_with_running_statistics_have_a_base(kind):
    assert issubclass(kind, modules.NormBase)
    assert not issubclass(nn.LayerNorm, modules.NormBase)


def test_a_call_goes_through_one_method(monkeypatch):
    original, called = getattr(nn.Module, modules.CALL), []
    monkeypatch.setattr(nn.Module, modules.CALL, lambda self, *args: (called.append(self), original(self, *args))[1])
    model = nn.Identity()

    assert 2 == model(2)
    assert [model] == called


def test_all_batch_norms_have_one_base():
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm

    assert all(issubclass(kind, modules.BatchNorm) for kind in kinds)
    assert not issubclass(nn.InstanceNorm1d, modules.BatchNorm)


def test_a_module_is_what_its_three_dictionaries_hold():
    first, second = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Sequential()
    for name in modules.CONTENTS:
        vars(second)[name] = vars(first)[name]

    assert list(first.named_modules())[1:] == list(second.named_modules())[1:]
    assert list(first.state_dict()) == list(second.state_dict())


def test_the_first_forward_of_a_lazy_module_makes_its_parameters_by_one_method(monkeypatch):
    original, inferred = getattr(nn.modules.lazy.LazyModuleMixin, modules.INFER), []

    def infer(self, *args, **kwargs):
        inferred.append(type(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.modules.lazy.LazyModuleMixin, modules.INFER, infer)
    nn.Sequential(nn.LazyConv1d(1, 1), nn.LazyBatchNorm1d())(torch.ones(2, 1, 1))

    assert [nn.LazyConv1d, nn.LazyBatchNorm1d] == inferred


def test_a_recurrent_layer_has_a_list_of_its_weights_which_assignments_renew():
    layer = nn.RNN(1, 1)
    layer.weight_hh_l0 = weight = nn.Parameter(torch.zeros(1, 1))

    assert [id(each) for each in layer.parameters()] == [id(each) for each in vars(layer)[modules.FLAT_WEIGHTS]]
    assert any(each is weight for each in vars(layer)[modules.FLAT_WEIGHTS])


def test_a_compiled_module_is_known():
    layer = nn.Linear(1, 1)
    assert modules.compiled_call(layer) is None
    wrapped = torch.compile(layer, backend="eager")

    assert modules.registered_modules(wrapped)[modules.ORIGINAL_MODULE] is layer
    assert modules.compiled_call(layer) is None
    layer.compile(backend="eager")
    assert modules.compiled_call(layer) is not None


def test_a_replica_has_dicts_of_its_own_and_a_mark():
    model = Model()
    replica = modules.shallow_replica(model)
    modules.registered_buffers(replica)["count"] = modules.registered_modules(replica)["layer"] = None

    assert model.count is not None
    assert model.layer is not None
    assert {} == modules.registered_parameters(replica)
    assert getattr(replica, modules.IS_REPLICA)
    assert not hasattr(model, modules.IS_REPLICA)
