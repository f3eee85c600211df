"""Loaders of every kind are shared out: nothing is left out, nothing comes twice, and all ranks take equally many steps."""

import math
import warnings
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import parwrap
from trained_on import Setup

SAMPLES = 46


class Backwards(Sampler):
    """The even samples, from the last on."""

    def __iter__(self):
        return iter(range(SAMPLES - 2, -1, -2))

    def __len__(self):
        return SAMPLES // 2


class Growing(Sampler):
    """Batches of 1, 2, 3, ... samples, whose order is new in each pass."""

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        for size in range(1, len(self) + 1):
            yield order[size * (size - 1) // 2 : size * (size + 1) // 2]

    def __len__(self):
        return 10


class NoLength(Dataset):
    """Only its sampler knows what there is."""

    def __getitem__(self, index):
        return range(SAMPLES)[index]


class Own(DataLoader):
    """With an ``__init__``, ``__iter__`` and ``__len__`` of its own."""

    def __init__(self, samples, *, doubled=False):
        super().__init__(range(samples), batch_size=5, shuffle=True)
        self.doubled = doubled

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2 if self.doubled else batch

    def __len__(self):
        return super().__len__()


def huggingface(streaming, **options):
    dataset = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed").Dataset.from_dict(
        {"x": list(range(SAMPLES))}
    )
    dataset = dataset.to_iterable_dataset(num_shards=4) if streaming else dataset.with_format("torch")
    return DataLoader(dataset, batch_size=4, **options)


KINDS = {
    "drop_last": lambda: DataLoader(range(SAMPLES), batch_size=4, shuffle=True, drop_last=True),
    "not batched": lambda: DataLoader(torch.arange(SAMPLES), batch_size=None, shuffle=True),
    "custom sampler": lambda: DataLoader(range(SAMPLES), batch_size=4, sampler=Backwards()),
    "custom sampler, not batched": lambda: DataLoader(torch.arange(SAMPLES), batch_size=None, sampler=Backwards()),
    "custom sampler, no length": lambda: DataLoader(NoLength(), batch_size=4, sampler=Backwards()),
    "batches of varying size": lambda: DataLoader(range(SAMPLES), batch_sampler=Growing()),
    "weighted": lambda: DataLoader(range(SAMPLES), batch_size=4, sampler=WeightedRandomSampler(torch.arange(46.0), SAMPLES)),
    "subset": lambda: DataLoader(range(SAMPLES), batch_size=4, sampler=SubsetRandomSampler(range(20, 46)), drop_last=True),
    "generator": lambda: DataLoader(range(SAMPLES), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "pin_memory": lambda: DataLoader(range(SAMPLES), batch_size=4, num_workers=1, pin_memory=True),
    "subclass": lambda: Own(SAMPLES, doubled=True),
    "stateful": lambda: StatefulDataLoader(range(SAMPLES), batch_size=4, shuffle=True),
    "stateful with workers": lambda: StatefulDataLoader(range(SAMPLES), batch_size=4, num_workers=2, persistent_workers=True),
}
HUGGING_FACE = {
    "map": lambda: huggingface(streaming=False, shuffle=True),
    "streaming": lambda: huggingface(streaming=True),
    "streaming, workers": lambda: huggingface(streaming=True, num_workers=2),
}


def samples_of(batch):
    return torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch).reshape(-1).tolist()


def shared_out(kind):
    torch.manual_seed(1)
    Setup()
    build = (KINDS | HUGGING_FACE)[kind]
    alone = [[samples_of(batch) for batch in loader] for loader in [build()] for _ in range(2)]
    with parwrap.distributed(seed=1):
        setup, loader = Setup(), build()
        for batches in alone:
            mine = [(samples_of(batch), setup.step())[0] for batch in loader]
            everyones = parwrap.gather(mine)
            seen = Counter(sample for each in everyones for batch in each for sample in batch)
            expected = Counter(sample for batch in batches for sample in batch)
            filled = (parwrap.world_size() - 1) * max(map(len, batches))

            assert {len(mine)} == {len(each) for each in everyones}
            assert kind.startswith("streaming") or len(mine) == len(loader)
            assert (seen - expected).total() <= filled
            assert not expected - seen or kind == "drop_last"  # which drops from each rank's share
            assert kind != "drop_last" or len(mine) == math.ceil(SAMPLES / parwrap.world_size()) // 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_on_two_ranks(kind):
    shared_out(kind)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", KINDS)
def test_on_three_ranks(kind):
    shared_out(kind)


@pytest.mark.ranks(2)
def test_hugging_face_on_two_ranks():
    for kind in HUGGING_FACE:
        shared_out(kind)


@pytest.mark.ranks(3)
def test_hugging_face_on_three_ranks():
    for kind in HUGGING_FACE:
        shared_out(kind)


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class Endless(DataLoader):
    """One pass for all epochs, which begins when the loader is built, as people write it to keep workers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.ranks(2)
def test_a_loader_that_is_one_pass_is_dealt_out_if_it_is_built_after_the_optimizer():
    with parwrap.distributed():
        setup, loader = Setup(), Endless(range(SAMPLES), batch_size=4, num_workers=1)
        seen = parwrap.gather([(samples_of(batch), setup.step())[0] for batch in loader])

    assert {2} == set(Counter(sample for each in seen for batch in each for sample in batch).values())


@pytest.mark.ranks(2)
def test_a_loader_that_is_one_pass_is_dealt_out_too_if_it_is_built_before_and_read_after():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        loader, setup = Endless(range(SAMPLES), batch_size=4), Setup()
        seen = parwrap.gather([(samples_of(batch), setup.step())[0] for batch in loader])

    assert {2} == set(Counter(sample for each in seen for batch in each for sample in batch).values())
