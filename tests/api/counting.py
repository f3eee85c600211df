"""A training that counts its steps in the weights."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def counted(model, optimizer, samples):
    """A training step for each of ``samples``, which takes 1 from the weights."""
    for rows in DataLoader(TensorDataset(torch.arange(samples)), batch_size=1):
        optimizer.zero_grad()
        (model.weight.sum() + 0 * rows[0].sum()).backward()
        optimizer.step()


def zeros():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model
