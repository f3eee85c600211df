"""What each rank gets to see of a loader, in real scopes on real ranks."""

import io
import itertools
from contextlib import redirect_stderr

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset, WeightedRandomSampler, random_split
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.errors import RankMismatchError
from trained_on import Setup, everyones


@pytest.mark.ranks(2)
def test_every_epoch_has_a_new_order_that_is_distributed_samplers():
    with parwrap.distributed(seed=3):
        setup, loader = Setup(), DataLoader(range(12), batch_size=2, shuffle=True)
        epochs = [setup.train(loader) for _ in range(3)]
    sampler = DistributedSampler(range(12), seed=3)
    for epoch, seen in enumerate(epochs):
        sampler.set_epoch(epoch)

        assert list(sampler) == seen


@pytest.mark.ranks(2)
def test_two_zipped_loaders_do_not_pair_a_sample_with_itself():
    with parwrap.distributed(seed=0):
        setup, data = Setup(), range(100)
        pairs = []
        for one, other in zip(DataLoader(data, shuffle=True), DataLoader(data, shuffle=True), strict=True):
            setup.step(one)
            pairs.append((one.item(), other.item()))

    assert sum(one == other for one, other in pairs) < 10


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_other_samplers_are_kept_and_draw_what_they_draw_in_a_single_process(batch):
    loader = DataLoader(range(10), batch_size=2, sampler=WeightedRandomSampler([0] * 5 + [1] * 5, 8))
    torch.manual_seed(1)
    Setup()
    expected = [sorted(torch.cat(list(loader)).tolist()) for _ in range(2)]
    with parwrap.distributed(batch=batch, seed=1):
        setup = Setup()

        assert expected == [everyones(setup.train(loader)) for _ in range(2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=["none", "new", "persistent"]
)
def test_a_global_pass_takes_the_samples_of_a_single_process_in_the_same_order(workers):
    torch.manual_seed(1)
    Setup()
    loader = DataLoader(range(11), batch_size=4, shuffle=True, **workers)
    expected = [[sorted(batch.tolist()) for batch in loader] for _ in range(3)]
    loader = DataLoader(range(11), batch_size=4, shuffle=True, **workers)
    with parwrap.distributed(batch="global", seed=1):
        setup = Setup()
        actual = []
        for _ in range(3):
            actual.append([])
            for batch in loader:
                setup.step(batch)
                actual[-1].append(sorted({sample for each in parwrap.gather(batch.tolist()) for sample in each}))

    assert expected == actual


@pytest.mark.ranks(2)
def test_a_loader_without_end_is_dealt_out_lazily():
    with parwrap.distributed(seed=0):
        setup = Setup()
        loader = DataLoader(range(1000), batch_size=4, sampler=RandomSampler(range(1000), replacement=True, num_samples=10**10))
        batches = []
        for batch in itertools.islice(loader, 5):
            setup.step(batch)
            batches.append(tuple(batch.tolist()))

    assert 10 == len({batch for each in parwrap.gather(batches) for batch in each})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


@pytest.mark.ranks(3)
def test_the_batches_of_a_stream_are_dealt_out():
    with parwrap.distributed():
        assert list(range(12)) == everyones(Setup().train(DataLoader(Stream(), batch_size=2)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_the_users_own_distributed_sampler_is_kept_and_its_epochs_are_the_users(batch):
    heard = io.StringIO()
    with redirect_stderr(heard), parwrap.distributed(batch=batch):
        sampler = DistributedSampler(range(10), parwrap.world_size(), parwrap.rank())
        setup, loader = Setup(), DataLoader(range(10), batch_size=1, sampler=sampler)
        for epoch in (0, 0, 3):
            sampler.set_epoch(epoch)

            assert list(sampler) == setup.train(loader)
        assert 5 == len(loader)
    said = "parwrap: a DataLoader has its own DistributedSampler for 2 replicas: it is kept."
    assert parwrap.is_rank_zero() == (heard.getvalue().count(said) == 1)


class Weighted(DistributedSampler):
    """Its weights are those of samples."""

    weights = torch.ones(10)


@pytest.mark.ranks(2)
def test_weights_of_a_sampler_of_the_users_own_are_none_of_batches():
    with parwrap.distributed():
        setup, sampler = Setup(), Weighted(range(10), parwrap.world_size(), parwrap.rank())
        seen = setup.train(DataLoader(torch.arange(10).view(-1, 1), batch_size=None, sampler=sampler))

        assert list(sampler) == seen


@pytest.mark.ranks(2)
def test_own_distributed_samplers_that_all_ranks_made_for_rank_zero_become_each_ones_own():
    """As with rank=int(os.environ.get("RANK", 0)), in a script that does not see RANK."""
    with parwrap.distributed():
        setup, sampler = Setup(), DistributedSampler(range(10), num_replicas=2, rank=0)
        loader = DataLoader(range(10), batch_size=1, sampler=sampler)
        with pytest.warns(UserWarning, match="made with rank=0 on more than one rank, so these ranks would train on the same share"):
            seen = setup.train(loader)
        expected = list(DistributedSampler(range(10), num_replicas=2, rank=parwrap.rank()))

        assert expected == seen
        sampler.set_epoch(1)
        assert expected != setup.train(loader)
        assert (0, 5) == (sampler.rank, len(loader))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_an_own_distributed_sampler_for_one_replica_is_shared_out(batch):
    heard = io.StringIO()
    with redirect_stderr(heard), parwrap.distributed(batch=batch):
        setup, sampler = Setup(), DistributedSampler(range(12), num_replicas=1, rank=0)
        loader = DataLoader(range(12), batch_size=2, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            order = list(sampler)
            seen = setup.train(loader)

            assert list(range(12)) == everyones(seen)
            assert order[: 2 // (1 + (batch == "global"))] == parwrap.broadcast(seen)[: 2 // (1 + (batch == "global"))]
        assert (3 if batch == "per_rank" else 6) == len(loader)
    said = "has its own DistributedSampler for 1 replica: its draws are divided among 2 ranks."
    assert parwrap.is_rank_zero() == (heard.getvalue().count(said) == 1)


@pytest.mark.ranks(2)
def test_a_split_is_the_same_on_every_rank_so_nothing_leaks():
    with parwrap.distributed():
        setup = Setup()
        for _ in range(2):
            train, held_out = random_split(range(20), [15, 5])
            seen = everyones(setup.train(DataLoader(train, batch_size=3, shuffle=True)))

            assert set(range(20)) - set(held_out.indices) == set(seen)


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randint(2**40, ())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("generator", [False, True])
def test_augmentation_differs_by_rank(workers, generator):
    with parwrap.distributed(seed=0):
        setup = Setup()
        options = {"generator": torch.Generator().manual_seed(1)} if generator else {}
        loader = DataLoader(Noisy(), batch_size=2, num_workers=workers, **options)
        setup.train(DataLoader(range(4), batch_size=2))
        seen = setup.train(loader) + setup.train(loader)
    together = everyones(seen)

    assert len(together) == len(set(together))


@pytest.mark.ranks(2)
def test_persistent_workers_stay():
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True, shuffle=True)
        for _ in range(3):
            assert list(range(8)) == everyones(setup.train(loader))


@pytest.mark.ranks(2)
def test_datasets_of_different_length_are_refused():
    with (
        parwrap.distributed(),
        pytest.raises(
            RankMismatchError,
            match=r"the training datasets differ in length between ranks: 10 samples on rank 0, 11 samples on rank 1\. Every rank must",
        ),
    ):
        Setup().train(DataLoader(range(10 + parwrap.rank())))


@pytest.mark.ranks(2)
def test_a_subset_that_differs_by_rank_becomes_rank_zeros_with_a_warning():
    indices = [3, 1, 4, 5] if parwrap.rank() == 0 else [9, 2, 6, 8]
    with parwrap.distributed():
        loader = DataLoader(Subset(range(10), indices), shuffle=True)
        with pytest.warns(UserWarning, match="indices of a Subset differ between ranks, so all ranks use rank 0's"):
            seen = Setup().train(loader)

        assert [1, 3, 4, 5] == everyones(seen)


@pytest.mark.ranks(2)
def test_a_function_inside_shares_out_a_loader_in_its_own_way():
    loader = DataLoader(range(8), batch_size=4)

    @parwrap.distributed(batch="global")
    def parts(setup):
        return [len(batch) for batch in loader if not setup.step(batch)]

    with parwrap.distributed():
        setup = Setup()
        assert [4] == [len(batch) for batch in loader if not setup.step(batch)]
        assert [2, 2] == parts(setup)
        assert [4] == [len(batch) for batch in loader if not setup.step(batch)]


@pytest.mark.ranks(2)
def test_a_loader_zipped_with_itself_gives_two_orders():
    with parwrap.distributed(seed=0):
        setup, loader = Setup(), DataLoader(range(100), shuffle=True)
        pairs = [(one.item(), other.item()) for one, other in zip(loader, loader, strict=True) if not setup.step(one)]

    assert sum(one == other for one, other in pairs) < 10


@pytest.mark.ranks(2)
def test_the_batches_of_the_users_own_batch_sampler_are_dealt_out():
    with parwrap.distributed():
        setup = Setup()
        loader = DataLoader(range(32), batch_sampler=BatchSampler(RandomSampler(range(32)), 8, False))
        sizes = [len(batch) for batch in loader if not setup.step(batch)]

        assert [8, 8] == sizes
        assert list(range(32)) == everyones(setup.train(loader))


@pytest.mark.ranks(2)
def test_a_dataset_that_grows_is_shared_out_whole():
    memory = list(range(8))
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(memory, batch_size=2)
        assert list(range(8)) == everyones(setup.train(loader))
        memory += range(8, 16)
        assert list(range(16)) == everyones(setup.train(loader))


class ShuffledStream(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(12).tolist())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_stream_that_shuffles_is_dealt_out_without_overlap(batch):
    with parwrap.distributed(batch=batch):
        setup, loader = Setup(), DataLoader(ShuffledStream(), batch_size=2)
        for _ in range(3):
            assert list(range(12)) == everyones(setup.train(loader))
