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
    model, tensor, buffer = Model(), torch.ones(2, requires_grad=True), torch.ones(3)
    modules.registered_parameters(model)["weight"] = tensor
    modules.registered_buffers(model)["count"] = buffer

    assert [tensor, buffer] == [model.weight, model.count]
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
