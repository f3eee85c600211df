"""The batches of plain loops under ``@uniform_length``."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import parwrap
from parwrap import UniformLengthBatchSampler
from parwrap.data.lengths import read_lengths
from parwrap.errors import UsageError
from texts import LONGEST, Texts, lengths_of, seen


def to_maximum(samples):
    """A collate function as many scripts have it."""
    texts, labels = zip(*samples, strict=True)
    return torch.stack([nn.functional.pad(text, (0, LONGEST - len(text))) for text in texts]), torch.tensor(labels)


def widths(batches, lengths):
    """How wide batches must be."""
    return [(batch, max(lengths[i] for i in batch)) for batch, _ in batches]


@pytest.mark.parametrize(
    ("dataset", "collate", "options"),
    [
        (Texts(pad_to=LONGEST), None, {"pad_value": 0}),
        (Texts(), to_maximum, {"pad_value": 0}),
        (Texts(), None, {}),
        (Texts(), None, {"length": 0}),
        (Texts(pad_to=LONGEST), None, {"pad_value": 0, "length": 0}),
        (Texts(pad_to=LONGEST), None, {"pad_value": 0, "length": lambda sample: int((sample[0] != 0).sum())}),
        (Texts(), to_maximum, {"pad_value": 0, "length": lengths_of(50)}),
    ],
)
def test_a_shuffled_loader_draws_batches_of_one_length_and_no_wider_than_need_be(dataset, collate, options):
    loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=collate)
    torch.manual_seed(0)
    with parwrap.uniform_length(**options):
        passes = [seen(loader) for _ in range(2)]
        length = len(loader)
    torch.manual_seed(0)
    drawn = iter(
        DataLoader(dataset, batch_sampler=UniformLengthBatchSampler(dataset.lengths, 8, seed=None), collate_fn=lambda batch: batch)
    )
    expected = [[sample[0][0].item() - 1 for sample in batch] for batch in drawn]

    assert expected == [batch for batch, _ in passes[0]]
    assert passes[0] != passes[1]
    for batches in passes:
        assert list(range(50)) == sorted(i for batch, _ in batches for i in batch)
        assert widths(batches, dataset.lengths) == batches
        assert length == len(batches) == 7
    assert LONGEST == seen(DataLoader(Texts(), batch_size=8, collate_fn=to_maximum))[0][1]


def test_loaders_that_are_not_shuffled_keep_their_order():
    dataset = Texts(pad_to=LONGEST)
    weighted = WeightedRandomSampler([1.0] * 50, 20, generator=torch.Generator().manual_seed(2))
    expected = list(WeightedRandomSampler([1.0] * 50, 20, generator=torch.Generator().manual_seed(2)))
    with parwrap.uniform_length(pad_value=0):
        in_order = seen(DataLoader(dataset, batch_size=8))
        drawn = seen(DataLoader(dataset, batch_size=8, sampler=weighted))

    assert list(range(50)) == [i for batch, _ in in_order for i in batch]
    assert expected == [i for batch, _ in drawn for i in batch]
    assert widths(in_order + drawn, dataset.lengths) == in_order + drawn


def test_samples_of_one_length_are_drawn_as_ever():
    loader = DataLoader(TensorDataset(torch.rand(20, 3, 5)), batch_size=4, shuffle=True)
    torch.manual_seed(0)
    expected = [batch.tolist() for (batch,) in loader]
    torch.manual_seed(0)
    with parwrap.uniform_length(pad_value=0):
        assert expected == [batch.tolist() for (batch,) in loader]


def test_samples_are_read_once_whatever_is_called_how_often_and_random_streams_stay():
    dataset = Texts()

    @parwrap.uniform_length
    def one_pass():
        return seen(DataLoader(dataset, batch_size=8, shuffle=True))

    torch.manual_seed(0)
    one_pass()
    after = torch.rand(1)
    one_pass()

    assert 50 + 2 * 50 == dataset.read
    torch.manual_seed(0)
    seen(DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=to_maximum))
    assert after == torch.rand(1)
    dataset.lengths.append(5)
    assert 51 == sum(len(batch) for batch, _ in one_pass())


def test_batches_are_counted_in_tokens():
    dataset = Texts(200)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    with parwrap.uniform_length(max_tokens=100, multiple_of=4):
        before = len(loader)
        batches = seen(loader)

    assert before == len(batches)
    assert all(len(batch) * width <= 100 for batch, width in batches)
    assert {0} == {width % 4 for _, width in batches}
    assert 10 < max(len(batch) for batch, _ in batches)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_make_the_same_batches(persistent):
    def passes(**options):
        torch.manual_seed(3)
        loader = DataLoader(Texts(pad_to=LONGEST), batch_size=8, shuffle=True, **options)
        with parwrap.uniform_length(pad_value=0):
            return [seen(loader) for _ in range(2)]

    first, second = passes(num_workers=1, persistent_workers=persistent)

    assert passes()[: 1 if persistent else 2] == [first, second][: 1 if persistent else 2]  # torch draws no new seed for lasting workers
    assert first != second
    assert list(range(50)) == sorted(i for batch, _ in second for i in batch)


def test_the_loader_of_the_user_stays_what_it_was():
    loader = DataLoader(Texts(), batch_size=8, shuffle=True, collate_fn=to_maximum)
    before = dict(vars(loader))
    with parwrap.uniform_length(pad_value=0):
        seen(loader)

        assert before == vars(loader)
    assert {LONGEST} == {width for _, width in seen(loader)}


def test_a_length_is_found_where_a_sample_says_it():
    masked = [{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}, {"input_ids": [0, 0, 0], "attention_mask": [1, 1, 1]}]
    image_and_text = [(torch.zeros(3, 4), torch.tensor([5])), (torch.zeros(3, 4), torch.tensor([5, 6]))]

    assert [2, 3] == read_lengths(masked, pad_value=0).tolist()
    assert [1, 2] == read_lengths(image_and_text).tolist() == read_lengths(image_and_text, 1).tolist()
    assert [3, 1] == read_lengths([[7, 8, 9], [4]]).tolist()
    assert [2, 3] == read_lengths([("ab", 0), ("abc", 1)], 0).tolist()
    assert read_lengths([("ab", 0), ("abc", 1)]) is None
    assert read_lengths([]) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"length": 1.5},
            "length=1.5 does not describe the lengths of samples: pass a function that returns the length of a sample, the name or index "
            "of the field whose length counts, such as the tokens, or a sequence of all lengths.",
        ),
        ({"pad_value": "0"}, "pad_value='0' is not a number."),
        ({"max_tokens": 0}, "max_tokens=0 is not a positive integer."),
        ({"multiple_of": None}, "multiple_of=None is not a positive integer."),
        ({"pad_valu": 0}, "parwrap.uniform_length has no option 'pad_valu'; did you mean 'pad_value'?"),
        (
            {"length": [3, 4]},
            "length= has 2 lengths, but the dataset of a shuffled DataLoader has 50 samples. Pass one length for each sample. If a "
            "script has several datasets, pass a function that takes a sample and returns its length.",
        ),
        (
            {"length": "text"},
            "length='text' does not name a sequence in samples of type tuple: pass the name or index of one, "
            "or a function that returns the length of a sample.",
        ),
        (
            {"length": 1},
            "length=1 does not name a sequence in samples of type tuple: pass the name or index of one, "
            "or a function that returns the length of a sample.",
        ),
        (
            {"length": lambda sample: 2 + sample[1], "max_tokens": 2},
            "sample 1 takes 3 tokens, more than the limit of a batch, max_tokens=2: raise max_tokens, or shorten or drop the sample.",
        ),
        (
            {"length": type},
            "length=<class 'type'> returned <class 'tuple'> for a sample, which is not a number of tokens: return an integer.",
        ),
    ],
)
def test_what_cannot_mean_anything_is_refused(options, text):
    with pytest.raises(UsageError) as refusal:
        parwrap.uniform_length(**options)(lambda: next(iter(DataLoader(Texts(), shuffle=True))))()

    assert text == str(refusal.value)


def test_the_innermost_counts():
    dataset = Texts(pad_to=LONGEST)
    with parwrap.uniform_length(pad_value=0):
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        with parwrap.uniform_length(pad_value=0, max_tokens=80):
            batches = seen(loader)

    assert len(UniformLengthBatchSampler(dataset.lengths, max_tokens=80)) == len(batches)
