"""The private names of ``DataLoader`` that parwrap uses."""

import multiprocessing

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from parwrap.torch_private import dataloader


def test_iterators_are_of_these_types():
    alone, workers = iter(DataLoader([0])), iter(DataLoader([0], num_workers=1))

    assert isinstance(alone, dataloader.BaseDataLoaderIter)
    assert not isinstance(alone, dataloader.MultiProcessingDataLoaderIter)
    assert isinstance(workers, dataloader.BaseDataLoaderIter)
    assert isinstance(workers, dataloader.MultiProcessingDataLoaderIter)


def test_a_loader_keeps_the_iterator_of_persistent_workers():
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True)
    assert dataloader.kept_iterator(loader) is None
    iterator = iter(loader)
    assert iterator is dataloader.kept_iterator(loader)
    assert iterator is vars(loader)[dataloader.ITERATOR]
    vars(loader)[dataloader.ITERATOR] = None

    assert iterator is not iter(loader)


def test_an_iterator_reads_a_sampler():
    loader = DataLoader([0, 1], batch_size=2)

    assert iter(loader) is not None
    assert loader.batch_sampler is getattr(iter(loader), dataloader.INDEX_SAMPLER)
    assert loader.batch_sampler is getattr(iter(DataLoader([0], batch_sampler=loader.batch_sampler)), dataloader.INDEX_SAMPLER)
    unbatched = DataLoader([0, 1], batch_size=None)
    assert unbatched.sampler is getattr(iter(unbatched), dataloader.INDEX_SAMPLER)


def test_batches_are_counted():
    iterator = iter(DataLoader([0, 1, 2]))
    assert 0 == dataloader.batches_yielded(iterator)
    next(iterator)
    next(iterator)

    assert 2 == dataloader.batches_yielded(iterator)


def test_workers_that_have_ended_are_known():
    iterator = iter(DataLoader([0], num_workers=1))
    assert not dataloader.is_shut_down(iterator)
    assert [0] == [int(batch) for batch in iterator]

    assert dataloader.is_shut_down(iterator)


def test_workers_that_are_marked_as_ended_are_left_alone():
    others = {*multiprocessing.active_children()}
    iterator = iter(DataLoader([0], num_workers=1))
    (worker,) = {*multiprocessing.active_children()} - others
    dataloader.mark_shut_down(iterator)
    try:
        del iterator  # which would end its worker
        assert worker.is_alive()
    finally:
        worker.terminate()
        worker.join()


class Asking(IterableDataset):
    def __iter__(self):
        before = dataloader.worker_info()
        assert before is get_worker_info()
        dataloader.set_worker_info("another")
        yield get_worker_info() == "another" == dataloader.worker_info()
        dataloader.set_worker_info(before)
        yield before is get_worker_info()


def test_a_worker_can_be_taken_for_another():
    assert [True, True] == [bool(each) for each in DataLoader(Asking(), num_workers=1, batch_size=None)]
    assert [True, True] == [bool(each) for each in DataLoader(Asking(), batch_size=None)]
    assert get_worker_info() is None
    assert torch.utils.data.get_worker_info() is dataloader.worker_info()
