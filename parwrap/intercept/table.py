"""The table of calls that can be intercepted, each with the function that creates its patches. It also installs interceptors.

The file of each call defines what it passes to an interceptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from parwrap.intercept import (
    autocast,
    backward,
    calling,
    clipping,
    command,
    criterion,
    dali,
    data_parallel,
    disk,
    draw,
    files,
    foreign,
    grad,
    loader,
    mode,
    module_state,
    moving,
    native,
    norm,
    optimizer,
    optimizer_state,
    output,
    ranks,
    retaining,
    scaler,
    schedule,
    seeding,
    sharded,
    skipping,
    source,
    stepping,
    torchmetrics,
)
from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, installed

__all__ = ["PATCH_MAKERS", "intercepting", "patches"]

PATCH_MAKERS: dict[str, Callable[[Interceptor], Sequence[Patch | AbstractContextManager]]] = {
    "load": files.load_patches,
    "world_size_asked": ranks.patches,
    "hides_group": ranks.hiding_patches,
    "iterate": loader.iterate_patches,
    "length": loader.length_patches,
    "source": source.patches,
    "shard_reader": dali.shard_patches,
    "build_pipeline": dali.build_patches,
    "make_iterator": dali.iterator_patches,
    "iterate_pipelines": dali.iterate_patches,
    "length_of_pipelines": dali.length_patches,
    "loader_state": loader.state_patches,
    "load_loader_state": loader.load_state_patches,
    "backward": backward.patches,
    "take_parameters": optimizer.take_parameters_patches,
    "own_parameters": optimizer.own_parameters_patches,
    "closure": optimizer.closure_patches,
    "step": optimizer.step_patches,
    "stepped": optimizer.stepped_patches,
    "skips": skipping.patches,
    "takes_step": stepping.takes_patches,
    "took_step": stepping.took_patches,
    "optimizer_state": optimizer_state.save_patches,
    "load_optimizer_state": optimizer_state.load_patches,
    "module_state": module_state.save_patches,
    "load_module_state": module_state.load_patches,
    "call_sharded": sharded.call_patches,
    "show_sharded": sharded.show_patches,
    "retain_grad": retaining.patches,
    "enter_autocast": autocast.autocast_patches,
    "scale_by_hand": autocast.scaler_patches,
    "use_scaler": scaler.patches,
    "call": calling.patches,
    "draw": draw.patches,
    "seeded": seeding.seeded_patches,
    "restored": seeding.restored_patches,
    "clip": clipping.patches,
    "criterion": criterion.patches,
    "grad": grad.patches,
    "data_parallel": data_parallel.patches,
    "set_mode": mode.patches,
    "move": moving.patches,
    "norm": norm.patches,
    "metric": schedule.patches,
    "save": files.save_patches,
    "saved": files.saved_patches,
    "open": disk.open_patches,
    "open_descriptor": disk.open_descriptor_patches,
    "close_descriptor": disk.close_descriptor_patches,
    "change": disk.change_patches,
    "attribute": disk.attribute_patches,
    "look": disk.look_patches,
    "listing": disk.listing_patches,
    "temporary_name": disk.temporary_name_patches,
    "read_native": native.patches,
    "run_command": command.patches,
    "speak": output.speak_patches,
    "log": output.log_patches,
    "points_to": output.stacklevel_patches,
    "show_warning": output.warning_patches,
    "update_metric": torchmetrics.update_patches,
    "syncs_metric": torchmetrics.sync_patches,
    "share_states": torchmetrics.collection_patches,
    "foreign": foreign.patches,
}
"""The functions that create patches, by the name of the method of ``Interceptor``."""


def patches(interceptor: Interceptor) -> list[Patch | AbstractContextManager]:
    """The patches of each call that the class of ``interceptor`` overrides.

    >>> patches(Interceptor())
    []
    """
    return [patch for call, make in PATCH_MAKERS.items() if call in interceptor.intercepted for patch in make(interceptor)]


def intercepting(interceptors: Iterable[Interceptor], module: str | None = None) -> AbstractContextManager:
    """Install ``interceptors`` inside the block, around those that are already installed, for a function of ``module``."""
    return installed([patch for interceptor in interceptors for patch in patches(interceptor)], module)
