"""Data that does not go round: what each rank gets, and how its part counts, against one process with the whole batch."""

import contextlib
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.data.samplers import DealtBatches, SplitBatches
from parwrap.errors import UsageError


def numbers(samples):
    x = torch.linspace(-1, 1, samples, dtype=torch.float64).view(-1, 1)
    return TensorDataset(torch.cat([x, x**2], dim=1), x**3)


def trained(loader, reduction="mean", scale=1.0, epochs=2):
    """The weights that a plain loop comes to, and the numbers of samples in its batches."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scale)
    sizes = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(x), y, reduction=reduction)).backward()
            optimizer.step()
            sizes.append(len(x))
    return model.weight.flatten().tolist(), sizes


def alone(function, *args, **kwargs):
    """What ``function`` gives in one process, seeded as the scopes of these tests."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return function(*args, **kwargs)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("samples", "epochs"), [(1797, 1), (98, 3), (290, 2)])
def test_joined_ranks_come_to_the_weights_of_one_process_with_the_batches_of_all(samples, epochs):
    expected, steps = alone(trained, DataLoader(numbers(samples), batch_size=96, shuffle=True), epochs=epochs)
    with parwrap.distributed(uneven="join", seed=0):
        loader = DataLoader(numbers(samples), batch_size=32, shuffle=True)
        actual, sizes = trained(loader, epochs=epochs)

        assert len(steps) == len(sizes) == epochs * len(loader)
    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", [{"batch": "global"}, {"uneven": "join"}], ids=["global", "join"])
def test_a_loss_that_is_a_sum_is_summed_over_a_global_batch_and_averaged_over_batches_of_their_own(options):
    split = "batch" in options
    expected, _ = alone(trained, DataLoader(numbers(194), batch_size=32 if split else 96), "sum", 0.01 if split else 0.01 / 3)
    with parwrap.distributed(loss="sum", **options):
        actual, _ = trained(DataLoader(numbers(194), batch_size=32), "sum", 0.01)

    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(3)
def test_a_sum_in_a_window_is_averaged_over_its_batches():
    expected, _ = alone(trained, DataLoader(numbers(192), batch_size=64), "sum", 0.01 / 2)
    with parwrap.distributed(batch="global", loss="sum"), parwrap.accumulate(2):
        actual, _ = trained(DataLoader(numbers(192), batch_size=32), "sum", 0.01)

    assert expected == pytest.approx(actual, abs=1e-12)


def fitted(samples, batch_size):
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.zero_()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=5)
    for x, y in DataLoader(numbers(samples), batch_size=batch_size):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            loss.backward()
            return loss

        optimizer.step(closure)
    return model.weight.flatten().tolist()


@pytest.mark.ranks(3)
def test_a_closure_sees_the_sum_over_the_ranks():
    expected = alone(fitted, 50, 25)
    with parwrap.distributed(batch="global", loss="sum"):
        assert expected == pytest.approx(fitted(50, 25), abs=1e-9)


@pytest.mark.ranks(3)
def test_what_is_dropped_is_what_distributed_sampler_drops():
    reference = DistributedSampler(range(11), shuffle=True, seed=0, drop_last=True)
    with parwrap.distributed(uneven="drop", seed=0):
        loader = DataLoader(TensorDataset(torch.arange(11.0).view(-1, 1)), batch_size=2, shuffle=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(2):
            seen = []
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                seen += x.flatten().tolist()
            reference.set_epoch(epoch)

            assert list(reference) == seen
            assert 2 == len(loader)


class Varying(BatchSampler):
    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self):
        return len(self.sizes)


@pytest.mark.ranks(3)
def test_batches_of_varying_size_that_are_joined_count_by_their_samples():
    sizes = [3, 1, 4, 1, 5, 9, 2]  # the last has a round for itself
    expected, _ = alone(trained, DataLoader(numbers(25), batch_sampler=Varying([8, 15, 2])))
    with parwrap.distributed(uneven="join"):
        actual, seen = trained(DataLoader(numbers(25), batch_sampler=Varying(sizes)))

    assert expected == pytest.approx(actual, abs=1e-12)
    assert [sizes[parwrap.rank()], sizes[3 + parwrap.rank()], 2] * 2 == seen


@pytest.mark.ranks(3)
def test_samples_without_batches_can_be_joined():
    expected, _ = alone(trained, DataLoader(numbers(4), batch_size=3))
    with parwrap.distributed(uneven="join"):
        actual, seen = trained(DataLoader(numbers(4), batch_size=None))

    assert expected == pytest.approx(actual, abs=1e-12)
    assert 4 == len(seen)


@pytest.mark.ranks(2)
def test_after_a_pass_inside_of_another_the_outer_batch_counts_as_before():
    def weights():
        model = nn.Linear(2, 1).double()
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = DataLoader(numbers(8), batch_size=4)
        for x, y in DataLoader(numbers(9), batch_size=3):
            for _ in inner:
                pass
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return model.weight.flatten().tolist()

    expected = weights()
    with parwrap.distributed(batch="global"):
        actual = weights()

    assert expected == pytest.approx(actual, abs=1e-12)


