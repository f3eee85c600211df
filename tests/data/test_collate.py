"""Batches of samples of different lengths, and batches that were padded too far."""

import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

from parwrap import pad_collate
from parwrap.data.collate import trimmed
from parwrap.errors import UsageError

Labelled = namedtuple("Labelled", ["tokens", "label"])


def sequences(*lengths, width=()):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 90, (length, *width), generator=generator) for length in lengths]


def same(one, other):
    """Whether two batches are the same in what they hold and are made of."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("width", [(), (3,)])
def test_it_pads_as_torchs_pad_sequence_does(width):
    tensors = sequences(3, 1, 4, width=width)
    expected = pad_sequence(tensors, batch_first=True, padding_value=7)

    assert same(expected, pad_collate(pad_value=7)(tensors))
    assert same([expected, torch.tensor([0, 1, 2])], pad_collate(pad_value=7)([(each, i) for i, each in enumerate(tensors)]))
    assert same(expected, pad_collate(pad_value=7)([each.numpy() for each in tensors]))
    if not width:
        assert same(expected, pad_collate(pad_value=7)([each.tolist() for each in tensors]))


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: torch.full((2, 3), i),
        lambda i: (np.ones(3) * i, i, 0.5, "text"),
        lambda i: {"x": torch.ones(2), "of": {"y": i, "z": (torch.zeros(2), "a")}},
        lambda i: Labelled(torch.ones(3), i),
        lambda i: i,
    ],
)
def test_what_is_of_one_shape_is_what_default_collate_makes_of_it(sample):
    samples = [sample(i) for i in range(3)]

    assert same(default_collate(samples), pad_collate()(samples))


def test_fields_in_other_containers_are_padded_too():
    long, short = sequences(4, 2)
    batch = pad_collate()([Labelled(long, {"extra": short}), Labelled(short, {"extra": long})])

    assert same(Labelled(pad_sequence([long, short], True), {"extra": pad_sequence([short, long], True)}), batch)


def test_dicts_get_an_attention_mask_and_labels_the_index_that_losses_ignore():
    samples = [
        {"input_ids": [5, 6, 7], "labels": [1, 2, 3], "token_type_ids": [0, 1, 1], "class": 4},
        {"input_ids": [8], "labels": [9], "token_type_ids": [1], "class": 5},
    ]
    expected = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 50, 50]]),
        "labels": torch.tensor([[1, 2, 3], [9, -100, -100]]),
        "token_type_ids": torch.tensor([[0, 1, 1], [1, 0, 0]]),
        "class": torch.tensor([4, 5]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }

    assert same(expected, pad_collate(pad_value=50)(samples))
    values = {"input_ids": 50, "labels": -1}
    assert same(expected | {"labels": torch.tensor([[1, 2, 3], [9, -1, -1]])}, pad_collate(values)(samples))
    masked = [{"attention_mask": [1] * len(each["input_ids"]), **each} for each in samples]
    assert same(expected["attention_mask"], pad_collate(pad_value=50)(masked)["attention_mask"])


def test_a_mask_is_added_where_it_is_asked_for_and_left_out_where_not():
    long, short = sequences(3, 2)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    padded = pad_sequence([long, short], True)

    assert same([padded, torch.tensor([0, 1]), mask], pad_collate(attention_mask=True)([(long, 0), (short, 1)]))
    assert same([padded, mask], pad_collate(attention_mask=True)([long, short]))
    assert same({"x": padded, "attention_mask": mask}, pad_collate(attention_mask=True)([{"x": long}, {"x": short}]))
    assert same({"input_ids": padded}, pad_collate(attention_mask=False)([{"input_ids": long}, {"input_ids": short}]))


def test_lengths_are_rounded_up_also_where_all_of_a_batch_are_the_same():
    def rounded(*lengths, **options):
        collate = pad_collate(multiple_of=8, attention_mask=True, **options)
        return collate([(each, each.bool(), torch.ones(5)) for each in sequences(*lengths)])

    assert [[2, 8], [2, 8], [2, 5], [2, 8]] == [list(each.shape) for each in rounded(6, 6)]
    assert [[2, 16], [2, 16], [2, 5], [2, 16]] == [list(each.shape) for each in rounded(9, 2)]
    assert [[2, 8], [2, 8], [2, 5], [2, 8]] == [list(each.shape) for each in rounded(5, 5, fields=[0, 1])]
    assert [6, 6] == rounded(6, 6)[3].sum(dim=1).tolist()


def test_empty_sequences_take_the_dtype_of_the_others():
    assert same(torch.tensor([[0, 0], [4, 5]]), pad_collate()([[], [4, 5]]))


def test_worker_processes_pad():
    samples = [(each, 1) for each in sequences(3, 2)]
    collate = pickle.loads(pickle.dumps(pad_collate(multiple_of=4)))
    assert same(pad_collate(multiple_of=4)(samples), collate(samples))
    (batch,) = DataLoader(samples, batch_size=2, collate_fn=collate, num_workers=1)

    assert same(collate(samples), batch)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: pad_collate(multiple_of=0), "multiple_of=0 is not a positive integer."),
        (lambda: pad_collate(multiple_of=True), "multiple_of=True is not a positive integer."),
        (lambda: pad_collate(fields="x"), "fields='x' is a single name: pass a list of names, such as ['x']."),
        (
            lambda: pad_collate()([(torch.ones(3, 4), 0), (torch.ones(2, 5), 1)]),
            "the field 0 of a batch: shapes (2, 5) and (3, 4) differ beyond the first dimension, which alone can be padded. Make "
            "the other dimensions equal.",
        ),
        (
            lambda: pad_collate()([torch.ones(2, 5), torch.ones(2, 4)]),
            "the samples of a batch: shapes (2, 4) and (2, 5) differ beyond the first dimension, which alone can be padded. Make "
            "the other dimensions equal.",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused(make, text):
    with pytest.raises(UsageError) as refusal:
        make()

    assert text == str(refusal.value)


def padded_to(length, *tensors, value=0):
    return torch.stack([torch.nn.functional.pad(each, (0, length - len(each)), value=value) for each in tensors])


def test_a_batch_that_was_padded_too_far_is_cut_to_its_longest():
    tensors = sequences(5, 3)
    far, near, labels = padded_to(12, *tensors), padded_to(5, *tensors), torch.tensor([0, 1])

    assert same([near, labels], trimmed([far, labels], pad_value=0))
    assert same(near, trimmed(far, pad_value=0))
    assert same([padded_to(8, *tensors), labels], trimmed([far, labels], pad_value=0, multiple_of=8))
    assert same(Labelled(near, labels), trimmed(Labelled(far, labels), pad_value=0))
    assert same([near, near != 0], trimmed([far, far != 0], pad_value=0))
    assert same([far, labels], trimmed([far, labels], pad_value=None))


def test_an_attention_mask_tells_what_is_padding():
    tensors = sequences(5, 3)
    far = {"input_ids": padded_to(9, *tensors, value=50), "attention_mask": padded_to(9, *map(torch.ones_like, tensors))}
    far["labels"] = padded_to(9, *tensors, value=-100)
    near = {name: each[:, :5] for name, each in far.items()}

    assert same(near, trimmed(dict(far), pad_value=None))
    assert same(near, trimmed(dict(far), pad_value=50))


def test_what_is_no_padding_is_never_cut_off():
    ids = padded_to(9, *sequences(5, 3))
    soft_labels = torch.rand(2, 9)
    kept = trimmed([ids, soft_labels], pad_value=0)

    assert same([ids[:, :5], soft_labels], kept)
    assert same([soft_labels * 0], trimmed([soft_labels * 0], pad_value=0))  # numbers, but no tokens
    left_padded = ids.flip(1)
    assert same(left_padded, trimmed(left_padded, pad_value=0))


def test_sequences_of_vectors_are_cut_where_they_are_named():
    vectors = torch.zeros(2, 6, 3)
    vectors[0, :4] = 1.0
    batch = [torch.tensor([0, 1]), vectors]

    assert same([batch[0], vectors[:, :4]], trimmed(list(batch), 0, field=1))
    assert same(batch, trimmed(list(batch), 0, field="no such field"))


def test_a_batch_of_nothing_but_padding_keeps_one_column():
    assert same(torch.zeros(2, 1, dtype=torch.long), trimmed(torch.zeros(2, 7, dtype=torch.long), pad_value=0))


@pytest.mark.parametrize(
    "samples",
    [[[1], [1, 2.5]], [torch.tensor([1]), torch.tensor([1, 2.5])], [np.array([1]), np.array([1, 2.5], dtype=np.float32)]],
)
def test_whole_numbers_among_others_are_made_what_the_others_are(samples):
    assert [[1, 0], [1, 2.5]] == pad_collate()(samples).tolist()


def test_a_collate_fn_that_was_not_made_yet_is_refused():
    with pytest.raises(UsageError, match=r"pad_collate was called with a batch: write collate_fn=pad_collate\(\), with parentheses"):
        next(iter(DataLoader([[1], [2, 3]], batch_size=2, collate_fn=pad_collate)))


@pytest.mark.parametrize(("value", "dtype"), [(0.5, torch.int64), (-1, torch.uint8)])
def test_a_value_that_the_dtype_has_not_is_refused(value, dtype):
    with pytest.raises(
        UsageError, match=rf"the samples, of {dtype}, cannot be padded with {value}: choose another pad_value, or convert the sequences"
    ):
        pad_collate(pad_value=value)([torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)])


def test_sequences_that_require_grad_keep_their_graph():
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    pad_collate()([first, second]).sum().backward()

    assert (torch.equal(first.grad, torch.ones(2)), torch.equal(second.grad, torch.ones(3))) == (True, True)


@pytest.mark.parametrize("value", [300, float("nan"), 0.5, -1])
def test_a_value_that_the_dtype_does_not_have_is_refused(value):
    with pytest.raises(
        UsageError, match=f"the samples, of torch.uint8, cannot be padded with {value}: choose another pad_value, or convert"
    ):
        pad_collate(pad_value=value)([torch.ones(2, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)])
