"""``@data_parallel``: one process trains on several devices, each with a part of every batch.

This file has the options, and decides what they mean on several ranks; ``strategies/data_parallel/`` divides the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from parwrap.errors import UsageError
from parwrap.group.group import current, world_size
from parwrap.session.feature_scope import FeatureDecorator
from parwrap.strategies.data_parallel.data_parallel import DataParallel, refuse_ranks

__all__ = ["data_parallel"]


class data_parallel(FeatureDecorator):
    """Run a plain ``model(x)`` on several devices of one process, each with a part of the batch.

    Write ``@data_parallel``, ``@data_parallel(gather=False)`` or ``with data_parallel():``. The first dimension of all inputs and outputs
    of a model must be the batch. Gradients equal those of one device. To check this, some calls are computed both ways on copies of the
    model. If the parts of a batch do not give the result of the whole batch, the model runs only on the first device, with a warning. A
    module counts as a model if it has parameters and is called from outside any other module. On several ranks with one device each, it has
    no effect.

    Args:
        device_ids: GPU numbers or device names, such as ``[0, 1]`` or ``["cpu", "cpu"]``; by default all GPUs that torch sees. The model
            must be on the first. A device may be repeated. With a single one, or none, nothing is divided.
        gather: whether outputs are gathered on the first device. If not, they stay on their devices, look like whole tensors, and
            torch's losses are computed on the parts; any other operation gathers them when needed.
        loss: ``"mean"`` or ``"sum"``: how a loss that the model returns as a number combines the samples of a batch. Without this option, a
            model that returns a number runs only on the first device.

    Raises:
        UsageError: an unknown option or value; several devices on several ranks.

    >>> model, x = torch.nn.Linear(2, 1), torch.randn(5, 2)
    >>> @data_parallel(device_ids=["cpu", "cpu"])
    ... def outputs():
    ...     return model(x)
    >>> torch.allclose(model(x), outputs())
    True
    """

    layer = 5

    def __init__(
        self, *, device_ids: Sequence[int | str | torch.device] | None = None, gather: bool = True, loss: str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(gather, bool):
            raise UsageError(
                f"gather={gather!r} is neither True, which gathers outputs on the first device, nor False, which leaves them on their "
                "devices."
            )
        if loss not in (None, "mean", "sum"):
            raise UsageError(f"loss={loss!r} is not 'mean' or 'sum': it says how a number that the model returns combines the samples.")
        self._device_ids = None if device_ids is None else _devices(device_ids)
        self._gather, self._loss = gather, loss

    def asked(self) -> tuple[Any, ...] | None:
        asked = self._device_ids, self._gather, self._loss
        return None if asked == (None, True, None) else asked

    def described(self) -> str:
        return "data_parallel has no effect with one device per rank"

    def interceptor(self) -> DataParallel:
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        return DataParallel(self._device_ids or devices, self._gather, self._loss, self._device_ids is not None)

    def opened(self, module: str | None) -> AbstractContextManager[Any]:
        if current() is not None and len(self._device_ids or ()) > 1:
            refuse_ranks(self._device_ids or (), world_size())
        gpus = torch.cuda.device_count()
        for device in self._device_ids or ():
            if device.type == "cuda" and (device.index or 0) >= gpus:
                raise UsageError(
                    f"device_ids names {device}, but torch sees {gpus} GPUs here: choose others, or remove device_ids to use all of them."
                )
        if self._device_ids is None and (current() is not None or gpus < 2):
            return nullcontext()
        return super().opened(module)


def _devices(device_ids: Any) -> tuple[torch.device, ...]:
    if not isinstance(device_ids, (list, tuple)) or not device_ids:
        raise UsageError(
            f"device_ids={device_ids!r} is not a list of devices: use GPU numbers or device names, such as [0, 1] or ['cpu', 'cpu']."
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
        raise UsageError(f"device_ids={list(device_ids)!r} mixes the CPU with GPUs: parts of equal size would take far longer on the CPU.")
    return tuple(devices)
