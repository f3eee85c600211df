"""Passes that only look at data with gradients on see all of it; training passes have the share that hand-written code has."""

import gc
import itertools
import threading
import warnings
from collections import Counter
from queue import Queue

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.data import unread
from trained_on import Setup, everyones

NOTE = "Sums and counts equal those of one process"


def looks(match=NOTE):
    """It is said that a pass only looks."""
    return pytest.warns(UserWarning, match=match)


def drawn(loader):
    """The samples in their order, and the sizes of the batches."""
    batches = [torch.as_tensor(batch).flatten().tolist() for batch in loader]
    return [sample for batch in batches for sample in batch], sorted(map(len, batches))


def by_hand(samples, epoch=0, shuffle=True, seed=0):
    """What DistributedSampler gives this rank."""
    sampler = DistributedSampler(range(samples), parwrap.world_size(), parwrap.rank(), shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("uneven", ["pad", "drop", "join"])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"shuffle": True, "drop_last": True}, {"num_workers": 1}])
@pytest.mark.parametrize("samples", [48, 47, 40])
def test_a_look_sees_each_sample_once_in_batches_of_one_process(samples, options, uneven):
    if uneven == "join" and "drop_last" in options:
        pytest.skip("the batches of all ranks together end sooner")
    expected = drawn(DataLoader(range(samples), batch_size=4, **options))
    with parwrap.distributed(seed=0, uneven=uneven), looks():
        setup, loader = Setup(), DataLoader(range(samples), batch_size=4, **options)
        for _ in range(2):
            seen, sizes = drawn(loader)
            assert len(expected[0]) == len(set(seen)) == len(seen)
            assert expected[1] == sizes
            assert "drop_last" in options or sorted(expected[0]) == sorted(seen), setup


