"""The private names of ``DataLoader`` that parwrap uses."""

from torch.utils.data import DataLoader

from parwrap.torch_private import dataloader


def test_a_loader_keeps_the_iterator_of_persistent_workers():
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True)
    assert dataloader.kept_iterator(loader) is None
    iterator = iter(loader)
    assert iterator is dataloader.kept_iterator(loader)
    assert iterator is vars(loader)[dataloader.ITERATOR]
    vars(loader)[dataloader.ITERATOR] = None

    assert iterator is not iter(loader)
