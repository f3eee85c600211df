"""``next(iter(loader))`` over a loader that does not shuffle gives the batch of one process: it is shown, or its shape is looked at."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import parwrap
from trained_on import Setup


def fixed(loader):
    return next(iter(loader)).tolist()


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch", ["per_rank", "global"])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_fixed_batch_for_the_log_is_that_of_one_process_before_and_after_training(size, workers, batch):
    with parwrap.distributed(batch=batch):
        setup, shown = Setup(), DataLoader(range(12), batch_size=4, num_workers=workers)
        before = fixed(shown)
        for _ in range(2):
            setup.train(DataLoader(range(20), batch_size=4))

            assert [[0, 1, 2, 3]] * 2 == [before, fixed(shown)]


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_training_after_it_is_that_of_hand_written_ddp():
    with parwrap.distributed(seed=5):
        setup, shown, loader = Setup(), DataLoader(range(12), batch_size=4), DataLoader(range(20), batch_size=4, shuffle=True)
        fixed(shown)
        trained = [setup.train(loader), fixed(shown) and setup.train(loader)]

    expected = []
    for epoch in (0, 1):
        sampler = DistributedSampler(range(20), seed=5)
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    assert expected == trained


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_loader_that_is_trained_on_besides_keeps_its_length_and_share():
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(20), batch_size=5)
        assert [0, 1, 2, 3, 4] == fixed(loader)
        setup.model.train()
        assert 2 == len(loader)
        assert list(range(parwrap.rank(), 20, 2)) == setup.train(loader)
        assert [0, 1, 2, 3, 4] == fixed(loader)
        assert 2 == len(loader)
        assert list(range(parwrap.rank(), 20, 2)) == setup.train(loader)


@pytest.mark.ranks(2)
def test_a_loop_that_trains_on_one_batch_at_a_time_has_a_batch_on_each_rank():
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(20), batch_size=4)
        seen = []
        for _ in range(3):
            batch = next(iter(loader))
            setup.step(batch)
            seen.append(batch.tolist())

    share = [[0, 2, 4, 6], [1, 3, 5, 7]][parwrap.rank()]
    assert [[0, 1, 2, 3], share, share] == seen


@pytest.mark.ranks(2)
def test_a_shuffled_loader_and_an_iterator_that_is_kept_give_this_ranks_share():
    with parwrap.distributed(seed=3):
        setup = Setup()
        kept = iter(DataLoader(TensorDataset(torch.arange(20.0)), batch_size=4))
        (batch,) = next(kept)
        shuffled = fixed(DataLoader(range(20), batch_size=4, shuffle=True))
        setup.step()

    assert [[0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0]][parwrap.rank()] == batch.tolist()
    assert 8 == len({sample for each in parwrap.gather(shuffled) for sample in each})
