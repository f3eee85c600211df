"""batch="global" where loops train again on batches that they have kept, and where ranks would pair parts of different batches."""

import itertools
import random
import re
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import parwrap
from test_batches_drawn_ahead import Trained, numbers
from warm_command import run as run_command


def replayed(samples, criterion):
    trained = Trained(criterion)
    for x, y in itertools.islice(itertools.cycle(DataLoader(numbers(samples), batch_size=8)), 9):
        trained.step(x, y)
    return trained.weights


def drawn_again(samples, criterion):
    """As from the buffer of a replay."""
    trained, kept = Trained(criterion), []
    for x, y in DataLoader(numbers(samples), batch_size=8):
        kept.append((x, y))
        trained.step(x, y)
    generator = random.Random(0)
    for _ in range(7):
        trained.step(*generator.choice(kept))
    return trained.weights


def followed_by_other_data(samples, criterion, rows=11):
    trained = Trained(criterion)
    for x, y in DataLoader(numbers(samples), batch_size=8):
        trained.step(x, y)
    for _ in range(3):
        trained.step(*numbers(rows).tensors)
    return trained.weights


def followed_by_a_sample_of_other_data(samples, criterion):
    """As many as the last batch has on one rank, of which variables still hold the tensors."""
    return followed_by_other_data(samples, criterion, rows=1)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("loop", [replayed, drawn_again, followed_by_other_data, followed_by_a_sample_of_other_data])
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_parts_that_are_trained_on_again_count_by_their_samples(size, loop, loss):
    if loss == "sum" and loop in (followed_by_other_data, followed_by_a_sample_of_other_data):
        pytest.skip("of what no loader has split, every rank has the whole sum")

    def criterion(output, target):
        return nn.functional.mse_loss(output, target, reduction=loss) / (1 if loss == "mean" else 10)

    for samples in (17, 21):
        expected = loop(samples, criterion)
        with parwrap.distributed(batch="global", loss=loss):
            assert expected == pytest.approx(loop(samples, criterion), abs=1e-12)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_parts_of_one_size_count_by_the_batch_whose_tensors_the_loss_has_saved(size, views):
    """Of 20 samples in batches of 3, the last batch has 2: one rank has one sample of every batch."""

    def loop():
        trained, kept = Trained(), []
        for x, y in DataLoader(numbers(20), batch_size=3):
            kept.append((x[:], y[:]) if views else (x, y))
            trained.step(x, y)
        for x, y in reversed(kept):
            trained.step(x, y)
        return trained.weights

    expected = loop()
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(loop(), abs=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_sparse_matrix_that_the_loss_saves_is_in_no_batch():
    """As the Laplacian of a graph network."""
    matrix = torch.eye(2, dtype=torch.float64).to_sparse()

    def loop():
        trained, kept = Trained(), []
        for x, y in DataLoader(numbers(20), batch_size=3):
            kept.append((x, y))
            trained.step(x, y)
        for x, y in reversed(kept):
            trained.optimizer.zero_grad()
            trained.criterion(trained.model(torch.sparse.mm(matrix, x.T).T), y).backward()
            trained.optimizer.step()
        return trained.weights

    expected = loop()
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(loop(), abs=1e-12)


def first_of_each_pass(loader, trained, change):
    for _ in range(3):
        x, y = next(iter(loader))
        x, y = change(x), change(y)
        trained.step(x, y)


def first_again_and_again(loader, trained, change):
    x, y = (change(each) for each in next(iter(loader)))
    trained.step(x, y, times=3)


def broken_off(loader, trained, change):
    for _ in range(2):
        for index, (x, y) in enumerate(loader):  # noqa: B007 - they are read after the loop
            if index:
                break
        trained.step(change(x), change(y))


def several_first(loader, trained, change):
    kept = [[change(each) for each in next(iter(loader))] for _ in range(3)]
    for x, y in kept:
        trained.step(x, y)


def looked_at_before(loader, trained, change):
    kept = [change(each) for each in next(iter(loader))]  # noqa: F841 - it stays alive
    for u, v in loader:
        trained.step(u, v)
    trained.step(*numbers(8).tensors)


def one_before_other_data(loader, trained, change):
    kept = [change(each) for each in next(iter(loader))]  # noqa: F841 - it stays alive
    trained.step(*numbers(8).tensors)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize(
    "loop", [first_of_each_pass, first_again_and_again, broken_off, several_first, looked_at_before, one_before_other_data]
)
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_batch_of_a_pass_that_was_broken_off_for_it_counts_by_its_samples(size, loop, loss):
    if loss == "sum" and loop in (looked_at_before, one_before_other_data):
        pytest.skip("of what no loader has split, every rank has the whole sum")

    def criterion(output, target):
        return nn.functional.mse_loss(output, target, reduction=loss) / (1 if loss == "mean" else 10)

    def weights(batch_size, change):
        torch.manual_seed(0)
        trained = Trained(criterion)
        loop(DataLoader(numbers(66), batch_size, shuffle=True), trained, change)
        return trained.weights

    for batch_size in (15, 16):
        for change in (lambda x: x, torch.clone):  # a copy, as on another device
            expected = weights(batch_size, change)
            with parwrap.distributed(batch="global", loss=loss):
                assert expected == pytest.approx(weights(batch_size, change), abs=1e-12)


@pytest.mark.ranks(2)
def test_a_loss_over_first_batches_whose_parts_count_differently_is_said():
    trained = Trained()
    loaders = [DataLoader(numbers(32), batch_size, shuffle=True) for batch_size in (15, 16)]
    with parwrap.distributed(batch="global"):
        (x, y), (u, v) = (next(iter(loader)) for loader in loaders)
        loss = trained.criterion(trained.model(x), y) + trained.criterion(trained.model(u), v)
        with pytest.warns(UserWarning, match=r"test_kept_batches.py:\d+ belongs to: it may cover several batches"):
            loss.backward()


@pytest.mark.ranks(2)
def test_a_loss_over_all_batches_of_a_pass_whose_last_is_smaller_is_said():
    trained = Trained()
    with (
        parwrap.distributed(batch="global"),
        pytest.warns(UserWarning, match=r"test_kept_batches.py:\d+ belongs to: it may cover several batches"),
    ):
        sum(trained.criterion(trained.model(x), y) for x, y in DataLoader(numbers(21), batch_size=8)).backward()


SKIPS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.arange(21.0).view(-1, 1)
x[{bad}] = float("nan")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for epoch in range(2):
    for (batch,) in DataLoader(TensorDataset(x), batch_size=5):
        loss = model(batch).square().mean()
        if not torch.isfinite({decision}):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(*[p.item() for p in model.parameters()])
"""


def run(tmp_path, source, *command):
    (tmp_path / "train.py").write_text(source)
    return run_command([sys.executable, *command, "train.py"], timeout=60, cwd=tmp_path)


ON_TWO_RANKS = ("-m", "parwrap.run", "--nproc-per-node", "2", "--batch", "global")


@pytest.mark.parametrize("bad", [2, 8, 19])
def test_a_rank_that_leaves_out_its_part_of_a_batch_alone_is_an_error_that_names_the_batches(tmp_path, bad):
    ended = run(tmp_path, SKIPS.format(bad=bad, decision="loss"), *ON_TWO_RANKS)

    assert ended.returncode
    assert "RankMismatchError: the ranks run backward passes of different batches" in ended.stderr
    assert re.search(r"rank 0 is at backward \(\S+train.py:15, batch \d\); rank 1 is at .*py:15, batch \d\)", ended.stderr)
    assert "the same decision on all ranks, for example from parwrap.reduce_mean(loss)" in ended.stderr


def test_with_the_mean_of_the_loss_all_ranks_leave_out_the_batch_as_one_process_does(tmp_path):
    expected = run(tmp_path, SKIPS.format(bad=2, decision="loss"))
    actual = run(tmp_path, "import parwrap\n" + SKIPS.format(bad=2, decision="parwrap.reduce_mean(loss)"), *ON_TWO_RANKS)

    assert [float(each) for each in expected.stdout.split()] == pytest.approx([float(each) for each in actual.stdout.split()], abs=1e-6)


class Episodes(Sampler):
    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6, 7]])

    def __len__(self):
        return 2


@pytest.mark.ranks(2)
def test_batches_of_a_sampler_of_the_scripts_own_are_said_to_be_cut():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, expected in {"global": 1, "per_rank": 0}.items():
        with parwrap.distributed(batch=batch), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                for (x,) in DataLoader(TensorDataset(torch.ones(8, 1)), batch_sampler=Episodes()):
                    model(x).sum().backward()
                    optimizer.step()

        texts = [str(each.message) for each in said if "cuts each batch of a Episodes into 2 parts" in str(each.message)]
        assert expected == len(texts), texts
        assert all(re.search(r'test_kept_batches.py:\d+.* use batch="per_rank"', text) for text in texts)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*were not computed by backward")
def test_gradients_by_autograd_grad_of_a_kept_batch_are_said():
    trained = Trained()
    parameters = list(trained.model.parameters())

    def step_without_backward(x, y):
        for p, gradient in zip(parameters, torch.autograd.grad(trained.criterion(trained.model(x), y), parameters), strict=True):
            p.grad = gradient
        trained.optimizer.step()

    with parwrap.distributed(batch="global"):
        kept = [batch for batch in DataLoader(numbers(21), batch_size=8) if not trained.step(*batch)]
        with pytest.warns(
            UserWarning, match=r"test_kept_batches.py:\d+ belongs to: it may cover several batches, or one of several that the script kept"
        ):
            step_without_backward(*kept[-1])
