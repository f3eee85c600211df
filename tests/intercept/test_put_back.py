"""Every patch is undone: the identical object is there again after return, exceptions, nesting and recursion."""

import builtins
import bz2
import contextlib
import io
import logging
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.lib._datasource import _FileOpeners
from torch import nn, save  # noqa: F401
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import parwrap
from parwrap.errors import RankMismatchError
from parwrap.intercept.interceptor import DECLARED, Interceptor, intercepts
from parwrap.intercept.table import patches
from parwrap.patching.patch import Patch

OWNERS = (
    builtins,
    subprocess.Popen,
    torch,
    torch.autograd,
    torch.nn.functional,
    dist,
    DataLoader,
    StatefulDataLoader,
    nn.Module,
    torch.optim.Optimizer,
    ReduceLROnPlateau,
    logging.Logger,
    warnings,
    DistributedDataParallel,
    nn.DataParallel,
    os,
    io,
    shutil,
    tarfile,
    bz2,
    tempfile._RandomNameSequence,
    _FileOpeners,
    torch.random,
    torch.Tensor,
    torch.amp.autocast_mode.autocast,
    torch.amp.GradScaler,
    nn.utils,
    nn.utils.clip_grad,
    DTensor,
    np.random,
    random,
    warnings,
    sys.modules[__name__],
)
NOTES = ("__slotnames__", "__warningregistry__")
"""What pickle leaves in a class, and a warning in the module that it points to."""


EveryCall = type("EveryCall", (Interceptor,), {call: intercepts(lambda self, *args, **kwargs: None) for call in DECLARED})


def everything():
    """All that a patch could have changed."""
    found = {f"{owner.__name__}.{name}": value for owner in OWNERS for name, value in vars(owner).items() if name not in NOTES}
    found |= {f"step of {cls}": vars(cls).get("step") for cls in torch.optim.Optimizer.__subclasses__()}
    found |= {f"hook {number} on step": hook for number, hook in _global_optimizer_pre_hooks.items()}
    found |= {f"hook {number} after step": hook for number, hook in _global_optimizer_post_hooks.items()}
    found |= {f"hook {number} before forward": hook for number, hook in _global_forward_pre_hooks.items()}
    found |= {f"environ {name}": sys.intern(value) for name, value in os.environ.items()}
    found |= {f"finder {number} of modules": finder for number, finder in enumerate(sys.meta_path)}
    return found | {"stdout": sys.stdout, "stderr": sys.stderr}


def changed(before):
    """The names of what is not the identical object any more."""
    now = everything()
    return sorted(name for name in {*before, *now} if before.get(name) is not now.get(name))


def train(fails=False, again=0):
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.train()
        for (x,) in DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 2)), batch_size=4, shuffle=True):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        model.eval()
    if again:
        parwrap.distributed(train)(fails, again - 1)
    if fails:
        raise KeyError("on purpose")
    return model


def hooks_on(model):
    return [p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks]


def test_the_owners_of_all_patches_are_looked_at():
    patched = {patch.owner for patch in patches(EveryCall()) if isinstance(patch, Patch)}

    assert patched <= set(OWNERS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [0, 1, 2])
def test_after_return(again):
    train()
    before = everything()
    model = parwrap.distributed(train)(again=again)

    assert [] == changed(before)
    assert not hooks_on(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_after_local_steps_and_compressed_gradients(fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        parwrap.distributed(strategy="local_sgd", every=3, warmup=2, outer="nesterov", compress="bf16")(train)(fails)

    assert [] == changed(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [0, 2])
def test_after_an_exception(again):
    train()
    before = everything()
    with pytest.raises(KeyError):
        parwrap.distributed(train)(fails=True, again=again)

    assert [] == changed(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_mixed_precision(level, fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        model = parwrap.amp(level=level)(parwrap.distributed(train))(fails=fails)

        assert not hooks_on(model)
        assert not any(p._backward_hooks for p in model.parameters())

    assert [] == changed(before)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_after_sharding(fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        assert not hooks_on(parwrap.distributed(strategy="fsdp")(train)(fails=fails))

    assert [] == changed(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_after_accumulation(fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        assert not hooks_on(parwrap.distributed(parwrap.accumulate(3)(train))(fails=fails))

    assert [] == changed(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_after_parameter_servers(fails):
    train()
    before, default = everything(), dist.group.WORLD
    with contextlib.suppress(KeyError, RankMismatchError):
        assert not hooks_on(parwrap.distributed(strategy="parameter_server")(train)(fails=fails))

    assert [] == changed(before)
    assert dist.group.WORLD is default


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_after_uniform_length(fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        parwrap.distributed(parwrap.uniform_length(pad_value=0)(train))(fails=fails)

    assert [] == changed(before)


@pytest.mark.parametrize("fails", [False, True])
def test_after_data_parallel(fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        assert not hooks_on(parwrap.data_parallel(device_ids=["cpu"] * 2, gather=False)(parwrap.sync_bn(train))(fails=fails))

    assert [] == changed(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_after_hogwild(fails):
    train()
    before = everything()
    with contextlib.suppress(KeyError):
        assert not hooks_on(parwrap.distributed(strategy="hogwild", lock=True)(train)(fails=fails))

    assert [] == changed(before)


@pytest.mark.ranks(2)
def test_after_nested_blocks():
    train()
    before = everything()
    with parwrap.distributed():
        inside = everything()
        with parwrap.distributed(batch="global"):
            train()

            assert {"torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss"} == set(changed(inside))

        assert [] == changed(inside)

    assert [] == changed(before)
    assert {"torch.save", f"{__name__}.save"} <= set(changed(inside))


@pytest.mark.ranks(2)
def test_an_optimizer_class_of_the_users_own_keeps_its_step():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def train_with_own():
        parameter = nn.Parameter(torch.ones(1))
        optimizer = Own([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()

    train_with_own()
    before = Own.step
    parwrap.distributed(train_with_own)()

    assert before is Own.step


@pytest.mark.ranks(2)
def test_the_launch_variables_that_a_script_must_not_see():
    os.environ.update(RANK="0", WORLD_SIZE="2")
    before = everything()
    with parwrap.distributed.script_scope():
        assert "RANK" not in os.environ

    assert dict(os.environ).items() >= {"RANK": "0", "WORLD_SIZE": "2"}.items()
    assert not [name for name in changed(before) if "environ" not in name]


def test_one_rank_patches_only_print_and_what_shows_where_its_loaders_are():
    before = everything()
    with parwrap.distributed():
        during = changed(before)

    shown = {"DataLoader.__iter__", "DataLoader.__len__", "Module.train", "Optimizer.add_param_group", "torch.distributed.get_world_size"}
    stateful = {f"StatefulDataLoader.{name}" for name in ("__iter__", "state_dict", "load_state_dict")}
    assert {"builtins.print"} | shown | stateful == set(during)
    assert [] == changed(before)