def test_a_sample_that_goes_by_a_name_counts_as_one_however_long_that_is():
    joined = DealtBatches(["a", "long name"], rank=0, size=2, uneven="join")

    assert ["a"] == list(joined)
    assert [1.0] == list(joined.weights)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 1}, r'uneven="drop" leaves no data to train on: a DataLoader has 2 samples for 3 ranks\. Use uneven="pad"'),
        ({"batch_sampler": Varying([1, 1])}, "a DataLoader has 2 batches for 3 ranks"),
    ],
)
def test_a_loader_of_which_dropping_would_leave_nothing_is_refused(options, text):
    with pytest.raises(UsageError, match=text), parwrap.distributed(uneven="drop"):
        trained(DataLoader(numbers(2), **options))


@pytest.mark.ranks(2)
def test_the_start_line_says_how_uneven_data_is_treated_and_what_becomes_of_learning_rates():
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard), parwrap.distributed(uneven="join", lr="sqrt", loss="sum", seed=1):
        trained(DataLoader(numbers(5), batch_size=2))
    said = "ddp, batch 2 per rank, 4 global, learning rate times 1.414, 5 samples / 2 ranks, uneven join, loss sum, seed 1"

    assert parwrap.rank() > 0 or heard.getvalue().strip().endswith(said)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8), st.booleans())
def test_joined_parts_cover_all_once_in_the_order_of_one_process_and_their_weights_are_their_shares(samples, batch_size, size, drop_last):
    together = list(BatchSampler(range(samples), batch_size * size, drop_last))
    splits = [
        SplitBatches(BatchSampler(SequentialSampler(range(samples)), batch_size * size, drop_last), rank, size) for rank in range(size)
    ]
    parts = [list(split) for split in splits]

    assert {len(together)} == {len(each) for each in parts}
    for step, batch in enumerate(together):
        weights = [split.weights[step] for split in splits]
        assert batch == [sample for rank in range(size) if weights[rank] for sample in parts[rank][step]]
        assert size == pytest.approx(sum(weights))


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(1, 8), st.sampled_from(["pad", "drop", "join"]))
def test_dealt_batches_are_equally_many_and_what_is_said_of_them_is_true(sizes, size, uneven):
    batches = list(Varying(sizes))
    dealt = [DealtBatches(batches, rank, size, uneven) for rank in range(size)]
    parts = [list(each) for each in dealt]
    counted = [
        batch
        for each, part in zip(dealt, parts, strict=True)
        for place, batch in enumerate(part)
        if not each.weights or each.weights[place]
    ]
    whole, rounds = [tuple(batch) for batch in batches], len(batches) // size

    assert {len(dealt[0])} == {len(part) for part in parts}
    if uneven == "join":
        assert sorted(whole) == sorted(map(tuple, counted))
        assert all(size == pytest.approx(sum(each)) for each in zip(*(each.weights for each in dealt), strict=True))
    elif uneven == "drop":
        assert sorted(whole[: rounds * size]) == sorted(map(tuple, counted))
    else:
        assert set(whole) == set(map(tuple, counted))


def sampler_of(kind, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "in order": lambda: SequentialSampler(range(samples)),
        "shuffled": lambda: RandomSampler(range(samples), generator=generator),
        "drawn": lambda: RandomSampler(range(samples), replacement=True, num_samples=2 * samples, generator=generator),
        "weighted": lambda: WeightedRandomSampler(range(1, samples + 1), samples, generator=generator),
        "of a subset": lambda: SubsetRandomSampler(range(0, samples, 2), generator=generator),
    }[kind]()


@given(
    st.sampled_from(["in order", "shuffled", "drawn", "weighted", "of a subset"]),
    st.integers(1, 50),
    st.integers(1, 9),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 99),
)
def test_parts_of_global_batches_have_the_order_of_one_process_in_every_epoch(kind, samples, batch_size, size, drop_last, seed):
    alone = BatchSampler(sampler_of(kind, samples, seed), batch_size, drop_last)
    ranks = [SplitBatches(BatchSampler(sampler_of(kind, samples, seed), batch_size, drop_last), rank, size) for rank in range(size)]
    for _ in range(3):
        parts = [list(split) for split in ranks]
        merged = [
            [sample for rank in range(size) if ranks[rank].weights[step] for sample in parts[rank][step]] for step in range(len(alone))
        ]

        assert list(alone) == merged
        assert {len(alone)} == {len(part) for part in parts}


def test_the_order_of_a_shuffled_loader_is_not_looked_at_before_it_is_drawn():
    torch.manual_seed(0)
    drawn = DealtBatches(RandomSampler(range(5)), 0, 2, "join")
    before = torch.get_rng_state()
    iter(drawn)

    assert torch.equal(before, torch.get_rng_state())
