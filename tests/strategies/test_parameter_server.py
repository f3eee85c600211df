"""Workers and parameter servers, against synchronous SGD of one process and by what each worker must see."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from served import Own, X, Y, adam, flat, train


@pytest.mark.ranks(3)
def test_with_staleness_0_two_workers_come_to_the_weights_of_one_process_with_the_whole_batch():
    alone = train(adam, schedule=True)
    together = parwrap.distributed(strategy="parameter_server", staleness=0, batch="global")(train)(adam, schedule=True)

    torch.testing.assert_close(flat(alone), flat(together), atol=1e-5, rtol=0)


@pytest.mark.ranks(3)
def test_with_staleness_0_steps_are_averages_of_the_workers_gradients_after_their_own_clipping():
    def by_hand():
        """Synchronous SGD by hand: two workers' gradients, clipped by each, averaged."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
        for _ in range(2):
            for step in range(2):
                several = []
                for worker in range(2):
                    rows = range(8 * step + worker, 8 * step + 8, 2)
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    several.append([p.grad.clone() for p in model.parameters()])
                for p, *grads in zip(model.parameters(), *several, strict=True):
                    p.grad = sum(grads) / 2
                optimizer.step()
        return model

    def build(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    together = parwrap.distributed(strategy="parameter_server", staleness=0, lr="linear")(train)(build, clip=True)

    torch.testing.assert_close(flat(by_hand()), flat(together), atol=1e-6, rtol=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", [{"batch": "global"}, {"uneven": "join"}])
def test_uneven_ends_count_by_samples_with_staleness_0(options):
    """5 batches of 2 and one of 1, of which workers get 3 each, or parts."""
    whole = 4 if "uneven" in options else 2
    alone = train(samples=11, batch_size=whole)
    together = parwrap.distributed(strategy="parameter_server", staleness=0, **options)(train)(samples=11, batch_size=2)

    torch.testing.assert_close(flat(alone), flat(together), atol=1e-5, rtol=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_every_rank_ends_with_the_same_weights_buffers_and_result_whatever_the_pace(staleness):
    @parwrap.distributed(strategy="parameter_server", staleness=staleness)
    def train_unevenly():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(2):
            model.train()
            for step in range(3 + 4 * parwrap.rank() * (1 - epoch)):  # worker 1 takes more steps in the first epoch
                optimizer.zero_grad()
                model(X[step : step + 4]).square().mean().backward()
                optimizer.step()
            model.eval()
            same = parwrap.gather([tensor.tolist() for tensor in model.state_dict().values()])
            assert same[0] == same[-1]
        return model, parwrap.rank(), optimizer.state_dict()["state"][0]["step"].item()

    model, rank, steps = train_unevenly()

    results = parwrap.gather(([tensor.tolist() for tensor in model.state_dict().values()], rank, steps))
    assert results[0] == results[2]  # a server returns what worker 0 does
    assert results[0][0] == results[1][0]
    assert (7 + 3 if staleness == 0 else 3 + 7 + 3 + 3) == steps
    assert not model[0].weight.isnan().any()


@pytest.mark.ranks(4)
def test_two_servers_hold_disjoint_parts_and_take_the_same_steps():
    alone = train(adam)
    together = parwrap.distributed(strategy="parameter_server", servers=2, staleness=0, batch="global")(train)(adam)

    torch.testing.assert_close(flat(alone), flat(together), atol=1e-5, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("local", [False, True])
def test_the_users_own_optimizer_steps_on_the_server_also_of_a_class_in_the_function(local):
    def train_with_own():
        class Local(Own):
            pass

        weight = nn.Parameter(torch.ones(1))
        optimizer = (Local if local else Own)([weight], lr=0.5, sign=-1)
        for _ in range(2):
            optimizer.zero_grad()
            (2 * weight).sum().backward()
            optimizer.step()
        return weight.item()

    assert 3.0 == parwrap.distributed(strategy="parameter_server")(train_with_own)()


@pytest.mark.ranks(2)
def test_sparse_gradients_change_only_their_rows():
    def embed():
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for rows in ([1, 2, 2], [4]):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        return table.weight.detach()

    assert torch.equal(embed(), parwrap.distributed(strategy="parameter_server")(embed)())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_that_waits_for_a_file_is_away_only_as_long_as_it_holds_up_who_writes_it(staleness, tmp_path, monkeypatch):
    """Worker 0 is late with each file of the first steps; in the end it takes two more before the last."""
    monkeypatch.setattr(parwrap.group.group, "POLLING", 0.03)  # so that a step can come before a worker has seen that the file is there

    @parwrap.distributed(strategy="parameter_server", staleness=staleness)
    def step_and_write():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        values = []
        for step in range(6 if parwrap.rank() == 0 else 4):
            optimizer.zero_grad()
            (weight * 10.0**-step * (1 + parwrap.rank())).sum().backward()
            optimizer.step()
            values.append(-weight.item())
            if step < 3:
                time.sleep(0.06 * (1 - parwrap.rank()))
                (tmp_path / "log").write_text(str(step))
                (tmp_path / "log").read_text()
        (tmp_path / "end").write_text("")
        (tmp_path / "end").read_text()
        return weight, values

    weight, values = step_and_write()

    if staleness == 0:
        averages = [1.5, 1.65, 1.665, 1.6665, 1.6666, 1.66661]
        assert pytest.approx(averages[: 4 if parwrap.rank() == 1 else 6], abs=1e-6) == values
    else:
        assert 3.33311 == pytest.approx(-weight.item())


@pytest.mark.ranks(3)
def test_windows_of_accumulate_are_one_push_and_sync_bn_shares_among_workers():
    def train_with_norm(batch_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return model

    scope = parwrap.distributed(strategy="parameter_server", staleness=0, batch="global")
    synced = scope(parwrap.sync_bn(train_with_norm))(8)
    torch.testing.assert_close(flat(train_with_norm(8)), flat(synced), atol=1e-5, rtol=0)

    windows = parwrap.distributed(strategy="parameter_server", staleness=0)(parwrap.accumulate(2)(train))(batch_size=4)
    torch.testing.assert_close(flat(train(batch_size=16)), flat(windows), atol=1e-5, rtol=0)


@pytest.mark.ranks(2)
def test_mixed_precision_trains():
    model = parwrap.distributed(strategy="parameter_server")(parwrap.amp(dtype="fp16", init_scale=8.0)(train))()

    assert not flat(model).isnan().any()
    torch.testing.assert_close(flat(train()), flat(model), atol=1e-2, rtol=0)


@pytest.mark.ranks(3)
def test_a_server_is_silent_writes_nothing_and_serves_in_a_block_and_where_nothing_is_trained(tmp_path):
    with parwrap.distributed(strategy="parameter_server"):
        assert 2 == parwrap.world_size()
        (tmp_path / "log").write_text(str(parwrap.rank()))
        assert str(parwrap.rank() if parwrap.rank() > 1 else 0) == (tmp_path / "log").read_text()
        print("from", parwrap.rank())
        assert 2.0 == parwrap.reduce_mean(2.0)
        model = train()
    assert 3 == parwrap.world_size()
    assert "0" == (tmp_path / "log").read_text()
    assert parwrap.distributed(strategy="parameter_server")(lambda: parwrap.rank())() == parwrap.rank()
    if parwrap.rank() < 2:
        assert model


def test_one_rank_runs_as_it_is():
    assert torch.equal(flat(train()), flat(parwrap.distributed(strategy="parameter_server")(train)()))
