"""Workers and parameter servers, against synchronous SGD of one process and by what each worker must see."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.strategies.server import Server

X = torch.linspace(-1, 1, 32).view(16, 2)
Y = X.sum(1, keepdim=True).sin()


def train(build=lambda p: torch.optim.SGD(p, lr=0.1), samples=16, batch_size=4, epochs=2, schedule=False, clip=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = build(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    loader = DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=batch_size)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if scheduler:
                scheduler.step()
        model.eval()
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


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


class Own(torch.optim.SGD):
    """An optimizer with an attribute and a step of its own."""

    def __init__(self, parameters, lr, sign):
        super().__init__(parameters, lr=lr)
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= self.sign * group["lr"] * p.grad


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


@pytest.mark.ranks(3)
def test_two_optimizers_one_built_later_and_another_model_in_the_next_fold():
    def gan():
        told = []
        for fold in range(2):
            torch.manual_seed(fold)
            one, other = nn.Linear(2, 2), nn.Linear(2, 1)
            first = torch.optim.Adam(one.parameters(), lr=0.01)
            second = torch.optim.SGD(other.parameters(), lr=0.1)
            third = None
            for step in range(3):
                x = X[4 * step : 4 * step + 4]
                other(one(x).detach()).mean().backward()
                second.step()
                second.zero_grad()
                first.zero_grad()
                other(one(x)).square().mean().backward()
                first.step()
                if step == 1:
                    third = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
                if third:
                    third.step() if step == 2 else None
            told.append(torch.cat([flat(one), flat(other)]))
        return torch.cat(told)

    torch.testing.assert_close(gan(), parwrap.distributed(strategy="parameter_server", staleness=0)(gan)(), atol=1e-6, rtol=0)


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


@pytest.mark.ranks(2)
def test_state_is_asked_of_the_server_and_gone_on_from():
    def train_on(state=None):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for step in range(4):
            if step == 2 and state is not None:
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (weight * torch.tensor([1.0, step])).sum().backward()
            optimizer.step()
        return weight.detach().clone(), optimizer.state_dict()

    first, state = parwrap.distributed(strategy="parameter_server")(train_on)()
    second, _ = parwrap.distributed(strategy="parameter_server")(train_on)(state)
    alone, own = train_on()

    assert torch.equal(alone, first)
    assert torch.equal(own["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert torch.equal(train_on(own)[0], second)


@pytest.mark.ranks(2)
def test_weights_that_are_changed_by_hand_are_the_servers_too():
    def clipped():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        best = None
        for step in range(4):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            weight.data.clamp_(min=0.85)
            best = weight.detach().clone() if step == 0 else best
        weight.data.copy_(best)
        return weight

    assert torch.equal(clipped(), parwrap.distributed(strategy="parameter_server")(clipped)())


@pytest.mark.ranks(3)
def test_what_is_changed_by_hand_discards_no_training_of_other_parameters():
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    @parwrap.distributed(strategy="parameter_server")
    def train_clamped():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(1 + 9 * parwrap.rank()):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            model.bias.data.clamp_(-0.5, 0.5)
            if step == 0:
                parwrap.gather("the first step is taken")

    train_clamped()

    assert [-11.0] * 3 == parwrap.gather(model.weight.item())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_that_waits_for_a_file_is_away_only_as_long_as_it_holds_up_who_writes_it(staleness, tmp_path, monkeypatch):
    """Worker 0 is late with each file of the first steps; in the end it takes two more before the last."""
    monkeypatch.setattr(parwrap.group, "POLLING", 0.03)  # so that a step can come before a worker has seen that the file is there

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
def test_models_of_earlier_folds_are_let_go_of_and_have_their_last_values(monkeypatch):
    held = []
    drop = Server._drop
    monkeypatch.setattr(Server, "_drop", lambda self, numbers: (drop(self, numbers), held.append((len(self._held), len(self._parameters)))))

    @parwrap.distributed(strategy="parameter_server")
    def folds():
        models, gone = [], []
        for fold in range(4):
            model = nn.Linear(1, 1)
            model.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(1 + 2 * parwrap.rank()):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            models += [model] if fold < 2 else []
            gone.append(weakref.ref(model.weight))
            del optimizer, model
            gc.collect()
        return [model.weight.item() for model in models], [each() is None for each in gone]

    weights, gone = folds()

    told = parwrap.gather(held)
    assert [[-4.0, -4.0], [False, False, True, False]] == [weights, gone]
    assert [] == told[0] == told[1]
    assert {(1, 2)} == set(told[2])


@pytest.mark.ranks(3)
def test_a_model_goes_on_with_another_optimizer_after_the_first_is_gone():
    def goes_on():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adam):
            optimizer = kind(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                optimizer.step()
            del optimizer
            gc.collect()
        return model

    together = parwrap.distributed(strategy="parameter_server", staleness=0)(goes_on)()

    torch.testing.assert_close(flat(goes_on()), flat(together), atol=1e-6, rtol=0)


@pytest.mark.ranks(4)
def test_optimizers_and_schedulers_from_before_or_returned_go_on_on_every_rank():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    before = adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(before, 1, 0.5)

    @parwrap.distributed(strategy="parameter_server", servers=2, staleness=0, lr="linear")
    def train_both():
        other = nn.Linear(2, 1)
        returned = adam(other.parameters())
        for _ in range(3):
            returned.zero_grad()
            before.zero_grad()
            (model(X) + other(X)).square().mean().backward()
            returned.step()
            before.step()
            schedule.step()
        return other, returned

    other, returned = train_both()

    assert [(0.01 / 8, 3, 0.01)] * 4 == parwrap.gather((before.param_groups[0]["lr"], schedule.last_epoch, returned.param_groups[0]["lr"]))
    for optimizer in (before, returned):
        states = parwrap.gather([(state["step"].item(), state["exp_avg"].tolist()) for state in optimizer.state_dict()["state"].values()])
        assert 3 == states[0][0][0]
        assert states == [states[0]] * 4
    assert other.weight is returned.param_groups[0]["params"][0]


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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("survive", [False, True])
def test_a_worker_that_dies_is_reported_at_once_and_survived_if_asked(survive):
    def dies():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model.train()
            if step == 2 and parwrap.rank() == 1:
                raise KeyError("enough")
            optimizer.zero_grad()
            model(X[:4]).mean().backward()
            optimizer.step()
            model.eval()
        return parwrap.rank()

    try:
        ended = parwrap.distributed(strategy="parameter_server", staleness=0, survive=survive)(dies)()
    except (KeyError, RankMismatchError) as error:
        ended = str(error)

    told = parwrap.gather(ended)
    assert "'enough'" == told[1]
    if survive:
        assert [0, 0] == [told[0], told[2]]
    else:
        assert {"rank 1, a worker of the parameter server, has failed with KeyError: 'enough'."} == {told[0], told[2]}


@pytest.mark.ranks(2)
def test_a_server_that_fails_is_reported_by_name():
    def fails():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if parwrap.rank() == 1:
            raise KeyError("no data")
        model(X).mean().backward()
        optimizer.step()

    with pytest.raises((KeyError, RankMismatchError)) as raised:
        parwrap.distributed(strategy="parameter_server")(fails)()

    assert ["rank 1, a parameter server, has failed with KeyError: 'no data'.", "'no data'"] == parwrap.gather(str(raised.value))


@pytest.mark.ranks(2)
def test_an_optimizer_that_fails_on_the_server_is_reported():
    def fails():
        weight = nn.Parameter(torch.ones(1))
        optimizer = Own([weight], lr=0.1, sign="no number")
        weight.sum().backward()
        optimizer.step()

    with pytest.raises((TypeError, RankMismatchError)) as raised:
        parwrap.distributed(strategy="parameter_server")(fails)()

    assert [True, False] == parwrap.gather("rank 1, a parameter server, has failed with TypeError" in str(raised.value))


def closes(weight):
    torch.optim.LBFGS([weight]).step(lambda: weight.square().sum())


def without_an_optimizer(weight):
    weight.sum().backward()


def casts(weight):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    model.half()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("train_wrongly", "text"),
    [
        (closes, r"step\(closure\) at .* cannot be taken by a parameter server: the closure computes gradients inside"),
        (without_an_optimizer, "comes before any optimizer was built, and a parameter server takes the steps of optimizers"),
        (casts, "casts parameters that a parameter server holds, which would keep their dtype there"),
    ],
)
def test_what_a_server_cannot_do_is_refused(train_wrongly, text):
    with pytest.raises((UsageError, RankMismatchError), match=text):
        parwrap.distributed(strategy="parameter_server")(train_wrongly)(nn.Parameter(torch.ones(1)))


@pytest.mark.ranks(2)
def test_more_servers_than_ranks_leave_no_worker():
    with pytest.raises(UsageError, match="servers=2 leaves no worker on 2 ranks: the last of them are the servers"):
        parwrap.distributed(strategy="parameter_server", servers=2)(train)()


def scaled_by_hand(train):
    def train_scaled(enabled=True):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return weight.item()

    return train_scaled


@pytest.mark.ranks(2)
def test_a_scaler_that_is_off_is_none():
    assert 0.5 == parwrap.distributed(strategy="parameter_server", staleness=0)(scaled_by_hand(train))(enabled=False)


@pytest.mark.ranks(3)
def test_features_without_a_meaning_are_refused_on_the_workers():
    def refused(feature, text, **options):
        try:
            parwrap.distributed(strategy="parameter_server", **options)(feature(train))()
        except (UsageError, RankMismatchError) as error:
            return text in str(error)

    assert refused(parwrap.sync_bn, "sync_bn has no batch to share, since workers of a parameter server step each by itself")
    assert refused(parwrap.amp(dtype="fp16"), "parwrap.amp in fp16 leaves out steps where gradients overflow", staleness=0)
    assert refused(scaled_by_hand, "test_parameter_server.py:", staleness=0)
    assert refused(parwrap.accumulate(2), "do not go together with batch='global' or uneven='join'", staleness=0, batch="global")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 0}, "servers=0 is not a number of parameter servers: give a whole number from 1"),
        ({"staleness": -1}, "staleness=-1 is not a number of steps: give a whole number from 0"),
        ({"staleness": 1.5}, "staleness=1.5 is not a number of steps"),
        (
            {"batch": "global"},
            "batch='global' is about a batch that all ranks take a step with, and workers of a parameter server step",
        ),
        ({"lr": "linear", "staleness": 2}, "lr='linear' is about a batch .* give staleness=0"),
        ({"uneven": "join"}, "uneven='join' is about a batch"),
        ({"strategy": "ddp", "servers": 2}, "servers=2 has nothing to act on with strategy='ddp': .* 'parameter_server'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "parameter_server", **options})


def test_one_rank_runs_as_it_is():
    assert torch.equal(flat(train()), flat(parwrap.distributed(strategy="parameter_server")(train)()))


@pytest.mark.ranks(4)
def test_a_group_that_is_added_later_keeps_the_state_of_the_others_and_frozen_parameters_stay():
    def unfreezes():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam([*model[1].parameters(), *model[2].parameters()], lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        return model

    together = parwrap.distributed(strategy="parameter_server", servers=2, staleness=0)(unfreezes)()

    torch.testing.assert_close(flat(unfreezes()), flat(together), atol=1e-6, rtol=0)
