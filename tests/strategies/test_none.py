import io
import os
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError


def train(rate):
    """Three steps on all of the data, by one process."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen = []
    for x, y in DataLoader(TensorDataset(torch.arange(12.0).view(6, 2) / 12, torch.ones(6, 1)), batch_size=2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seen.append(x)
    return model, torch.cat(seen)


@pytest.mark.ranks(2)
def test_each_rank_trains_as_a_single_process_with_its_own_rate():
    heard = io.StringIO()
    with redirect_stderr(heard), parwrap.distributed(strategy="none"):
        model, seen = train(0.1 / (1 + parwrap.rank()))
    alone, all_of_it = train(0.1 / (1 + parwrap.rank()))

    assert torch.equal(alone.weight, model.weight)
    assert torch.equal(all_of_it, seen)
    assert 2 == len({tuple(weights) for weights in parwrap.gather(model.weight.flatten().tolist())})
    line = "parwrap: 2 ranks, gloo on cpu, strategy none: gradients are not averaged, every rank trains a separate model, no DataLoader "
    line += "was split: every rank trains on data that it reads or creates itself, seed 0\n"
    assert [line, ""] == parwrap.gather(heard.getvalue())


@pytest.mark.ranks(2)
def test_each_rank_has_its_own_buffers_files_evaluation_and_number_of_steps(tmp_path):
    @parwrap.evaluate
    def evaluate(model, loader):
        return sum(float(model(x).sum()) for (x,) in loader)

    with parwrap.distributed(strategy="none"):
        model = nn.BatchNorm1d(1)
        for step in range(1 + parwrap.rank()):
            model(torch.tensor([[1.0], [3.0]]) + step).sum().backward()
        model.eval()
        file = tmp_path / f"{parwrap.rank()}.pt"
        torch.save(model.state_dict(), file)
        assert parwrap.rank() + 1 == torch.load(file)["num_batches_tracked"]
        data = torch.arange(4.0).view(-1, 1)
        expected = float(model(data).sum().detach())
        assert expected == pytest.approx(evaluate(model, DataLoader(TensorDataset(data), batch_size=2)))
    assert ["0.pt", "1.pt"] == sorted(os.listdir(tmp_path))


@pytest.mark.ranks(2)
def test_a_mean_is_over_the_ranks_own_samples():
    with parwrap.distributed(strategy="none"):
        assert 3.0 + parwrap.rank() == parwrap.mean_over_ranks(torch.tensor(6.0 + 2 * parwrap.rank()), 2)


@pytest.mark.ranks(2)
def test_what_shares_a_batch_is_refused():
    inside = parwrap.sync_bn()
    with (
        parwrap.distributed(strategy="none"),
        pytest.raises(UsageError, match=r"sync_bn needs a shared batch: .* every rank trains on separate batches"),
    ):
        inside.__enter__()
    inside = parwrap.distributed(strategy="none")
    with parwrap.distributed(), pytest.raises(UsageError, match="strategy='none' is not possible inside strategy='ddp': pass it to the"):
        inside.__enter__()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": "global"}, "batch='global' says how ranks share a batch, but with strategy='none' each rank has all data"),
        ({"lr": "linear"}, "lr='linear' says how ranks share a batch"),
        ({"bucket_cap_mb": 5}, "bucket_cap_mb=5 has no effect with strategy='none': remove it, or choose .* 'ddp'"),
        ({"strategy": "non"}, "strategy='non' is not a valid value. Choose one of: 'ddp': gradients are averaged in every backward pass; "),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "none", **options})
