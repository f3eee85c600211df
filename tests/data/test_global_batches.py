"""What batch="global" does with loaders that yield their items as they are, and what it says of batch sizes in the code."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import parwrap


def numbers(samples):
    x = torch.linspace(-1, 1, samples, dtype=torch.float64).view(-1, 1)
    return TensorDataset(torch.cat([x, x**2], dim=1), x**3)


def trained(loader):
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("order", [SequentialSampler, RandomSampler])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_indices_that_a_sampler_gives_in_batches_are_split(size, order):
    def loader():
        sampler = BatchSampler(order(range(21)), batch_size=8, drop_last=False)
        return DataLoader(numbers(21), batch_size=None, sampler=sampler)

    torch.manual_seed(0)
    expected = trained(loader())
    with parwrap.distributed(batch="global", seed=0):
        of_a_pass = loader()
        actual = trained(of_a_pass)

        assert 3 == len(of_a_pass)
    assert expected == pytest.approx(actual, abs=1e-12)


class Ready(IterableDataset):
    def __iter__(self):
        return iter(DataLoader(numbers(32), batch_size=8))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dataset", [list(DataLoader(numbers(32), batch_size=8)), Ready()], ids=["list", "stream"])
def test_items_that_cannot_be_split_are_said(dataset):
    with (
        parwrap.distributed(batch="global"),
        pytest.warns(UserWarning, match=r"test_global_batches.py:\d+\): .* a step covers 2 of them") as all_,
    ):
        trained(DataLoader(dataset, batch_size=None))

    assert 1 == len(all_)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_items_of_batches_of_each_ranks_own_are_nothing_to_say():
    with parwrap.distributed():
        trained(DataLoader(list(DataLoader(numbers(32), batch_size=8)), batch_size=None))


class Fixed(nn.Module):
    """Thinks that it knows the batch size."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = nn.GRU(2, 3), torch.zeros(1, 8, 3)

    def forward(self, x):
        return self.layer(x[None].float(), self.hidden)[0]


def read(use):
    """A pass in which each batch is handed to ``use``."""
    kept = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for x, _ in DataLoader(numbers(32), batch_size=8):
        use(x)
    return kept


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fixed", ["shape", "hidden state"])
def test_an_error_about_shapes_says_which_part_of_a_batch_this_rank_had(fixed):
    use = Fixed() if fixed == "hidden state" else lambda x: x.reshape(8, 2, -1).view(8, 3)
    with pytest.raises(RuntimeError) as raised:
        parwrap.distributed(batch="global")(read)(use)

    note = "\n".join([*getattr(raised.value, "__notes__", ()), str(raised.value)])
    assert "with batch='global' this rank had 4 of the 8 samples of a batch" in note
    assert "try batch='per_rank'" in note


def fail(error):
    raise error


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "error"), [({}, RuntimeError("size")), ({"batch": "global"}, KeyError("size"))])
def test_other_errors_have_no_such_note(options, error):
    with pytest.raises(type(error)) as raised:
        parwrap.distributed(**options)(read)(lambda x: fail(error))

    assert not [note for note in getattr(raised.value, "__notes__", ()) if "had" in note and "samples" in note]


def left_at_a_smaller_batch(loader):
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader:
            if len(x) < loader.batch_size:
                break
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
def test_a_loop_that_leaves_out_every_part_for_its_length_is_told_that_nothing_was_trained(size):
    with (
        pytest.warns(
            UserWarning, match=r"nothing was trained, though the loop at .*`len\(x\) < loader.batch_size`, leaves out all of them"
        ),
        parwrap.distributed(batch="global"),
    ):
        left_at_a_smaller_batch(DataLoader(numbers(16), batch_size=8))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_first_batch_that_is_drawn_to_look_at_says_nothing():
    loader = DataLoader(numbers(16), batch_size=8)
    with parwrap.distributed(batch="global"):
        for x, _ in loader:
            assert len(x)
            break
    with parwrap.distributed():
        left_at_a_smaller_batch(loader)
    with parwrap.distributed(batch="global"):
        for x, _ in loader:
            assert len(x)
            break
        trained(loader)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_an_evaluation_that_builds_an_optimizer_is_no_training_that_was_left_out():
    loader = DataLoader(numbers(16), batch_size=8)
    with parwrap.distributed(batch="global"):
        model = nn.Linear(2, 1).double()
        torch.optim.SGD(model.parameters(), lr=0.1)
        next(iter(loader))
        model.eval()
        with torch.no_grad():
            assert [8, 8] == [len(x) for x, _ in loader]
