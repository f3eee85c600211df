"""Samples of varying length."""

import torch
from torch import nn
from torch.utils.data import Dataset

LONGEST = 40


def lengths_of(samples):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 9, (samples,), generator=generator).square().clamp(max=LONGEST)


class Texts(Dataset):
    """Sequences whose first number is their own index, from 1 on."""

    def __init__(self, samples=50, pad_to=None):
        self.lengths, self.pad_to, self.read = lengths_of(samples).tolist(), pad_to, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        self.read += 1
        text = torch.full((self.lengths[i],), 9)
        text[0] = i + 1
        if self.pad_to:
            text = nn.functional.pad(text, (0, self.pad_to - len(text)))
        return text, i % 2


def seen(loader):
    """The indices of the samples of each batch, with the width of the batch."""
    return [((texts[:, 0] - 1).tolist(), texts.shape[1]) for texts, _ in loader]
