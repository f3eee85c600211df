"""``@data_parallel``: one process trains on several devices, each with a part of every batch.

This file has the options, and decides what they mean on several ranks; ``strategies/data_parallel.py`` divides the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError, counted
from parwrap.intercept.torch_calls import intercepting
from parwrap.ranks.device import cuda_count
from parwrap.ranks.group import current, world_size
from parwrap.strategies.data_parallel import DataParallel, refuse_ranks

__all__ = ["data_parallel"]


class data_parallel(ScopeDecorator):
    """Run a plain ``model(x)`` on several devices of one process, each with a part of the batch.

    Write ``@data_parallel``, ``@data_parallel([0, 1])`` or ``with data_parallel():``. Inputs are cut along dimension 0, as by
    ``torch.nn.DataParallel``, and outputs are joined along it. Outputs, losses and gradients are those of one device, if samples do not
    depend on each other; ``sync_bn`` makes batch norms use the whole batch. A module counts as a model if it has parameters and is called
    from outside any other module. On several ranks it has no effect unless it names several devices, which is an error. Inside another
    ``data_parallel``, the inner one decides for its function or block, except that ``"all"`` has no effect with fewer than two GPUs. If it
    names a single device, nothing is divided there.

    Args:
        device_ids: GPU numbers or device names, such as ``[0, 1]`` or ``["cpu", "cpu"]``, or ``"all"``, which are the GPUs that torch
            sees. The model must be on the first. A device may be repeated. With a single device, and with ``"all"`` on a machine that has
            fewer than two GPUs, nothing is divided.
        gather: whether outputs are gathered on the first device. If not, they stay on their devices, look like whole tensors, and
            torch's losses are computed on the parts; any other operation gathers them when needed.
        loss: ``"mean"`` or ``"sum"``: how a loss that the model returns as a number combines the samples of a batch. Leave it out if the
            model returns no number.

    Raises:
        UsageError: an unknown option or value; several devices on several ranks. Inside the function: outputs that cannot be joined.

    >>> model, x = torch.nn.Linear(2, 1), torch.randn(5, 2)
    >>> @data_parallel(["cpu", "cpu"])
    ... def outputs():
    ...     return model(x)
    >>> torch.allclose(model(x), outputs())
    True
    """

    layer = 5

    def __init__(
        self,
        device_ids: Sequence[int | str | torch.device] | Literal["all"] = "all",
        *,
        gather: bool = True,
        loss: Literal["mean", "sum"] | None = None,
    ) -> None:
        if not isinstance(gather, bool):
            raise UsageError(
                f"gather={gather!r} is neither True, which gathers outputs on the first device, nor False, which leaves them on their "
                "devices."
            )
        if loss not in (None, "mean", "sum"):
            raise UsageError(
                f"loss={loss!r} is neither 'mean' nor 'sum'. loss= says whether a scalar that the model returns is the mean or the sum "
                "over the samples of its batch. Leave it out if the model returns no scalar."
            )
        self._named = None if device_ids == "all" else _devices(device_ids)
        self._gather, self._loss = gather, loss

    @contextmanager
    def scope(self, call: Call) -> Iterator[None]:
        gpus = cuda_count()
        if current() is not None and len(self._named or ()) > 1:
            raise refuse_ranks(self._named or (), world_size())
        for device in self._named or ():
            if device.type == "cuda" and (device.index or 0) >= gpus:
                raise UsageError(
                    f"parwrap.data_parallel names {device}, but torch sees {counted(gpus, 'GPU')} here: choose other devices, or name none "
                    "to use all GPUs."
                )
        if self._named is None and (current() is not None or gpus < 2):
            yield
            return
        devices = self._named or [torch.device("cuda", number) for number in range(gpus)]
        interceptor = DataParallel(devices, self._gather, self._loss, named=self._named is not None)
        with intercepting([interceptor], module_of(call.function)):
            yield


def _devices(device_ids: Any) -> tuple[torch.device, ...]:
    if not isinstance(device_ids, (list, tuple)) or not device_ids:
        raise UsageError(
            f"device_ids={device_ids!r} is not a list of devices: use GPU numbers or device names, such as [0, 1] or ['cpu', 'cpu'], or "
            "'all'."
        )
    devices = []
    for each in device_ids:
        try:
            if isinstance(each, bool):
                raise TypeError
            device = torch.device("cuda", each) if isinstance(each, int) else torch.device(each)
        except (RuntimeError, TypeError):
            raise UsageError(f"device_ids names {each!r}, which is not a device: use GPU numbers, 'cuda:0' or 'cpu'.") from None
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"device_ids names {each!r}, but parwrap.data_parallel runs on GPUs ('cuda:0' or its number) and on 'cpu'.")
        devices.append(torch.device("cpu") if device.type == "cpu" else torch.device("cuda", device.index or 0))
    if len({device.type for device in devices}) > 1:
        raise UsageError(
            f"device_ids={list(device_ids)!r} mixes the CPU with GPUs: parts of equal size would take far longer on the CPU. Name devices "
            "of one kind."
        )
    return tuple(devices)