LOADERS = {
    "subset": lambda: DataLoader(range(50), batch_size=4, sampler=SubsetRandomSampler(range(5, 48))),
    "batches": lambda: DataLoader(range(50), batch_sampler=[[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]),
    "one batch": lambda: DataLoader(range(50), batch_sampler=[[1, 2, 3]]),
    "no batches": lambda: DataLoader(range(7), batch_size=None),
    "lasting workers": lambda: DataLoader(range(9), batch_size=4, num_workers=2, persistent_workers=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_look_sees_all_that_other_samplers_draw(kind, batch):
    expected = sorted(drawn(LOADERS[kind]())[0])
    with parwrap.distributed(batch=batch), looks():
        setup, read = Setup(), LOADERS[kind]()
        assert [expected] * 2 == [sorted(drawn(read)[0]) for _ in range(2)], setup


@pytest.mark.ranks(2)
def test_a_look_sees_what_a_weighted_sampler_draws_with_all_that_is_drawn_twice():
    weights = torch.arange(1.0, 20.0)
    torch.manual_seed(3)
    expected = Counter(drawn(DataLoader(range(19), batch_size=2, sampler=WeightedRandomSampler(weights, 19)))[0])
    with parwrap.distributed(), looks():
        _setup = Setup()
        torch.manual_seed(3)
        assert expected == Counter(drawn(DataLoader(range(19), batch_size=2, sampler=WeightedRandomSampler(weights, 19)))[0])


@pytest.mark.ranks(2)
def test_parts_of_global_batches_become_whole_in_a_look_and_their_number_is_said():
    with parwrap.distributed(batch="global"), looks("It has 10 batches instead of 5: divide by the number counted"):
        _setup = Setup()
        assert list(range(18)) == sorted(drawn(DataLoader(range(18), batch_size=4, shuffle=True))[0])


@pytest.mark.ranks(2)
def test_training_after_a_look_is_that_of_hand_written_code():
    with parwrap.distributed(seed=5), looks():
        setup = Setup()
        other, loader = (DataLoader(range(20), batch_size=4, shuffle=True) for _ in range(2))
        everything = [sorted(drawn(each)[0]) for each in (other, loader)]
        trained = [setup.train(loader), drawn(loader)[0] and setup.train(loader)]

        assert [list(range(20))] * 2 == everything
        assert [by_hand(20, epoch, seed=5) for epoch in (0, 1)] == trained


@pytest.mark.ranks(2)
def test_a_loop_over_the_training_data_without_a_backward_is_a_look_also_after_training():
    with parwrap.distributed(), looks():
        setup, loader = Setup(), DataLoader(TensorDataset(torch.arange(20.0)), batch_size=4, shuffle=True)
        for (x,) in loader:
            setup.step(x)
        losses = []  # which are kept with their graphs
        for (x,) in loader:
            losses.append(setup.model(x.view(-1, 1)).sum())

        assert 5 == len(loader) == len(losses)
        assert torch.allclose(setup.model(torch.arange(20.0).view(-1, 1)).sum(), torch.stack(losses).sum())


@pytest.mark.ranks(2)
def test_a_loader_that_does_not_shuffle_is_read_in_order_once_another_was_trained_on():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, train, test = Setup(), DataLoader(range(20), batch_size=4, shuffle=True), DataLoader(range(9), batch_size=4)
        for _ in range(2):
            setup.train(train)
            assert list(range(9)) == drawn(test)[0]
            assert [0, 1, 2, 3] == next(iter(test)).tolist()


@pytest.mark.ranks(2)
def test_a_shuffled_loader_is_trained_on_in_eval_mode_and_its_length_says_so():
    with parwrap.distributed(seed=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, loader = Setup(), DataLoader(range(20), batch_size=4, shuffle=True)
        setup.model.eval()
        schedule = torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, 0.1, epochs=2, steps_per_epoch=len(loader))
        for epoch in range(2):
            seen = []
            for batch in loader:
                setup.step(batch)
                schedule.step()
                seen += batch.tolist()
            assert by_hand(20, epoch, seed=2) == seen

        assert 3 == len(loader)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_pass_is_for_is_seen_at_its_first_batch(workers):
    with parwrap.distributed(seed=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(range(20), batch_size=4, num_workers=workers)
        reading = iter(loader)
        setup = Setup()
        seen = setup.train(reading)
        setup.model.eval()
        held_out = DataLoader(range(8), batch_size=2)
        reading = iter(held_out)
        setup.model.train()

        assert by_hand(20, shuffle=False) == seen
        with pytest.warns(UserWarning, match="its own share first and then the rest"):
            assert list(range(8)) == sorted(drawn(reading)[0])


def ahead(loader, by):
    """Draws so many batches before it gives the first."""
    queue = []
    for batch in loader:
        queue.append(batch)
        if len(queue) > by:
            yield queue.pop(0)
    yield from queue


def in_thread(loader):
    queue = Queue()
    threading.Thread(target=lambda: [queue.put(batch) for batch in [*loader, None]], daemon=True).start()
    while (batch := queue.get()) is not None:
        yield batch


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", [1, 3, None])
def test_a_loop_that_draws_ahead_trains_on_its_share(by):
    with parwrap.distributed(seed=4), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, loader = Setup(), DataLoader(range(37), batch_size=4, shuffle=True)
        assert [by_hand(37, epoch, seed=4) for epoch in range(2)] == [
            setup.train(ahead(loader, by) if by else in_thread(loader)) for _ in range(2)
        ]


@pytest.mark.ranks(2)
def test_a_loop_that_draws_all_of_its_share_ahead_is_said_to_and_trains_on_it_from_then_on():
    with parwrap.distributed(seed=4):
        setup, loader = Setup(), DataLoader(range(14), batch_size=4, shuffle=True)
        with pytest.warns(UserWarning, match="read a DataLoader to the end of this rank's share before its first backward"):
            setup.train(ahead(loader, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen = [setup.train(ahead(loader, 1)) for _ in range(2)]
        assert 7 == len(seen[0])
        assert list(range(14)) == everyones(seen[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("every", [3, 5, 100])
def test_losses_that_are_summed_up_over_batches_train_on_the_share(every):
    with parwrap.distributed(seed=4), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, loader = Setup(), DataLoader(range(37), batch_size=4, shuffle=True)
        for epoch in range(3):
            seen, loss = [], 0.0
            for number, batch in enumerate(loader):
                seen += batch.tolist()
                loss = loss + setup.model(batch.float().view(-1, 1)).mean()
                if number % every == every - 1 or (number == len(loader) - 1 and every < 100):
                    loss.backward()
                    setup.optimizer.step()
                    loss = 0.0
            if every == 100:
                loss.backward()
                setup.optimizer.step()
            assert by_hand(37, epoch, seed=4) == seen


@pytest.mark.ranks(2)
def test_losses_that_are_kept_in_a_pass_and_never_trained_on_are_said_to_be_of_a_share():
    with parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(37), batch_size=4, shuffle=True)
        losses = [setup.model(batch.float().view(-1, 1)).mean() for batch in loader]
        with pytest.warns(UserWarning, match=r"test_looking.py:\d+ without training, and each rank saw only its share"):
            setup.train(loader)
    assert losses


@pytest.mark.ranks(2)
def test_a_look_that_is_broken_off_is_said_once_it_is_known_to_be_one():
    with looks("2 batches of a DataLoader were read .* without a backward, and each rank read different ones"), parwrap.distributed():
        setup, loader = Setup(), DataLoader(range(37), batch_size=4, shuffle=True)
        seen = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
    assert 2 == len(seen), setup


@pytest.mark.ranks(2)
def test_a_first_batch_that_is_drawn_for_its_shape_is_not_talked_about():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, loader = Setup(), DataLoader(range(37), batch_size=4, shuffle=True)
        assert 4 == len(next(iter(loader)))
        setup.train(loader)


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_out_all_its_backwards_does_not_hang():
    with parwrap.distributed(timeout=60), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setup, loader = Setup(), DataLoader(range(48), batch_size=4, shuffle=True)
        for epoch in range(3):
            for batch in loader:
                if epoch == 1 and parwrap.rank() == 1:
                    continue
                setup.step(batch)
        weights = parwrap.gather(setup.model.weight.detach())

    assert [weights[0].tolist()] * 3 == [each.tolist() for each in weights]


@pytest.mark.ranks(2)
def test_loaders_read_in_step_are_looked_at_whole_and_in_step():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _setup = Setup()
        pairs = list(zip(DataLoader(range(18), batch_size=2), DataLoader(range(100, 118), batch_size=2), strict=True))

    assert list(range(18)) == sorted(torch.cat([a for a, _ in pairs]).tolist())
    assert all((b - a == 100).all() for a, b in pairs)


@pytest.mark.ranks(2)
def test_gradients_of_the_data_are_summed_up_over_all_of_it():
    """As for a Fisher matrix, by torch.autograd.grad: nothing is trained."""
    with parwrap.distributed(), looks():
        setup, loader = Setup(), DataLoader(TensorDataset(torch.arange(21.0)), batch_size=4, shuffle=True)
        total = torch.zeros(1, 1)
        for (x,) in loader:
            total += torch.autograd.grad(setup.model(x.view(-1, 1)).sum(), setup.model.weight)[0]

    assert 210 == total.item()


def test_a_single_process_reads_as_it_always_does():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        _setup = Setup()
        assert list(range(9)) == drawn(DataLoader(range(9), batch_size=2))[0]
        assert 9 == len(drawn(DataLoader(range(9), sampler=RandomSampler(range(9))))[0])
        assert 9 == len(drawn(DataLoader(range(9), sampler=SequentialSampler(range(9))))[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kept", [True, False])
def test_where_batches_are_kept_it_is_said_that_training_on_them_is_no_faster(kept):
    match = "every rank trains on all of them, which is no faster" if kept else "(?<!which is no faster).* wrap the loop in torch.no_grad"
    with parwrap.distributed(), looks(match) as said:
        setup, loader = Setup(), DataLoader(TensorDataset(torch.arange(20.0)), batch_size=4)
        batches = list(loader) if kept else [x.sum().item() for (x,) in loader]

        assert [5, 1] == [len(batches), len(said)]
        assert kept == ("parwrap.shard(batches)" in str(said[0].message))
        if kept:
            with torch.no_grad():
                batches = parwrap.shard(list(loader))
            assert list(range(20)) == sorted(set(everyones([n for (x,) in batches for n in x.tolist()]))), setup


class Endless(torch.utils.data.Sampler):
    """Draws batches of one sample without end, or so many."""

    def __init__(self, batches=None):
        self.batches = batches

    def __iter__(self):
        return iter([number % 8] for number in (itertools.count() if self.batches is None else range(self.batches)))


def kept_indices():
    """How many batches of indices are kept of passes, on this rank."""
    gc.collect()
    return sum(len(each.drawn or ()) for each in gc.get_objects() if type(each) is unread.Recorded)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_of_an_endless_pass_that_trains_by_gradients_of_its_own_no_more_than_a_bound_is_kept(batch, monkeypatch):
    monkeypatch.setattr(unread, "MOST_SAMPLES", 200, raising=False)
    with parwrap.distributed(seed=0, batch=batch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        kept = []
        for number, x in enumerate(DataLoader(torch.ones(8, 1), batch_sampler=Endless())):
            for p, grad in zip(model.parameters(), torch.autograd.grad(model(x).sum(), list(model.parameters())), strict=True):
                p.grad = grad
            optimizer.step()
            if number % 100 == 99:
                kept.append(kept_indices())
            if number == 299:
                break

    assert max(kept) <= 200
    assert 0 == kept[-1]


@pytest.mark.ranks(2)
def test_what_a_look_has_drawn_is_not_kept_when_it_is_over():
    with parwrap.distributed(seed=0):
        setup, loader = Setup(), DataLoader(range(50), batch_sampler=Endless(40))
        with looks():
            seen, _ = drawn(loader)

        assert sorted(number % 8 for number in range(40)) == sorted(seen), setup
        assert 0 == kept_indices()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("samples", "batches"), [(8, 25), (30, 30)])
def test_a_look_that_draws_no_more_than_the_bound_or_the_dataset_has_is_whole(samples, batches, monkeypatch):
    monkeypatch.setattr(unread, "MOST_SAMPLES", 25, raising=False)
    with parwrap.distributed(seed=0), looks():
        setup = Setup()
        seen, _ = drawn(DataLoader(range(samples), batch_sampler=Endless(batches)))

    assert sorted(number % 8 for number in range(batches)) == sorted(seen), setup


@pytest.mark.ranks(2)
def test_a_look_that_draws_more_than_the_bound_says_that_ranks_saw_their_shares(monkeypatch):
    monkeypatch.setattr(unread, "MOST_SAMPLES", 25, raising=False)
    with parwrap.distributed(seed=0):
        setup, loader = Setup(), DataLoader(range(8), batch_sampler=Endless(26))
        with looks("each rank saw only its share"):
            seen, _ = drawn(loader)
        whole, _ = drawn(loader)

    assert 13 == len(seen), setup
    assert [number % 8 for number in range(26)] == whole
