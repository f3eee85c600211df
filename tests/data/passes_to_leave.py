"""Loaders of all kinds, and passes that are left early and continued."""

from torch.utils.data import DataLoader, IterableDataset

import trained_on

SAMPLES = 46


class Setup(trained_on.Setup):
    """A model and optimizer, to train and to evaluate now and then."""

    def evaluate(self):
        """In the midst of a pass, and drawing on the streams that are the same on all ranks."""
        self.model.eval()
        list(DataLoader(range(3), shuffle=True))
        self.model.train()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SAMPLES))
