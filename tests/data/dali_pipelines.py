"""DALI pipelines that read small files of numbers, and a model to train on them."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import parwrap

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed: pip install nvidia-dali-cuda120")

from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

CPU = {"num_threads": 1, "device_id": None}
FILL, DROP, PARTIAL = LastBatchPolicy.FILL, LastBatchPolicy.DROP, LastBatchPolicy.PARTIAL


def written(count):
    """Files that hold a number each, in a directory of this rank."""
    folder = Path(tempfile.mkdtemp())
    for number in range(count):
        np.save(folder / f"{number:03}.npy", np.array([number], dtype=np.float32))
    return [str(folder / f"{number:03}.npy") for number in range(count)]


def numbers(files, batch_size=2, seed=None, **options):
    @pipeline_def(batch_size=batch_size, seed=seed, **CPU)
    def pipeline():
        return fn.readers.numpy(files=files, name="numbers", **options)

    return pipeline()


def iterator(pipeline, policy=PARTIAL, **options):
    options = options or {"reader_name": "numbers"}
    return DALIGenericIterator(pipeline, ["x"], last_batch_policy=policy, auto_reset=True, **options)


class Setup:
    """A model and optimizer, so that there is something to train."""

    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def train(self, iterator, name="x"):
        """The batches of a training pass."""
        seen = []
        for (batch,) in iterator:
            self.optimizer.zero_grad()
            self.model(batch[name].float().view(-1, 1)).mean().backward()
            self.optimizer.step()
            seen.append(batch[name].flatten().tolist())
        return seen


def read(iterator):
    return [batch["x"].flatten().tolist() for (batch,) in iterator]


def flat(batches):
    return [number for batch in batches for number in batch]


def everyones(batches):
    return sorted(number for each in parwrap.gather(flat(batches)) for number in each)
