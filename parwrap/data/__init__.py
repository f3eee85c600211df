"""Which samples of which loader a rank gets to see, and batches of samples that differ in length.

The public names; each is imported when it is first used, since what only shares out loaders needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parwrap.data.bucketing import UniformLengthBatchSampler
    from parwrap.data.padding import pad_collate

_HOME_OF = {"UniformLengthBatchSampler": "parwrap.data.bucketing", "pad_collate": "parwrap.data.padding"}

__all__ = ["UniformLengthBatchSampler", "pad_collate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'parwrap.data' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
