"""What a whole batch does at its edges: one rank alone, saving, the end of a function, options."""

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError
from parwrap.options import Options


def batches(rows=6):
    return DataLoader(TensorDataset(torch.arange(2.0 * rows).view(rows, 2)), batch_size=rows)


@pytest.mark.ranks(2)
def test_rows_after_the_function_are_an_error_with_their_line():
    kept = []
    with parwrap.distributed(batch="whole"):
        kept.extend(x for (x,) in batches())

    with pytest.raises(UsageError, match=r"test_whole_batch.py:\d+ uses rows of a batch after the function"):
        kept[0].sum()


@pytest.mark.ranks(2)
def test_returned_rows_are_collected():
    @parwrap.distributed(batch="whole")
    def read():
        return {"x": [x for (x,) in batches()]}

    found = read()["x"][0]
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.arange(12.0).view(6, 2))


@pytest.mark.ranks(2)
def test_a_function_on_rank_0_alone_gets_collected_rows_and_cannot_collect():
    seen = []

    @parwrap.rank_zero_only
    def log(x, total):
        seen.append((x.shape, x.sum().item(), float(total)))

    @parwrap.rank_zero_only
    def collect():
        with pytest.raises(UsageError, match="needs rows of other ranks in code that only one rank runs"):
            (held[0] * 2).cumsum(0)

    held = []
    with parwrap.distributed(batch="whole"):
        for (x,) in batches():
            held.append(x)
            log(x, x.mean())
            collect()

    assert seen == ([(torch.Size([6, 2]), 66.0, 5.5)] if parwrap.is_rank_zero() else [])


@pytest.mark.ranks(2)
def test_a_checkpoint_with_rows_in_it_holds_all_of_them(tmp_path):
    model, file = nn.Linear(2, 2), io.BytesIO()
    with parwrap.distributed(batch="whole"):
        for (x,) in batches():
            torch.save({"model": model.state_dict(), "x": x, "mean": x.mean()}, file)
    file.seek(0)
    found = torch.load(file)

    assert torch.equal(found["x"], torch.arange(12.0).view(6, 2))
    assert found["mean"].item() == 5.5


@pytest.mark.ranks(2)
def test_total_gather_and_evaluate_leave_what_is_whole():
    @parwrap.evaluate(reduce="sum")
    def evaluated(loader):
        return sum(x.sum().item() for (x,) in loader)

    with parwrap.distributed(batch="whole"):
        loader = batches()
        for (x,) in loader:
            assert parwrap.is_rows(x)
            assert parwrap.total({"sum": x.sum()}, of=loader)["sum"].item() == 66.0
            assert torch.equal(torch.cat(parwrap.gather(x)), torch.arange(12.0).view(6, 2))
            assert parwrap.gather_with_grad(x).shape == (6, 2)
        assert evaluated(loader) == 66.0


@pytest.mark.ranks(2)
def test_a_batch_of_fewer_samples_than_ranks_and_a_replicated_loader_are_whole():
    with parwrap.distributed(batch="whole"):
        with pytest.warns(UserWarning, match="makes batches of 1 sample, which 2 ranks cannot share"):
            assert [parwrap.is_rows(x) for (x,) in batches(1)] == [False]
        assert [parwrap.is_rows(x) for (x,) in parwrap.replicate(batches())] == [False]


@pytest.mark.ranks(2)
def test_a_module_that_looks_across_the_batch_runs_whole_and_is_named(recwarn):
    class Centered(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    torch.manual_seed(0)
    model = Centered(2, 1)
    x = torch.arange(12.0).view(6, 2)
    with parwrap.distributed(batch="whole"):
        (found,) = [model(x) for (x,) in batches()]
        assert torch.allclose(found, model(x))

    assert any("calls Centered on the whole batch on every rank" in str(each.message) for each in recwarn)


@pytest.mark.ranks(2)
def test_a_number_that_is_no_mean_is_found_in_the_batch_where_it_shows():
    class Perplexity(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.arange(4.0)[:, None])

        def forward(self, x):
            share = nn.functional.one_hot((x - self.codes.T).abs().argmin(1), 4).float().mean(0)
            return x * 2, torch.exp(-(share * (share + 1e-10).log()).sum())

    model = Perplexity()
    data = TensorDataset(torch.cat([torch.zeros(8, 1), torch.arange(8.0)[:, None] / 2]))
    alone = [model(x)[1].item() for (x,) in DataLoader(data, 8)]
    with parwrap.distributed(batch="whole"):
        together = [model(x)[1].item() for (x,) in DataLoader(data, 8)]

    assert together == pytest.approx(alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_each_strategy_that_averages_gives_the_weights_of_one_process(strategy):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            for (x,) in DataLoader(TensorDataset(torch.arange(10.0).view(5, 2)), 3):
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    together = parwrap.distributed(batch="whole", strategy=strategy)(train)()
    for mine, right in zip(together, train(), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"uneven": "join"}, "uneven='join' has no effect with batch='whole'"),
        ({"lr": "linear"}, "lr='linear' has no effect with batch='whole'"),
        ({"loss": "sum"}, "loss='sum' has no effect"),
        ({"strategy": "local_sgd"}, "batch='whole' needs gradients that are averaged in each backward"),
    ],
)
def test_options_that_mean_nothing_for_a_whole_batch_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        Options(batch="whole", **options)
