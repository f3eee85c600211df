"""Which samples of which loader a rank gets to see, and batches of samples that differ in length.

It may import the loop, the process group and interceptors. Start with ``loaders.py``, which intercepts the loaders; ``evaluation/`` is for
exact evaluation and ``lengths/`` for batches by length.

The public names; each is imported when it is first used, since what only shares out loaders needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parwrap.data.lengths.bucketing import UniformLengthBatchSampler
    from parwrap.data.lengths.padding import pad_collate

_HOME_OF = {"UniformLengthBatchSampler": "parwrap.data.lengths.bucketing", "pad_collate": "parwrap.data.lengths.padding"}

__all__ = ["UniformLengthBatchSampler", "pad_collate"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'parwrap.data' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
