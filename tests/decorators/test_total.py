"""``parwrap.total`` against one process: a pass in shares is added up, a whole pass is as it is; and what parwrap prints about shares."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset, get_worker_info

import parwrap
from parwrap.errors import RankMismatchError, RankZeroError, UsageError


def dataset(samples=24):
    """Sample ``i`` is the number ``i``."""
    return TensorDataset(torch.arange(float(samples))[:, None])


class Loop:
    """A model and a loop over a loader that counts its samples and adds them up."""

    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def train(self, loader, most=math.inf):
        self.model.train()
        seen, sum_of = 0, 0.0
        for index, (x,) in enumerate(loader):
            if index == most:
                break
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            seen, sum_of = seen + len(x), sum_of + x.sum().item()
        return {"seen": seen, "sum": sum_of}

    def evaluate(self, loader):
        self.model.eval()
        with torch.no_grad():
            return {"seen": sum(len(x) for (x,) in loader), "sum": sum(x.sum().item() for (x,) in loader)}


def of_one_process(samples):
    return {"seen": samples, "sum": samples * (samples - 1) / 2}


RANKS = [pytest.param(size, marks=pytest.mark.ranks(size), id=f"{size} ranks") for size in (2, 3)]


@pytest.mark.parametrize("size", RANKS)
def test_a_loop_that_trains_and_validates_gets_the_numbers_of_one_process(size):
    loaders = {"train": DataLoader(dataset(24), 4, shuffle=True), "val": DataLoader(dataset(10), 4)}
    with parwrap.distributed():
        loop = Loop()
        for _ in range(2):
            for phase, loader in loaders.items():
                numbers = loop.train(loader) if phase == "train" else loop.evaluate(loader)
                assert of_one_process(24 if phase == "train" else 10) == parwrap.total(numbers, of=loader)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("samples", [993, 997])
@pytest.mark.parametrize("options", [{}, {"uneven": "join"}, {"uneven": "drop"}, {"batch": "global"}], ids=str)
def test_samples_that_do_not_divide_count_once_or_total_says_how_many_count_twice(size, samples, options):
    """Sample 0 is read twice at most: shares are padded from the beginning, and a rank without a part repeats the first of its batch."""
    loader = DataLoader(dataset(samples), 16)
    with parwrap.distributed(**options), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        numbers = parwrap.total(Loop().train(loader), of=loader)

    padded = {} if options else -samples % size
    if options == {"batch": "global"}:
        padded = max(0, size - samples % 16)
    elif options == {"uneven": "join"}:
        padded = max(0, size - samples % (16 * size))
    elif options == {"uneven": "drop"}:
        padded = -(samples % size)
    texts = [str(each.message) for each in said if "parwrap.total" in str(each.message)]
    assert samples + padded == numbers["seen"]
    assert [True] * (padded > 0) == [f"ranks repeat {padded} sample" in text and f"over {samples} samples" in text for text in texts]


class Numbers(IterableDataset):
    """Sample ``i`` is the number ``i``; workers divide the samples."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter((torch.tensor([float(i)]),) for i in range(first, self.samples, step))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(
    ("options", "samples", "workers", "padded"),
    [
        ({}, 25, 0, {2: 1, 3: 2}),
        ({}, 26, 2, {2: 2, 3: 4}),  # 13 samples of each worker
        ({}, 24, 2, {2: 0, 3: 0}),
        ({"uneven": "drop"}, 25, 0, {2: -1, 3: -1}),
        ({"uneven": "join"}, 25, 0, {2: 1, 3: 2}),  # the last batch has one sample
        ({"batch": "global"}, 25, 1, {2: 1, 3: 2}),
    ],
    ids=str,
)
def test_samples_of_a_stream_that_do_not_divide_count_once_or_total_says_how_many_count_twice(size, options, samples, workers, padded):
    loader, padded = DataLoader(Numbers(samples), 4, num_workers=workers, persistent_workers=workers > 1), padded[size]
    with parwrap.distributed(**options), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop = Loop()
        seen = [parwrap.total(loop.train(parwrap.shard(loader)), of=loader)["seen"] for _ in range(2)]

    texts = [str(each.message) for each in said if "parwrap.total" in str(each.message)]
    assert [samples + padded] * 2 == seen
    assert [True] * (padded > 0) == [f"ranks repeat {padded} sample" in text for text in texts]


