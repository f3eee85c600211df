"""One file for each call that is intercepted; each only forwards it to a method of an interceptor.

It may import the loop and all below. Start with ``backward.py``, a small one.

``VERBS`` maps the actor's method to the file that calls it, so an actor says what it takes part in by having the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

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
    sharded,
    skipping,
    source,
    stepping,
    torchmetrics,
)
from parwrap.patching.patch import Patch, installed

__all__ = ["VERBS", "acting", "patches"]

VERBS: dict[str, Callable[[Any], Sequence[Patch | AbstractContextManager]]] = {
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


def patches(actor: Any) -> list[Patch | AbstractContextManager]:
    """What to install so that ``actor`` acts: the patches of each verb that it has a method for.

    >>> patches(object())
    []
    """
    return [patch for verb, of in VERBS.items() if hasattr(actor, verb) for patch in of(actor)]


def acting(actors: Iterable[Any], module: str | None = None) -> AbstractContextManager:
    """While this is held, ``actors`` act: around those that did before, for a function of ``module``."""
    return installed([patch for actor in actors for patch in patches(actor)], module)
