"""The base of all interceptors: it declares every call that can be intercepted, and checks each subclass when it is created.

``table.py`` maps each call to its patches. Each interceptor is in its own room.
"""

# mypy: disable-error-code="empty-body"
# The bodies here never run for a call, because only calls that a class overrides are patched.

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import logging

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from parwrap.intercept.backward import Backward
    from parwrap.intercept.clipping import Clip
    from parwrap.intercept.criterion import Criterion
    from parwrap.intercept.disk import Change, Opening
    from parwrap.intercept.norm import Norm
    from parwrap.intercept.scaler import ScalerCall

__all__ = ["CALLED_WITH", "DECLARED", "Interceptor", "intercepts"]

Method = TypeVar("Method", bound=Callable)

MARK = "__intercepts__"


def intercepts(method: Method) -> Method:
    """Mark a method that overrides a method of :class:`Interceptor`; an undeclared name is an error.

    >>> class Counter(Interceptor):
    ...     @intercepts
    ...     def backwards(self, call):
    ...         call.run()
    Traceback (most recent call last):
    TypeError: Counter.backwards is marked with @intercepts, but Interceptor declares no such call. Did you mean 'backward'?
    """
    setattr(method, MARK, True)
    return method


class Interceptor:
    """Intercepts the calls whose methods its class overrides; ``intercepting`` installs it.

    Each method documents when it is called and what it returns. ``original`` or ``run`` is what would run without this interceptor: torch's
    own call, or the next interceptor.

    Attributes:
        intercepted: the methods that the class overrides.
        traced_norm: with :meth:`norm`, the function that ``torch.compile`` compiles in place of ``batch_norm``.
    """

    intercepted: ClassVar[frozenset[str]] = frozenset()
    traced_norm: Callable | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the methods.

        Raises:
            TypeError: a method is marked with :func:`intercepts` but not declared here; or it overrides a declared one without the
                mark, with other parameters, or without the method that calls it.
        """
        super().__init_subclass__(**options)
        cls.intercepted = frozenset(name for name, declared in DECLARED.items() if getattr(cls, name) is not declared)
        unchecked = (base for base in cls.__mro__ if base is cls or not issubclass(base, Interceptor))
        for name in dict.fromkeys(name for base in unchecked for name in vars(base)):
            if name in cls.intercepted:
                _check(cls, name)
            elif getattr(getattr(cls, name, None), MARK, None) is True:
                close = difflib.get_close_matches(name, DECLARED, 1)
                hint = f"Did you mean {close[0]!r}?" if close else "parwrap/intercept/interceptor.py lists the calls."
                raise TypeError(f"{cls.__name__}.{name} is marked with @intercepts, but Interceptor declares no such call. {hint}")

    # data

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """``iter(loader)`` was called. Returns the iterator over its batches."""

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)`` was called. Returns the length."""

    def source(self, loader: DataLoader, name: str, source: Any) -> Any:
        """The script reads the attribute ``name`` of ``loader``, such as its dataset. Returns the attribute's value."""

    def loader_state(self, loader: DataLoader, original: Callable[[], dict]) -> dict:
        """``state_dict()`` of a stateful loader was called. Returns the state."""

    def load_loader_state(self, loader: DataLoader, original: Callable[[dict], None], state: Any) -> None:
        """``load_state_dict(state)`` of a stateful loader was called."""

    def shard_reader(self, operator: Any, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A reader of DALI is built with the arguments ``given``. Returns new arguments, or ``None`` for no change."""

    def build_pipeline(self, pipeline: Any, operators: Collection[Any], seed: int | None) -> tuple[int | None, int]:
        """A DALI pipeline is about to be built. Returns its seed and the size of its batches."""

    def make_iterator(self, pipelines: Collection[Any], size: int) -> int | None:
        """An iterator over ``pipelines`` is built with that ``size``. Returns the size of this rank's part, or ``None`` for no change."""

    def iterate_pipelines(self, loader: Any, original: Callable[[Any], Iterator]) -> Iterator:
        """``iter(loader)`` was called, with an iterator of DALI. Returns the iterator over its batches."""

    def length_of_pipelines(self, loader: Any, original: Callable[[Any], int]) -> int:
        """``len(loader)`` was called, with an iterator of DALI. Returns the length."""

    # forward and backward

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        """``module(*args, **kwargs)`` was called. Returns the output."""

    def norm(self, call: Norm) -> torch.Tensor:
        """``torch.nn.functional.batch_norm`` was called. Returns the output."""

    def criterion(self, call: Criterion) -> torch.Tensor | None:
        """``cross_entropy`` or ``nll_loss`` has computed a mean. Returns the factor for :meth:`criterion_grad`, if that is needed."""

    def criterion_grad(self, grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The backward pass has computed ``grad`` of a loss for which :meth:`criterion` returned ``factor``.

        Returns the gradient to pass on.
        """

    def backward(self, call: Backward) -> None:
        """``loss.backward()`` or ``torch.autograd.backward`` was called."""

    def grad(self, leaves: list[torch.Tensor]) -> None:
        """``torch.autograd.grad`` is about to compute the gradients of ``leaves``."""

    def retain_grad(self, tensor: torch.Tensor) -> None:
        """``tensor.retain_grad()`` was called on a tensor that is not a leaf."""

    def draw(self, library: str, name: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        """A random function of torch, numpy or python was called. Returns the draw."""

    def seeded(self) -> None:
        """``torch.manual_seed()`` was called and has seeded torch."""

    def restored(self) -> None:
        """``torch.set_rng_state()`` was called and has restored a state, as ``torch.random.fork_rng`` does at its end."""

    def call_sharded(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """An operation with a ``DTensor`` among its arguments was called. Returns its result."""

    def show_sharded(self, tensor: Any) -> str:
        """``repr()`` of a ``DTensor`` was called. Returns the text."""

    # precision

    def enter_autocast(self, instance: torch.autocast) -> None:
        """The script is about to enter its own autocast."""

    def scale_by_hand(self, scaler: torch.amp.GradScaler) -> None:
        """The script is about to scale a loss with a ``GradScaler``."""

    def use_scaler(self, call: ScalerCall) -> Any:
        """The script calls ``unscale_``, ``step`` or ``update`` of a ``GradScaler``. Returns the result of the call."""

    # modules

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """``module.train(training)`` or ``module.eval()`` has taken effect."""

    def move(self, module: nn.Module, apply: Callable[[], nn.Module]) -> nn.Module:
        """``module.to(...)`` is about to change the device or dtype of parameters. Calls ``apply``. Returns the module."""

    def module_state(self, module: nn.Module, state: Any) -> Any:
        """``module.state_dict()`` has returned ``state``. Returns the script's result."""

    def load_module_state(self, module: nn.Module, assign: bool) -> None:
        """``module.load_state_dict()`` is about to load."""

    def data_parallel(self, instance: nn.DataParallel, module: nn.Module, build: Callable[[Any], None]) -> None:
        """``nn.DataParallel(module)`` is built: call ``build`` with its devices."""

    # optimizers

    def take_parameters(self, parameters: Any) -> Any:
        """An optimizer is about to be built with ``parameters``. Returns the parameters to use instead."""

    def own_parameters(self, optimizer: Optimizer) -> None:
        """``optimizer`` has received a group of parameters: it is being built, or a group was added."""

    def clip(self, call: Clip) -> Any:
        """One of torch's functions that clip gradients was called. Returns its result."""

    def step(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` was called, and is about to run."""

    def stepped(self, optimizer: Optimizer) -> None:
        """``optimizer.step()`` has run without raising."""

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``optimizer.step(closure)`` was called. Returns the closure to use."""

    def skips(self, optimizer: Optimizer) -> bool:
        """``optimizer.step()`` is about to run. Returns whether to skip it."""

    def refuse_closure(self) -> None:
        """A step with a closure is about to run, before :meth:`skips`: raise an error if it cannot be skipped."""

    def takes_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to take a step that is not skipped."""

    def took_step(self, optimizer: Optimizer) -> None:
        """``optimizer`` has taken a step that is not skipped."""

    def optimizer_state(self, optimizer: Optimizer, save: Callable[[], Any]) -> Any:
        """``optimizer.state_dict()`` was called, which ``save`` does. Returns the state."""

    def load_optimizer_state(self, optimizer: Optimizer, load: Callable[[Any], None], state: Any) -> None:
        """``optimizer.load_state_dict(state)`` was called, which ``load`` does."""

    def metric(self, metric: Any) -> Any:
        """``ReduceLROnPlateau.step(metric)`` was called. Returns the metric that the scheduler uses."""

    def update_metric(self, metric: Any) -> None:
        """A metric of torchmetrics is about to be updated."""

    def share_states(self, members: Sequence[Any]) -> None:
        """A ``MetricCollection`` is about to compute: only the first of ``members`` was updated, for all of them."""

    def syncs_metric(self, metric: Any) -> bool:
        """A metric of torchmetrics is about to compute. Returns whether its states are summed over the ranks."""

    # files

    def save(self, file: Any, write: Callable[[Any], Any]) -> Any:
        """``torch.save(..., file)`` or similar was called: call ``write`` with the path or file to write. Returns the result of that."""

    def saved(self, thing: Any) -> Any:
        """``torch.save(thing, ...)`` was called. Returns the object to save."""

    def load(self, location: Any, read: Callable[[Any], Any]) -> Any:
        """``torch.load(..., map_location=location)`` was called. Returns the result of ``read``, given a location."""

    def open(self, call: Opening) -> Any:
        """``open`` was called. Returns the open file."""

    def open_descriptor(self, original: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open`` was called. Returns the descriptor."""

    def close_descriptor(self, original: Callable, descriptor: int) -> None:
        """``os.close`` was called."""

    def change(self, change: Change) -> Any:
        """A function that creates, removes or moves paths was called. Returns its result."""

    def attribute(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """The function ``name`` of ``os``, which changes attributes of ``path``, was called. Returns its result."""

    def look(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """The function ``name`` of ``os``, which inspects ``path``, was called. Returns its result."""

    def listing(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.listdir`` or ``os.scandir`` was called. Returns its result."""

    def temporary_name(self, name: str) -> str:
        """``tempfile`` has drawn the random ``name``. Returns the name to use."""

    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any:
        """Native code is about to read a file. Returns what ``read`` returns, given a path. :meth:`save` is called for checkpoints too."""

    def write_native(self, path: Any, write: Callable[[Any], Any]) -> Any:
        """Native code is about to write a whole file. Returns what ``write`` returns, given a path."""

    def update_native(self, path: Any, update: Callable[[Any], Any]) -> Any:
        """Native code is about to open a file that it reads and writes. Returns what ``update`` returns, given a path."""

    def open_native(self, path: Any, mode: str, open_at: Callable[[Any, Callable[[], None] | None], Any]) -> Any:
        """Native code is about to open a file. Returns the result of ``open_at``, given a path and a function to call when it is closed."""

    # output and processes

    def speak(self, say: Callable[..., None], *, file: Any, force: bool) -> None:
        """``print(..., file=file, force=force)`` was called; ``say`` prints."""

    def log(self, record: logging.LogRecord, handle: Callable[[], None]) -> None:
        """A logger is about to handle ``record``; ``handle`` does it."""

    def points_to(self, caller: FrameType, stacklevel: int) -> int:
        """``warnings.warn`` was called. Returns the ``stacklevel``, counted from ``caller``."""

    def show_warning(self, show: Callable[[], None]) -> None:
        """A warning is about to be shown; ``show`` does it."""

    def run_command(self, command: Any) -> None:
        """``subprocess`` or ``os.system`` is about to run ``command``."""

    def world_size_asked(self) -> None:
        """``torch.distributed.get_world_size()`` was called."""

    def hides_group(self, frame: FrameType) -> bool:
        """A function of ``torch.distributed`` asks for the process group. Returns whether to hide it from ``frame``, its caller."""

    def foreign(self, what: str, instance: Any) -> None:
        """The script is about to distribute itself, with ``init_process_group`` or with a ``DistributedDataParallel``, the ``instance``."""


DECLARED = {name: each for name, each in vars(Interceptor).items() if isinstance(each, FunctionType) and not name.startswith("_")}
"""Every call that can be intercepted."""

CALLED_WITH = {
    "criterion_grad": "criterion",
    "refuse_closure": "skips",
    "write_native": "read_native",
    "update_native": "read_native",
    "open_native": "read_native",
}
"""Methods without patches, and the method whose patches call them."""


def _check(cls: type[Interceptor], name: str) -> None:
    method, declared = getattr(cls, name), DECLARED[name]
    if getattr(method, MARK, None) is not True:
        raise TypeError(f"{cls.__name__}.{name} overrides a method of Interceptor: mark it with @intercepts, or give it another name.")
    if not _takes(method, declared):
        raise TypeError(f"{cls.__name__}.{name}{_shown(method)} cannot be called as Interceptor declares it: {name}{_shown(declared)}.")
    if CALLED_WITH.get(name, name) not in cls.intercepted:
        raise TypeError(f"{cls.__name__}.{name} is only called where {CALLED_WITH[name]} is intercepted: override that too.")


def _takes(method: Callable, declared: Callable) -> bool:
    """Whether ``method`` accepts the arguments of ``declared``, both all of them and only the required ones."""
    signature, parameters = inspect.signature(method), inspect.signature(declared).parameters.values()
    for given in (parameters, [each for each in parameters if each.default is each.empty]):
        by_position = [each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
        by_name = {each.name: each.name for each in given if each.kind is each.KEYWORD_ONLY}
        try:
            signature.bind(*by_position, **by_name)
        except TypeError:
            return False
    return True


def _shown(method: Callable) -> str:
    signature = inspect.signature(method)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
