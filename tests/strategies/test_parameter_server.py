"""Workers and parameter servers, against one process, against DDP, and by what each worker must see."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import LockstepError, RankMismatchError, UsageError
from parwrap.strategies.ps_server import Server, may_step

X = torch.linspace(-1, 1, 32).view(16, 2)
Y = X.sum(1, keepdim=True).sin()


def served(**options):
    return parwrap.distributed(strategy="parameter_server", **options)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def train(build=adam, samples=16, batch_size=4, epochs=2, schedule=False):
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
            nn.utils.clip_grad_value_(model.parameters(), 10.0)
            optimizer.step()
            if scheduler:
                scheduler.step()
        model.eval()
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_ranks_that_a_call_starts_end_as_others_do():
    def decay():
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        return weight.item()

    assert parwrap.launch(served(staleness=0)(decay), nprocs=3) == pytest.approx(0.8**3)


# staleness 0


@pytest.mark.ranks(3)
@pytest.mark.parametrize("build", [adam, momentum])
def test_with_staleness_0_workers_train_bit_for_bit_what_ddp_trains(build):
    """By hand: two workers' gradients, averaged as DDP does."""

    def by_hand():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = build(model.parameters())
        for _ in range(2):
            for at in range(0, 16, 8):
                halves = []
                for worker in range(2):
                    rows = range(at + worker, at + 8, 2)
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
                    halves.append([p.grad.clone() for p in model.parameters()])
                for p, *grads in zip(model.parameters(), *halves, strict=True):
                    p.grad = grads[0] / 2 + grads[1] / 2
                optimizer.step()
        return model

    assert torch.equal(flat(by_hand()), flat(served(staleness=0)(train)(build)))


@pytest.mark.ranks(3)
def test_with_staleness_0_workers_may_decide_on_a_loss_after_its_backward():
    @served(staleness=0)
    def train_until_good():
        weight, losses = nn.Parameter(torch.ones(1)), [9.0]
        optimizer = torch.optim.SGD([weight], lr=0.25)
        while losses[-1] > 0.1:
            optimizer.zero_grad()
            loss = weight.square().sum() * (1 + parwrap.rank())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    # the mean gradient is 3 * weight, so each step leaves a quarter of it
    assert [9.0, 1.5, 1.5 / 16] == train_until_good()


