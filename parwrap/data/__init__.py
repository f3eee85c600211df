"""Which samples of which loader a rank sees, and batches of samples that differ in length.

It may import the loop, the process group and interceptors. Start with ``loaders.py``, which intercepts the loaders; ``evaluation/`` is for
exact evaluation and ``lengths/`` for batches by length.

::

    loaders.py               a pass over a loader: does it train, which batches, what when it ends
    pass_history.py          guesses what the next pass over a loader is for
    training_share.py        this rank's share of a training pass; resumed_pass.py: of one that continues from a checkpoint
    sharing_options.py       the options that say how training data is split
    samplers.py              the samplers of that share: batch=, uneven=; own_sampler.py: your own DistributedSampler
    passes.py                an iterator over batches that reports each draw and the end of the pass
    loader_position.py       the position of a loader in its passes, for checkpoints; known_positions.py: of all loaders
    sampler_state.py         the state that determines a loader's order
    first_batch.py           revises the guess at the first batch; next(iter(loader))
    end_of_share.py          ... and at the end of the share, if nothing was trained
    looking.py               a pass that continues with what this rank has not read; unread.py: which samples these are
    open_doubts.py           a finished pass that a later backward may train on
    unexpected_training.py   training on a loader that was read whole
    early_lengths.py         len(loader) before the first pass; reported_lengths.py: in an evaluation
    dropped_gradients.py     gradients that are read without a step
    running_numbers.py       one rank's numbers that a script takes for those of all
    evaluation_blocks.py     which batches of an evaluation each rank reads
    iterables.py, dali.py    streams, and NVIDIA DALI
    dataset_agreement.py     checks that all ranks hold the same samples; dataset_summaries.py: how

The public names; each is imported on first use, since splitting loaders needs none of them.
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
