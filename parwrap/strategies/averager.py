"""One set of parameters whose gradients are averaged while a backward runs: torch's DDP, armed by hand.

``DistributedDataParallel`` gets a holder of the parameters instead of the user's model, and its forward, which arms the
reducer, is called just before the real backward; torch's hooks then average and overlap as usual. Which parameters belong
to which backward is decided by ``ddp.py``.

The holder has one parameter of its own, the *signal*. Its product with a flag for each parameter that this rank's loss
reaches is one more root of the same backward, so that the flags become its gradient, travel within the buckets and cost no
collective of their own. The root is a scalar because torch imports sympy to check an explicit gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parwrap.strategies.graph import reached
from parwrap.verbs.backward import Backward

__all__ = ["Averager", "Reducer"]

LOOKED = 0.0
"""The last flag of a rank that has looked at its graph, so that its other flags are exact; of the others it is 1, as all their flags."""


class Reducer(DistributedDataParallel):
    """parwrap's own use of DDP, to be told from the user's."""


class _Holder(nn.Module):
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # register_parameter takes nothing but nn.Parameter, and a hand-written SGD has bare tensors
        self._parameters.update({str(index): parameter for index, parameter in enumerate(parameters)})  # type: ignore[misc]

    def forward(self) -> None:
        """DDP arms its reducer around this call."""


class _Touch(torch.autograd.Function):
    """Makes parameters take part in a backward with no gradient of their own."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * ctx.count


class Averager:
    """Averages the gradients of ``parameters`` over the ranks in each backward that it is told to run.

    Args:
        parameters: the leaf tensors, in the order in which the forward uses them; the same on every rank.
        varies: whether backwards are known to reach only some of the parameters now and then.
        options: for ``DistributedDataParallel``, such as ``bucket_cap_mb``.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], varies: bool, **options: Any) -> None:
        self.parameters = tuple(parameters)
        self.ids = frozenset(id(p) for p in self.parameters)
        self._varies = varies
        # of the last parameter's dtype if that can be, since its bucket goes first and so does the signal
        last = self.parameters[-1]
        dtype = last.dtype if last.dtype.is_floating_point else torch.float32
        self._signal = nn.Parameter(torch.zeros(len(self.parameters) + 1, dtype=dtype, device=last.device))
        self._ddp = Reducer(_Holder((*self.parameters, self._signal)), init_sync=False, **options)

    def run(self, call: Backward) -> bool:
        """Run the backward ``call`` and leave the averages in ``.grad``.

        Returns:
            Whether the set still fits: false once a parameter of it is frozen, or others are reached instead.
        """
        self._signal.grad = None
        self._arm()
        call.with_root(self._root(call), self._signal).run()
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError:
            return self._complete(call)
        return True

    def _root(self, call: Backward) -> torch.Tensor:
        """A scalar whose gradient for the signal is the flags; new for each backward, since autograd takes the newest nodes first
        and no bucket is sent before that of the signal."""
        with torch.enable_grad():
            if not self._varies:
                return self._signal.sum()
            leaves = {id(leaf) for leaf in reached(call.beginnings)}
            return torch.dot(self._signal, self._signal.new_tensor([*(id(p) in leaves for p in self.parameters), LOOKED]))

    def _arm(self) -> None:
        """Have the reducer expect every parameter in the next backward."""
        if self._ddp._has_rebuilt_buckets:
            # all that is left of DDP's forward then, and 40 us less
            self._ddp.reducer.prepare_for_forward()
            self._ddp.reducer.prepare_for_backward([])
        else:
            with torch.enable_grad():
                self._ddp()

    def _complete(self, call: Backward) -> bool:
        """This rank's loss did not reach every parameter: let the rest take part too, so that nobody waits for them."""
        self._varies = True
        leaves = {id(leaf): leaf for leaf in reached(call.beginnings)}
        missing = [(index, p) for index, p in enumerate(self.parameters) if id(p) not in leaves]
        frozen = [p for _, p in missing if not p.requires_grad]
        without = [(index, p) for index, p in missing if p.grad is None]
        for p in frozen:
            p.requires_grad_(True)
        with torch.enable_grad():
            call.original(_Touch.apply(*(p for _, p in missing)))
        for p in frozen:
            p.requires_grad_(False)
        *used, not_looked = self._signal.grad.tolist()  # type: ignore[union-attr]
        for index, p in without:
            # flags of a rank that had not looked claim too much; then an average of nothing but zeros tells, the same on all ranks
            if not (p.grad.any() if not_looked else used[index]):  # type: ignore[union-attr]
                p.grad = None
        return not frozen and not any(isinstance(leaf, nn.Parameter) and key not in self.ids for key, leaf in leaves.items())
