"""The private names of torch's global state that parwrap uses."""

import sys

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parwrap.torch_private import process_state


def test_global_hooks_are_seen():
    before = process_state.global_hooks()
    registrations = (register_module_forward_hook, register_module_full_backward_hook, register_optimizer_step_post_hook)
    handles = [register(print) for register in registrations]
    try:
        changed = {kind for kind, hooks in process_state.global_hooks().items() if hooks != before[kind]}
    finally:
        for handle in handles:
            handle.remove()

    assert {"forward_hooks", "backward_hooks", "optimizer_post_hooks"} == changed
    assert before == process_state.global_hooks()


def test_open_process_groups_are_seen(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it
    assert set() == process_state.open_process_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (first,) = process_state.open_process_groups()
        other = dist.new_group([0])
        assert {first, other.group_name} == process_state.open_process_groups()
    finally:
        dist.destroy_process_group()

    assert set() == process_state.open_process_groups()


def test_active_modes_are_seen():
    function, dispatch = TorchFunctionMode(), TorchDispatchMode()
    assert [] == process_state.active_modes()
    with function, dispatch:
        assert [function, dispatch] == process_state.active_modes()
    with torch.device("meta"):
        assert 1 == len(process_state.active_modes())

    assert [] == process_state.active_modes()


def test_the_default_device_is_known_also_after_it_was_put_back():
    torch.set_default_device("meta")
    try:
        assert torch.device("meta") == process_state.default_device()
    finally:
        torch.set_default_device(None)

    assert torch.device("cpu") == process_state.default_device()
