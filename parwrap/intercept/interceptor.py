"""The base of all interceptors: every call of torch that a room may intercept, one method a call.

``torch_calls.py`` says how each call is patched. A subclass overrides the methods of the calls it intercepts; only those are patched.
``original`` is what would run without this interceptor: torch's own function, or the next interceptor.
"""

# mypy: disable-error-code="empty-body"
# The bodies here never run for a call, because only calls that a class overrides are patched.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from parwrap.intercept.intercepted_calls import Backward, Clip, Criterion, Norm, ScalerCall

__all__ = ["Interceptor"]


class Interceptor:
    """Intercepts the calls whose methods its class overrides; :func:`parwrap.intercept.torch_calls.intercepting` installs it."""

    # data

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """``iter(loader)`` was called. Returns the iterator over its batches."""

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)`` was called. Returns the length."""

    def starts_thread(self, thread: threading.Thread) -> None:
        """``thread.start()`` was called; the thread does not run yet."""

    # losses and gradients

    def backward(self, call: Backward) -> None:
        """``loss.backward()`` or ``torch.autograd.backward(losses)`` was called."""

    def criterion(self, loss: torch.Tensor, mean: Callable[[], Criterion | None]) -> torch.Tensor:
        """``cross_entropy`` or ``nll_loss`` has returned ``loss``. Returns the loss that the script gets.

        ``mean()`` describes ``loss``, or returns ``None`` if it is no mean over targets that are classes.
        """

    def weighs_criterions(self) -> bool:
        """Whether :meth:`criterion` changes losses, so that ``torch.compile`` must not put them into graphs; asked once, when installed."""

    def scaled(self, loss: Any, scale: torch.Tensor, result: Any) -> None:
        """``GradScaler.scale(loss)`` has returned ``result``, the loss times ``scale``."""

    def divided(self, loss: torch.Tensor, divisor: float, result: torch.Tensor) -> None:
        """The script has divided ``loss``, a scalar that requires grad, by a number to get ``result``."""

    def use_scaler(self, call: ScalerCall) -> Any:
        """The script has called ``unscale_``, ``step`` or ``update`` of a ``GradScaler``. Returns the result."""

    def graph_bucket(self) -> int | None:
        """``torch.compile`` compiles a graph. Returns after how many bytes of parameters to split it, ``None`` to leave it whole."""

    def retain_grad(self, tensor: torch.Tensor) -> None:
        """``tensor.retain_grad()`` was called; ``tensor`` is not a leaf."""

    def enter_autocast(self, instance: torch.autocast) -> None:
        """The script is about to enter ``instance``."""

    def clip(self, clip: Clip) -> Any:
        """``clip_grad_norm_`` or a similar function was called. Returns its result."""

    # layers

    traced_norm: Callable[..., torch.Tensor]
    """What ``torch.compile`` compiles in place of ``torch.nn.functional.batch_norm``, for a class that overrides :meth:`norm`."""

    def norm(self, call: Norm) -> torch.Tensor:
        """``torch.nn.functional.batch_norm`` was called. Returns the output."""

    # modules and parameters

    def made(self, parameter: nn.Parameter) -> None:
        """An ``nn.Parameter`` was made, also as a copy of another."""

    def infer_parameters(self, infer: Callable[[], None]) -> None:
        """The first forward of a lazy module is about to make its parameters: call ``infer``."""

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """``module.train(training)`` or ``module.eval()`` was called by the script and has taken effect."""

    def copied_module(self, module: nn.Module) -> None:
        """``module`` was copied or unpickled; its children, if any, are copied in turn."""

    def moves(self, module: nn.Module) -> None:
        """``module.to(...)``, ``.double()`` or similar is about to replace tensors of parameters."""

    def moved(self, module: nn.Module) -> None:
        """``module.to(...)``, ``.double()`` or similar has replaced tensors of parameters."""

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        """``module(*args, **kwargs)`` was called. Returns its outputs."""

    def data_parallel(self, module: nn.Module, build: Callable[[Any], None]) -> None:
        """``nn.DataParallel(module)`` is about to be built: call ``build`` with the devices to use."""

    def use_sharded(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """``func(*args, **kwargs)`` was called, which has a ``DTensor`` among its arguments. Returns the result."""

    def saved(self, thing: Any) -> Any:
        """``torch.save(thing, ...)`` was called. Returns what is saved."""

    # optimizers

    def built(self, optimizer: Optimizer) -> None:
        """``optimizer`` has received a group of parameters: it is being built, or a group was added."""

    def copied(self, optimizer: Optimizer) -> None:
        """``optimizer`` has received the state of another: it was copied or unpickled, or a state dict was loaded."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """``optimizer.zero_grad()`` was called."""

    def step(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` is about to run."""

    def stepped(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` has run without raising."""

    def left_out(self, optimizer: Optimizer) -> None:
        """A loss scale, parwrap's or the script's, has left out a step of ``optimizer``, because gradients on this rank are not finite."""

    def optimizer_state(self, optimizer: Optimizer, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """``optimizer.state_dict()`` was called. Returns the state."""

    def load_optimizer_state(self, optimizer: Optimizer, original: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """``optimizer.load_state_dict(state)`` was called: call ``original`` with the state to load."""

    def skips(self, optimizer: Optimizer) -> bool:
        """``optimizer.step()`` was called without a closure. Returns whether to skip it."""

    def leaves_out(self, optimizer: Optimizer) -> bool:
        """Like :meth:`skips`, for a step that is left out because gradients are not finite."""

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``optimizer.step(closure)`` was called. Returns the closure to call."""

    def metric(self, metric: Any) -> Any:
        """``ReduceLROnPlateau.step(metric)`` was called. Returns the metric that the scheduler uses."""

    # metrics

    def update_metric(self, metric: Any, update: Callable[[], Any]) -> Any:
        """A metric of torchmetrics is about to be updated: call ``update`` and return its result."""

    def share_states(self, members: Sequence[Any]) -> None:
        """``members`` of a collection of metrics are about to compute: the first was updated for all of them."""

    def syncs_metric(self, metric: Any) -> bool:
        """A metric is about to compute. Returns whether its states are summed over the ranks."""

    # random numbers

    def seeded(self, library: str) -> None:
        """The script has seeded ``library``: ``"torch"``, ``"numpy"`` or ``"python"``."""

    def restored(self) -> None:
        """``torch.set_rng_state`` was called and has taken effect."""

    def fresh_seed(self, library: str, bits: int) -> int | None:
        """A generator of ``library`` seeds itself from the system. Returns as many random ``bits``, or ``None`` for the system's."""

    def draws_own(self, library: str) -> bool:
        """Whether ``library`` draws from this rank's own streams now: a seed from the system is then for these alone."""

    # process groups

    def hides_group(self, frame: FrameType) -> bool:
        """A function of ``torch.distributed`` asks for the process group. Returns whether to hide it from ``frame``, its caller."""

    def distributes_itself(self, what: str) -> None:
        """The script is about to call ``what``: ``init_process_group`` or ``DistributedDataParallel``."""