@pytest.mark.ranks(2)
def test_batches_of_a_custom_sampler_that_are_dealt_twice_are_counted():
    loader = DataLoader(dataset(12), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    with parwrap.distributed():
        trained = Loop().train(parwrap.shard(loader))
        with pytest.warns(UserWarning, match="ranks repeat 4 samples in the pass"):
            numbers = parwrap.total(trained, of=loader)

    assert 16 == numbers["seen"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_left_by_break_is_totalled_as_far_as_it_was_read(workers):
    loader = DataLoader(dataset(25), 4, num_workers=workers)
    with parwrap.distributed(batch="global"):
        numbers = parwrap.total(Loop().train(loader, most=3), of=loader)

    assert of_one_process(12) == numbers


@pytest.mark.ranks(2)
def test_without_a_loader_the_passes_since_the_last_total_decide():
    train, val = DataLoader(dataset(24), 4), DataLoader(dataset(10), 4)
    with parwrap.distributed():
        loop = Loop()
        trained = loop.train(train)
        assert 24 == parwrap.total(trained["seen"])
        assert of_one_process(24) == parwrap.total(trained), "several totals of one pass"
        assert of_one_process(10) == parwrap.total(loop.evaluate(val))
        both = loop.train(parwrap.shard(train)), loop.evaluate(val)
        with pytest.raises(UsageError, match=r"read a share and .* read everything.* Write parwrap.total\(values, of=loader\)"):
            parwrap.total(both)
        assert of_one_process(24) == parwrap.total(both[0], of=train)
        assert of_one_process(10) == parwrap.total(both[1], of=val)


@pytest.mark.ranks(2)
def test_in_an_open_pass_the_loader_must_be_named():
    loader = DataLoader(dataset(24), 4)
    seen = 0
    with parwrap.distributed():
        loop = Loop()
        loop.train(loader)
        for index, (x,) in enumerate(parwrap.shard(loader)):
            seen += len(x)
            loop.model(x).sum().backward()
            loop.optimizer.step()
            if index == 0:
                with pytest.raises(UsageError, match=r"is still open.*of=loader"):
                    parwrap.total(seen)
            assert (index + 1) * 8 == parwrap.total(seen, of=loader)


@pytest.mark.ranks(2)
def test_numbers_that_differ_after_a_whole_pass_are_an_error_that_names_them():
    loader = DataLoader(dataset(10), 4)
    with parwrap.distributed():
        seen = Loop().evaluate(loader)["seen"]
        with pytest.raises(RankMismatchError, match=r"different numbers of values\['mine'\].*0.5 on rank 0 and 1.5 on rank 1"):
            parwrap.total({"seen": seen, "mine": parwrap.rank() + 0.5}, of=loader)
        assert {"seen": 10} == parwrap.total({"seen": seen}, of=loader), "the ranks go on together"
        loop, loader = Loop(), DataLoader(dataset(10), 4, shuffle=True)
        trained = loop.train(loader)
        loop.evaluate(loader)
        with pytest.raises(RankMismatchError, match=r"the share read at test_total.py:\d+, total them before the next pass"):
            parwrap.total(trained, of=loader)
        assert 1.0 == parwrap.total(1.0 + parwrap.rank() * 1e-6, of=loader), "rounding: rank 0's"


@pytest.mark.ranks(2)
def test_a_training_pass_that_was_read_in_the_other_way_since_the_last_total_is_named():
    loader = DataLoader(dataset(24), 4, shuffle=True)

    def steps(loop, count, batches):
        for (x,) in itertools.islice(batches, count):
            loop.model(x).square().mean().backward()
            loop.optimizer.step()
        return count * 4

    with parwrap.distributed():
        loop = Loop()
        first = iter(loader)
        seen = steps(loop, 2, first)
        assert 16 == parwrap.total(seen, of=loader)
        steps(loop, 1, first)
        second = iter(loader)  # of another line, which has not trained before
        steps(loop, 1, second)
        with pytest.warns(UserWarning, match=r"whole at .* in shares at .*, has trained since the last total.*shard\(loader\)"):
            assert 4 == parwrap.total(4, of=loader)


@pytest.mark.ranks(2)
def test_tensors_arrays_and_structures():
    train, val = DataLoader(dataset(24), 4), DataLoader(dataset(10), 4)
    values = [torch.tensor([1, 2], dtype=torch.int32), (np.float32([0.5]), np.arange(2)), torch.tensor(True), 2.5, float("nan")]
    with parwrap.distributed():
        loop = Loop()
        loop.train(train)
        shared = parwrap.total(values, of=train)
        loop.evaluate(val)
        whole = parwrap.total(values, of=val)

    assert ([2, 4], [1.0], [0, 2], 2, 5.0) == (shared[0].tolist(), *(each.tolist() for each in shared[1]), int(shared[2]), shared[3])
    assert ([1, 2], [0.5], [0, 1], 1, 2.5) == (whole[0].tolist(), *(each.tolist() for each in whole[1]), int(whole[2]), whole[3])
    assert [type(each) for each in shared] == [type(each) for each in whole]
    assert [each.dtype for each in (shared[0], *shared[1])] == [each.dtype for each in (whole[0], *whole[1])]
    assert math.isnan(whole[4])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("weighted", "as_tensor"), [(False, False), (False, True), (True, False)])
def test_a_sum_of_losses_over_batches_is_named_because_they_are_means_already(weighted, as_tensor):
    """Also where all parts are equal, so that all ranks have the same sum of weighted losses."""
    loader, running = DataLoader(dataset(24), 4), 0.0
    with parwrap.distributed(batch="global"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop = Loop()
        for (x,) in loader:
            loop.optimizer.zero_grad()
            loss = loop.model(x).square().mean()
            loss.backward()
            loop.optimizer.step()
            running += (loss.detach() if as_tensor else loss.item()) * (len(x) if weighted else 1)
        for _ in range(2):
            parwrap.total({"loss": running, "seen": 12}, of=loader)

    texts = [str(each.message) for each in said if "sum of the losses" in str(each.message)]
    assert (0 if weighted else 1) == len(texts)
    assert weighted or "adds up values['loss'], the sum of the losses" in texts[0]


@pytest.mark.ranks(2)
def test_a_sum_of_losses_with_the_number_of_batches_is_a_mean_and_not_named():
    loader, running, batches = DataLoader(dataset(24), 4), 0.0, 0
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = Loop()
        for (x,) in loader:
            loss = loop.model(x).square().mean()
            loss.backward()
            loop.optimizer.step()
            running, batches = running + loss.item(), batches + 1
        summed, count = parwrap.total((running, batches), of=loader)

    assert pytest.approx(running / batches) == summed / count


@pytest.mark.ranks(2)
def test_bad_input_is_refused():
    loader, other = DataLoader(dataset(10), 4), DataLoader(dataset(10), 4)
    with parwrap.distributed():
        with pytest.raises(UsageError, match="no loader has been read"):
            parwrap.total(1)
        Loop().evaluate(loader)
        with pytest.raises(UsageError, match=r"total\(\) takes tensors, arrays, numbers .*not str"):
            parwrap.total("all", of=loader)
        with pytest.raises(UsageError, match="ranks have read none from this DataLoader"):
            parwrap.total(1, of=other)
        with pytest.raises(UsageError, match=r"ranks have read none from this list.*Pass the DataLoader itself"):
            parwrap.total(1, of=[1, 2])
        with pytest.raises(RankMismatchError, match=r"different structures on different ranks: .*missing"):
            parwrap.total({parwrap.rank(): 1}, of=loader)


@pytest.mark.ranks(2)
def test_a_total_needs_all_ranks():
    with parwrap.distributed():

        @parwrap.rank_zero_only
        def alone():
            with pytest.raises(UsageError, match=r"total\(\) would wait forever"):
                parwrap.total(1)

        alone()


@pytest.mark.ranks(2)
def test_a_total_within_evaluate_would_count_twice():
    loader = DataLoader(dataset(10), 4)

    @parwrap.evaluate(reduce="sum")
    def seen():
        return parwrap.total(sum(len(x) for (x,) in loader), of=loader)

    with parwrap.distributed(), pytest.raises((UsageError, RankZeroError), match="reduce= merges its results already"):
        seen()


@pytest.mark.ranks(2)
def test_what_an_evaluation_returns_is_merged_already_also_where_the_loader_has_trained_in_shares():
    loader = DataLoader(dataset(24), 4)
    with parwrap.distributed():
        loop = Loop()
        trained = loop.train(loader)
        evaluated = parwrap.evaluate(reduce="sum")(loop.evaluate)(loader)
        with pytest.raises(UsageError, match=r"read a share and .* read everything.* Write parwrap.total\(values, of=loader\)"):
            parwrap.total(evaluated)
        assert of_one_process(24) == parwrap.total(evaluated, of=loader)
        assert of_one_process(24) == parwrap.reduce_sum(trained)
        assert of_one_process(24) == parwrap.total(parwrap.evaluate(reduce="sum")(loop.evaluate)(loader)), "no other pass since"


def test_on_one_process_values_are_as_they_are():
    tensor = torch.tensor([1.0], requires_grad=True)

    assert {"seen": 3, "mean": 0.5} == parwrap.total({"seen": 3, "mean": 0.5})
    assert torch.equal(tensor, parwrap.total(tensor, of=None))
    with pytest.raises(UsageError, match="not str"):
        parwrap.total("all")


@pytest.mark.ranks(2)
def test_reduce_sum_of_equal_numbers_after_a_whole_pass_names_total_once():
    train, val = DataLoader(dataset(24), 4), DataLoader(dataset(10), 4)
    with parwrap.distributed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop = Loop()
        assert of_one_process(24) == parwrap.reduce_sum(loop.train(train))
        for _ in range(2):
            seen = loop.evaluate(val)
            parwrap.any_rank(True)
            parwrap.reduce_sum(parwrap.rank())
            parwrap.reduce_sum(seen)

    texts = [str(each.message) for each in said if "reduce_sum" in str(each.message)]
    assert 1 == len(texts)
    assert "2 times that of one process. parwrap.total(values, of=loader)" in texts[0]


class Crops(TensorDataset):
    """Each sample makes four rows of a batch."""

    def __getitem__(self, index):
        return (super().__getitem__(index)[0].expand(4),)


def rows_of_crops(samples):
    return (torch.cat([x for (x,) in samples])[:, None],)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("loader", "read"),
    [
        (DataLoader(dataset(24), 4), "read 12 of 24 samples"),
        (DataLoader(Crops(*dataset(20).tensors), 2, collate_fn=rows_of_crops), "read 10 of 20 samples"),
        (DataLoader(dataset(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, False)), "read 4 of 8 samples"),
    ],
)
def test_a_share_is_said_once_a_run_and_counts_samples_of_the_dataset(capsys, loader, read):
    with parwrap.distributed():
        loop = Loop()
        for epoch in range(3):
            loop.train(loader)
            if not epoch:
                assert "" == capsys.readouterr().err, "the script may total its numbers next"
        loop.train(parwrap.shard(DataLoader(dataset(24), 4)))
    said = capsys.readouterr().err.splitlines()

    assert ([1] if parwrap.is_rank_zero() else []) == [line.count(f"{read} on each of 2 ranks") for line in said]
    assert all("test_total.py:" in line and "parwrap.total(correct, of=loader)" in line for line in said)


@pytest.mark.ranks(2)
def test_a_share_is_said_of_passes_of_one_batch_for_every_step(capsys):
    loader = DataLoader(dataset(24), 4)
    with parwrap.distributed():
        loop = Loop()
        for _ in range(3):
            loop.train([next(iter(loader))])
    said = capsys.readouterr().err.splitlines()

    assert ([1] if parwrap.is_rank_zero() else []) == [line.count("read 4 of 24 samples on each of 2 ranks") for line in said]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("total", ["total", "reduce_sum", "gather", "quiet", "nothing"])
def test_a_script_that_totals_its_numbers_is_told_nothing(capsys, monkeypatch, total):
    if total == "quiet":
        monkeypatch.setenv("PARWRAP_QUIET", "1")
    with parwrap.distributed():
        loop = Loop()
        for _ in range(2):
            seen = loop.train(parwrap.shard(DataLoader(Numbers(12), 2)))["seen"]
            if total in ("total", "reduce_sum", "gather"):
                getattr(parwrap, total)(seen)

    told = "read 6 samples on each of 2 ranks" in capsys.readouterr().err
    assert (total == "nothing" and parwrap.is_rank_zero()) == told