@pytest.mark.ranks(3)
def test_with_staleness_0_and_a_global_batch_workers_train_the_weights_of_one_process():
    together = served(staleness=0, batch="global")(train)(schedule=True)

    torch.testing.assert_close(flat(train(schedule=True)), flat(together), atol=1e-5, rtol=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", [{"batch": "global"}, {"uneven": "join"}])
def test_uneven_ends_count_by_samples_with_staleness_0(options):
    """5 batches of 2 and one of 1, of which workers get 3 each, or parts."""
    alone = train(momentum, samples=11, batch_size=4 if "uneven" in options else 2)
    together = served(staleness=0, **options)(train)(momentum, samples=11, batch_size=2)

    torch.testing.assert_close(flat(alone), flat(together), atol=1e-5, rtol=0)


@pytest.mark.ranks(4)
def test_two_servers_hold_disjoint_parts_and_take_the_same_steps():
    together = served(servers=2, staleness=0, batch="global")(train)()

    torch.testing.assert_close(flat(train()), flat(together), atol=1e-5, rtol=0)


@pytest.mark.ranks(3)
def test_learning_rates_follow_the_number_of_workers():
    assert torch.equal(
        flat(served(staleness=0)(train)(lambda p: torch.optim.SGD(p, lr=0.2))),
        flat(served(staleness=0, lr="linear")(train)(lambda p: torch.optim.SGD(p, lr=0.1))),
    )


@pytest.mark.ranks(3)
def test_a_window_of_accumulate_is_one_push():
    windows = served(staleness=0)(parwrap.accumulate(2)(train))()

    torch.testing.assert_close(flat(train(batch_size=16)), flat(windows), atol=1e-5, rtol=0)


@pytest.mark.ranks(3)
def test_workers_share_the_statistics_of_batch_norms():
    def train_with_norm(batch_size=8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return model

    synced = served(staleness=0, batch="global")(parwrap.sync_bn(train_with_norm))()

    torch.testing.assert_close(flat(train_with_norm()), flat(synced), atol=1e-5, rtol=0)


# any pace


@pytest.mark.ranks(3)
@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_every_rank_ends_with_the_same_weights_buffers_state_and_result(staleness):
    @served(staleness=staleness)
    def train_with_norm():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            model.train()
            for (x,) in DataLoader(TensorDataset(X), batch_size=2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            model.eval()
            weights = parwrap.gather(flat(model).tolist())
            assert weights[0] == weights[-1]
        return model, parwrap.rank(), optimizer.state_dict()["state"][0]["step"].item()

    model, rank, steps = train_with_norm()

    results = parwrap.gather((flat(model).tolist(), steps))
    assert [results[0]] * 3 == results
    assert [0, 1, 0] == parwrap.gather(rank)  # a server returns what worker 0 does
    assert (8 if staleness == 0 else 16) == steps
    assert not model[0].weight.isnan().any()


@pytest.mark.ranks(3)
def test_without_a_bound_workers_may_take_different_numbers_of_steps_and_none_is_lost():
    weight = nn.Parameter(torch.zeros(1))

    @served()
    def train_apart():
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(3 + 4 * parwrap.rank()):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        return weight

    assert [-10.0] * 3 == parwrap.gather(train_apart().item())


@pytest.mark.parametrize(
    ("staleness", "asked", "may"),
    [(None, 9, True), (1, 4, True), (1, 5, False), (2, 5, True), (2, 6, False)],
)
def test_a_worker_waits_where_it_would_be_further_ahead_of_the_slowest_than_the_bound(staleness, asked, may):
    assert may == may_step({0: asked, 1: 3, 2: 8}, 0, staleness)


# what servers step


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
def test_the_script_s_own_optimizer_steps_on_the_server():
    @served()
    def train_with_own():
        weight = nn.Parameter(torch.ones(1))
        optimizer = Own([weight], lr=0.5, sign=-1)
        for _ in range(2):
            optimizer.zero_grad()
            (2 * weight).sum().backward()
            optimizer.step()
        return weight.item()

    assert 3.0 == train_with_own()


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

    assert torch.equal(embed(), served()(embed)())


@pytest.mark.ranks(3)
def test_several_optimizers_one_built_later_and_another_model_in_the_next_fold():
    def gan():
        weights = []
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
                if step == 2:
                    third.step()
            weights.append(torch.cat([flat(one), flat(other)]))
        return torch.cat(weights)

    torch.testing.assert_close(gan(), served(staleness=0)(gan)(), atol=1e-6, rtol=0)


@pytest.mark.ranks(4)
def test_a_group_or_parameter_that_comes_later_keeps_the_state_of_the_others_and_frozen_parameters_stay():
    def unfreezes():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam([*model[1].parameters(), *model[2].parameters()], lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            if step == 3:
                model[1].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(model[1].weight.detach().clone())
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        return model

    together = served(servers=2, staleness=0)(unfreezes)()

    torch.testing.assert_close(flat(unfreezes()), flat(together), atol=1e-6, rtol=0)


@pytest.mark.ranks(3)
def test_servers_let_go_of_models_of_earlier_folds_which_keep_their_last_values(monkeypatch):
    held = []
    begin = Server._begin
    monkeypatch.setattr(Server, "_begin", lambda self, *args: (begin(self, *args), held.append((len(self._held), len(self._parameters)))))

    @served()
    def folds():
        models, gone = [], []
        for fold in range(4):
            model = nn.Linear(1, 1)
            model.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            models += [model] if fold < 2 else []
            gone.append(weakref.ref(model.weight))
            del optimizer, model
            gc.collect()
        return [model.weight.item() for model in models], [each() is None for each in gone]

    weights, gone = folds()

    assert [[-4.0, -4.0], [False, False, True, False]] == [weights, gone]
    assert [[], [], [(1, 2)] * 4] == parwrap.gather(held)


@pytest.mark.ranks(3)
def test_an_optimizer_may_be_collected_later_on_one_worker_than_on_another():
    @served(staleness=0)
    def folds():
        for _ in range(3):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # refers to the optimizer, which refers to it
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                scheduler.step()
            del optimizer, scheduler
            if parwrap.rank() == 0:
                gc.collect()
        return model.weight.item()

    gc.disable()
    try:
        assert -2.0 == folds()
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_a_state_comes_from_the_server_and_goes_back_to_it():
    def train_on(state=None):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for step in range(4):
            if step == 2 and state is not None:
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (weight * torch.tensor([1.0, step])).sum().backward()
            optimizer.step()
        return weight.detach().clone(), optimizer.state_dict()

    first, state = served()(train_on)()
    second, _ = served()(train_on)(state)
    alone, own = train_on()

    assert torch.equal(alone, first)
    assert torch.equal(own["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert torch.equal(train_on(own)[0], second)


@pytest.mark.ranks(2)
def test_weights_that_are_changed_by_hand_are_the_server_s_too():
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

    assert torch.equal(clipped(), served()(clipped)())


@pytest.mark.ranks(4)
def test_the_caller_s_model_and_optimizer_are_trained_on_servers_too():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = adam(model.parameters())

    @served(servers=2, staleness=0)
    def train_both():
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()

    train_both()

    results = parwrap.gather((flat(model).tolist(), optimizer.state_dict()["state"][0]["exp_avg"].tolist()))
    assert [results[0]] * 4 == results
    assert 3 == optimizer.state[model.weight]["step"]


@pytest.mark.ranks(2)
def test_a_loss_scale_trains_where_each_worker_has_its_own_pace():
    model = served()(parwrap.amp(dtype="fp16", init_scale=8.0)(train))()

    torch.testing.assert_close(flat(train()), flat(model), atol=1e-2, rtol=0)


@pytest.mark.ranks(3)
def test_a_state_that_one_worker_loads_by_itself_is_refused():
    @served()
    def load():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        with parwrap.rank_zero_first():
            optimizer.load_state_dict(state)

    text = r"py:\d+ loads the state of a SGD, which all workers send to its .* call load_state_dict\(\) after"
    with pytest.raises((UsageError, LockstepError), match=text):
        load()


# what a server's process does


@pytest.mark.ranks(3)
def test_a_server_acts_by_itself_writes_nothing_and_serves_in_a_block_and_where_nothing_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served():
        assert 2 == parwrap.world_size()
        (tmp_path / "log").write_text(str(parwrap.rank()))
        assert 2.0 == parwrap.reduce_mean(2.0)
        with parwrap.rank_zero_first():
            assert parwrap.rank() < 3
        model = train()
    assert 3 == parwrap.world_size()
    assert "0" == (tmp_path / "log").read_text()
    assert [0, 1, 0] == parwrap.gather(served()(lambda: parwrap.rank())())
    if parwrap.rank() < 2:
        assert model


@pytest.mark.ranks(3)
def test_all_ranks_go_on_together_afterwards():
    first = served(staleness=0)(train)()
    second = parwrap.distributed(batch="global")(train)()

    assert [flat(first).tolist()] * 3 == parwrap.gather(flat(first).tolist())
    torch.testing.assert_close(flat(train()), flat(second), atol=1e-5, rtol=0)


def test_one_rank_trains_as_plain_code_does():
    assert torch.equal(flat(train()), flat(served()(train)()))


# failures


@pytest.mark.ranks(3)
def test_an_error_of_a_worker_ends_the_server_and_the_other_workers():
    @served(staleness=1)
    def fails():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2 and parwrap.rank() == 1:
                raise KeyError("enough")
            model(X[:4]).mean().backward()
            optimizer.step()

    with pytest.raises((KeyError, LockstepError)) as raised:
        fails()

    told = parwrap.gather(str(raised.value))
    assert "'enough'" == told[1]
    assert told[0] == told[2] or "rank 1 has raised an error" in told[0]
    assert told[2] in (
        "rank 1, a worker of the parameter server, has ended with KeyError: 'enough'",
        f"rank 0, a worker of the parameter server, has ended with {told[0]}",
    )


@pytest.mark.ranks(2)
def test_an_optimizer_that_fails_on_the_server_is_reported():
    @served()
    def fails():
        weight = nn.Parameter(torch.ones(1))
        optimizer = Own([weight], lr=0.1, sign="no number")
        weight.sum().backward()
        optimizer.step()

    with pytest.raises((TypeError, LockstepError)) as raised:
        fails()

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


def of_a_local_class(weight):
    class Local(torch.optim.SGD):
        pass

    optimizer = Local([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()


def steps_a_fused_optimizer_by_a_scaler(weight):
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1, fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("train_wrongly", "text"),
    [
        (closes, r"LBFGS.step\(closure\) at test_parameter_server.py:\d+ cannot run on a parameter server: the server takes the step"),
        (without_an_optimizer, r"test_parameter_server.py:\d+ runs a backward before any optimizer is built"),
        (
            casts,
            r"test_parameter_server.py:\d+ meets a parameter that is now torch.float16 of shape \(.*\), but a parameter server holds it as "
            r"torch.float32 of shape \(.*\). Cast or resize the model before its first backward, or choose another strategy",
        ),
        (of_a_local_class, r"a Local cannot be sent to the parameter servers \(.*\): define its class at the top level of a module"),
        (steps_a_fused_optimizer_by_a_scaler, r"test_parameter_server.py:\d+ lets a GradScaler step a fused SGD, .* without fused=True"),
    ],
)
def test_what_a_server_cannot_do_is_refused(train_wrongly, text):
    with pytest.raises((UsageError, LockstepError)) as raised:
        served(staleness=0)(train_wrongly)(nn.Parameter(torch.ones(1)))

    if parwrap.rank() == 0:
        raised.match(text)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("own_scaler", [False, True], ids=["amp", "GradScaler"])
@pytest.mark.parametrize(("staleness", "steps"), [(0, 3), (1, 7)])
def test_a_step_that_a_loss_scale_leaves_out_on_one_worker(own_scaler, staleness, steps):
    """Servers that step for all workers together leave it out, as the average is not finite; the others leave out one worker's step."""

    @served(staleness=staleness)
    def scaled():
        weight = nn.Parameter(torch.zeros(1))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0, enabled=own_scaler)
        with nullcontext() if own_scaler else parwrap.amp(dtype="fp16", init_scale=2.0):
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale((weight * (float("inf") if (step, parwrap.rank()) == (1, 1) else 1.0)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        return weight

    assert -steps == scaled().item()


@pytest.mark.ranks(3)
def test_data_that_workers_have_split_apart_are_an_error():
    @served()
    def split_apart():
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for (x,) in DataLoader(TensorDataset(X + parwrap.rank()), batch_size=2):
            (weight * x).sum().backward()
            optimizer.step()

    with pytest.raises(RankMismatchError) as raised:
        split_apart()

    if parwrap.rank() < 2:
        raised.match("different numbers at the same places of the dataset")


@pytest.mark.ranks(3)
def test_workers_that_train_different_parameters_are_an_error_that_names_one():
    @served()
    def train_unlike():
        weights = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1 + parwrap.rank()))
        optimizer = torch.optim.SGD(weights, lr=0.1)
        sum(weight.sum() for weight in weights).backward()
        optimizer.step()

    with pytest.raises(RankMismatchError) as raised:
        train_unlike()

    if parwrap.rank() < 2:
        raised.match(r"parameter 1 of their optimizers differs: rank 0 has one of shape \(1,\) and .*, and rank 1 has one of shape \(2,\)")


@pytest.mark.ranks(2)
def test_more_servers_than_ranks_leave_no_worker():
    with pytest.raises(UsageError, match="servers=2 leaves no worker among 2 ranks: start at least 3 ranks"):
        served(servers=2)(train)()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 0}, "servers=0 is not a positive integer"),
        ({"staleness": -1}, "staleness=-1 is not a number of steps: pass an integer, 0 or more"),
        ({"staleness": 1.5}, "staleness=1.5 is not a number of steps: pass an integer, 0 or more"),
        ({"batch": "global"}, "batch='global' says how ranks share a step, .* or set staleness=0, with which workers step together"),
        ({"lr": "linear", "staleness": 2}, "lr='linear' says how ranks share a step"),
        ({"uneven": "join"}, "uneven='join' says how ranks share a step"),
        ({"strategy": "ddp", "servers": 2}, "servers=2 has no effect with strategy='ddp': .* 'parameter_server'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "parameter_server", **options})


@pytest.mark.ranks(3)
@pytest.mark.parametrize("staleness", [None, 1, 0])
def test_gradients_are_each_workers_and_so_is_the_loss_unless_they_step_together(staleness):
    @served(staleness=staleness)
    def run():
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = (weight * (parwrap.rank() + 1)).sum()
            loss.backward()
            seen.append((loss.item(), weight.grad.item()))
            optimizer.step()
        return parwrap.gather(seen)

    expected = [[(1.5 if staleness == 0 else number, number)] * 2 for number in (1.0, 2.0)]

    assert expected == run()


@pytest.mark.ranks(2)
def test_global_hooks_of_steps_count_those_of_the_script_and_not_those_of_a_server():
    counted = []

    @served()
    def run():
        handle = register_optimizer_step_post_hook(lambda *_: counted.append(1))
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        try:
            for _ in range(3):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
        finally:
            handle.remove()

    run()

    assert [3, 0] == parwrap.gather(len(counted))
