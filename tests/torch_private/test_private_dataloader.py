"""The private names of ``DataLoader`` that parwrap uses."""

import pytest
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from parwrap.torch_private import dataloader


def test_a_loader_keeps_the_iterator_of_persistent_workers():
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True)
    assert dataloader.kept_iterator(loader) is None
    iterator = iter(loader)
    assert iterator is dataloader.kept_iterator(loader)
    assert iterator is vars(loader)[dataloader.ITERATOR]
    vars(loader)[dataloader.ITERATOR] = None

    assert iterator is not iter(loader)


def test_a_loader_forgets_workers_of_another_process_without_ending_them():
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    (worker,) = iterator._workers
    dataloader.forget_workers(loader)
    assert iterator is dataloader.kept_iterator(loader)

    mine, worker._parent_pid = worker._parent_pid, 0
    dataloader.forget_workers(loader)
    worker._parent_pid = mine
    assert dataloader.kept_iterator(loader) is None
    with pytest.raises(ValueError, match="Cannot find worker information"):
        signal_handling._remove_worker_pids(id(iterator))
    iterator.__del__()
    assert worker.is_alive()
    iterator._shutdown = False  # and now it ends them
