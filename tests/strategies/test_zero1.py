"""Sharded optimizers: the weights and states of DDP, with a part of the memory."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import parwrap
from parwrap.errors import LockstepError, RankMismatchError, UsageError
from parwrap.strategies import zero1
from parwrap.strategies.zero1 import dealt_out

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.ones(24, 1))


class Renamed(torch.optim.AdamW):
    """A subclass with a constructor and a step of its own."""

    def __init__(self, parameters, rate):
        super().__init__(parameters, lr=rate, weight_decay=0.1)

    def step(self, closure=None):
        return super().step(closure)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


OPTIMIZERS = {
    "adam": adam,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "groups": lambda parameters: torch.optim.AdamW([{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(parameters)]),
    "subclass": lambda parameters: Renamed(parameters, 0.01),
}


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(make, epochs=2, model=None, each=lambda model: None):
    """A plain loop with gradients clipped and a schedule; ``each`` sees the model after every step."""
    model = model or model_of()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    for _ in range(epochs):
        for x, y in DataLoader(DATA, batch_size=2, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            each(model)
    return model, optimizer


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_both(function):
    """What ``function`` returns under DDP and under ZeRO."""
    return [parwrap.distributed(strategy=strategy, seed=3)(function)() for strategy in ("ddp", "zero1")]


def equal_states(one, other):
    tensors = [
        (value, other["state"][place][key]) for place, values in one["state"].items() for key, value in values.items() if value is not None
    ]
    return one["state"].keys() == other["state"].keys() and all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in tensors)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_after_every_step_state_and_options_are_those_of_ddp(name):
    def run():
        seen = []
        _, optimizer = train(OPTIMIZERS[name], each=lambda model: seen.append(flat(model)))
        return torch.stack(seen), copy.deepcopy(optimizer.state_dict())

    (weights, state), (sharded_weights, sharded) = by_both(run)

    assert torch.equal(weights, sharded_weights)
    assert state["param_groups"] == sharded["param_groups"]
    assert equal_states(state, sharded)


@pytest.mark.ranks(2)
def test_weights_are_those_of_torchs_own_zero_redundancy_optimizer():
    def steps(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    ours, theirs = model_of(), DistributedDataParallel(model_of())
    with parwrap.distributed(strategy="zero1", seed=3):
        steps(ours, adam(ours.parameters()), DataLoader(DATA, batch_size=2))
    optimizer = ZeroRedundancyOptimizer(theirs.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    steps(theirs, optimizer, DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, shuffle=False)))

    assert torch.equal(flat(ours), flat(theirs))


@pytest.mark.ranks(2)
def test_each_rank_holds_a_part_of_the_state_and_the_whole_of_it_when_the_function_has_returned():
    with parwrap.distributed(strategy="zero1"):
        model, optimizer = train(adam, epochs=1)
        here = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        total = sum(p.numel() for p in model.parameters())

        assert total == parwrap.reduce_sum(here)
        assert here < 0.6 * total
    assert total == sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert torch.equal(*parwrap.gather(torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])))


@pytest.mark.ranks(3)
def test_three_ranks_share_the_state_too():
    weights, sharded = by_both(lambda: flat(train(adam)[0]))

    assert torch.equal(weights, sharded)


@pytest.mark.ranks(2)
def test_a_larger_learning_rate_for_the_larger_batch_is_that_of_ddp():
    weights = [flat(parwrap.distributed(strategy=strategy, lr="linear", seed=3)(train)(adam)[0]) for strategy in ("ddp", "zero1")]

    assert torch.equal(*weights)


@pytest.mark.ranks(2)
def test_a_saved_state_is_resumed_by_ddp_by_zero_and_by_one_process():
    def resume(model, optimizer, file):
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    def continued(strategies):
        file = None
        for strategy in strategies:
            with parwrap.distributed(strategy=strategy, seed=5):

                def make(parameters, model, file=file):
                    optimizer = adam(parameters)
                    if file:
                        resume(model, optimizer, file)
                    return optimizer

                model = model_of()
                model, optimizer = train(lambda parameters, model=model, make=make: make(parameters, model), epochs=1, model=model)
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
        return flat(model), file

    (expected, by_ddp), (after_zero1, _), (_, by_zero1) = map(continued, (["ddp"] * 2, ["zero1", "ddp"], ["ddp", "zero1"]))
    alone = []
    for file in (by_ddp, by_zero1):
        model = model_of()
        optimizer = adam(model.parameters())
        resume(model, optimizer, file)
        nn.functional.mse_loss(model(DATA.tensors[0]), DATA.tensors[1]).backward()
        optimizer.step()
        alone.append(flat(model))

    assert torch.equal(expected, after_zero1)
    assert torch.equal(*alone)


@pytest.mark.ranks(2)
def test_a_new_group_of_parameters_and_frozen_ones_train_as_with_ddp():
    def grown():
        model = model_of()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        train(lambda parameters: optimizer, epochs=1, model=model)
        optimizer.add_param_group({"params": [*model[0].parameters(), *model[4].parameters()], "lr": 0.05})
        model[2].weight.requires_grad_(False)
        train(lambda parameters: optimizer, epochs=1, model=model)
        model, optimizer = copy.deepcopy((model, optimizer))
        train(lambda parameters: optimizer, epochs=1, model=model)
        return flat(model), optimizer.state_dict()

    (weights, state), (sharded_weights, sharded) = by_both(grown)

    assert torch.equal(weights, sharded_weights)
    assert equal_states(state, sharded)


@pytest.mark.ranks(2)
def test_a_parameter_frozen_between_its_gradient_and_the_step_is_stepped_as_with_ddp():
    def frozen():
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in DataLoader(DATA, batch_size=4):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.mse_loss(model(x), y).backward()
            model[0].requires_grad_(False)
            optimizer.step()
        return flat(model)

    weights, sharded = by_both(frozen)

    assert torch.equal(weights, sharded)


@pytest.mark.ranks(2)
def test_other_groups_on_another_rank_are_an_error():
    def run():
        model = model_of()
        parameters = list(model.parameters())[parwrap.rank() :]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()

    said = r"the param_groups of SGD differ between ranks: parameter 0 is one of shape \(.*\) and torch.float32 in group 0 on rank 0, and "
    said += r"one of shape \(.*\) and torch.float32 in group 0 on rank 1. Build the same"
    with pytest.raises(RankMismatchError, match=said):
        parwrap.distributed(strategy="zero1")(run)()


@pytest.mark.ranks(2)
def test_an_optimizer_that_the_script_drops_is_freed():
    with parwrap.distributed(strategy="zero1"):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        for _ in range(4):  # the last step is compared with others'
            weight.sum().backward()
            optimizer.step()
        dropped = weakref.ref(optimizer)
        del optimizer

        assert dropped() is None


def by_closure():
    model = model_of()[:3]
    optimizer = adam(model.parameters())
    for x, _ in DataLoader(DATA, batch_size=2):

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def adversarial():
    generator, critic = model_of()[:3], nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizers = [adam(generator.parameters()), adam(critic.parameters())]
    for x, _ in DataLoader(DATA, batch_size=4):
        fake = generator(x)
        optimizers[1].zero_grad()
        (critic(x[:, :3]).mean() - critic(fake.detach()).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic(fake).mean().backward()
        optimizers[0].step()
    return nn.ModuleList([generator, critic])


def scaled():
    model, scaler = model_of(), torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)  # overflows at first
    optimizer = adam(model.parameters())
    for x, y in DataLoader(DATA, batch_size=2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model


def accumulated():
    model = model_of()
    optimizer = adam(model.parameters())
    for number, (x, y) in enumerate(DataLoader(DATA, batch_size=2)):
        nn.functional.mse_loss(model(x), y).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


class Lookahead(torch.optim.Optimizer):
    """Around another: goes half of the way that it has gone in two steps, with slow weights in a state of its own."""

    def __init__(self, inner):
        self.inner, self.taken = inner, 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.0})

    def step(self, closure=None):
        self.inner.step(closure)
        self.taken += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.taken % 2 == 0:
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)


def around_another():
    return train(lambda parameters: Lookahead(adam(parameters)))[0]


class Extragradient(torch.optim.SGD):
    """Goes by the gradient of where the first one has led to."""

    def step(self, closure):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        for _ in range(2):
            loss = closure()
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                if p.grad is not None:
                    p.data.copy_(old - 0.1 * p.grad)
        return loss


def two_closures_a_step():
    model = model_of()[:3]
    optimizer = Extragradient(model.parameters(), lr=0.1)
    for x, _ in DataLoader(DATA, batch_size=2):

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure=closure)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", [by_closure, adversarial, scaled, accumulated, around_another, two_closures_a_step])
def test_other_loops_are_as_with_ddp(loop):
    weights, sharded = by_both(lambda: flat(loop()))

    assert torch.equal(weights, sharded)
    assert weights.isfinite().all()
    assert not torch.equal(weights, flat(model_of())[: len(weights)])


@pytest.mark.ranks(2)
def test_a_model_that_is_cast_while_one_rank_alone_holds_the_state_trains_as_with_ddp():
    """Apex's level O3 casts the second model at its first call: then the first has a state, of one parameter."""

    @parwrap.amp(level="O3")
    def run():
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        one, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (first, second))
        for step in range(4):
            hidden = first(torch.full((2, 4), 1.0 + parwrap.rank()))
            (hidden.square().mean() if step < 2 else second(hidden.detach()).square().mean()).backward()
            (one if step < 2 else other).step()
        return torch.cat([flat(first), flat(second)]), {p.dtype for p in (*first.parameters(), *second.parameters())}

    (weights, dtypes), (sharded_weights, sharded) = by_both(run)

    assert torch.equal(weights, sharded_weights)
    assert {torch.float16} == dtypes == sharded


@pytest.mark.ranks(2)
@pytest.mark.parametrize("decorator", [parwrap.accumulate(2), parwrap.amp(dtype="float16")], ids=["accumulate", "amp"])
def test_steps_that_are_skipped_are_skipped_as_with_ddp(decorator):
    """By ``accumulate``, and by ``amp`` while the loss scale is too large."""

    def loop():
        model = model_of()
        optimizer = adam(model.parameters())
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=2)):
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(x), y) * (1e6 if number == 1 else 1)).backward()  # overflows in float16
            optimizer.step()
        return model

    weights, sharded = by_both(lambda: flat(decorator(loop)()))

    assert torch.equal(weights, sharded)
    assert weights.isfinite().all()


@pytest.mark.ranks(2)
def test_the_scripts_own_hooks_on_a_step_see_all_gradients_before_and_all_weights_after_it():
    def run():
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average, norms = flat(model), []
        optimizer.register_step_pre_hook(lambda *_: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.register_step_post_hook(lambda *_: average.lerp_(flat(model), 0.5))
        train(lambda parameters: optimizer, epochs=1, model=model)
        return torch.cat([average, torch.stack(norms)]), optimizer

    (by_ddp, _), (by_zero1, optimizer) = by_both(run)

    assert torch.equal(by_ddp, by_zero1)
    assert [1, 1] == [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]


@pytest.mark.ranks(2)
def test_an_optimizer_that_was_built_and_stepped_before_goes_on_as_with_ddp():
    def continued(strategy):
        model, x = model_of(), DATA.tensors[0]
        optimizer = adam(model.parameters())

        def step():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), DATA.tensors[1]).backward()
            optimizer.step()

        step()
        parwrap.distributed(strategy=strategy)(step)()
        step()
        return flat(model)

    assert torch.equal(continued("ddp"), continued("zero1"))


@pytest.mark.ranks(2)
def test_what_is_made_for_a_batch_steps_as_on_one_process():
    """An attack on each batch, by an optimizer whose state no other rank needs, LBFGS too."""

    def attacked():
        model, noises = model_of()[:3], []
        optimizer = adam(model.parameters())
        for number, (x, _) in enumerate(DataLoader(DATA, batch_size=4)):
            noise = nn.Parameter(torch.zeros_like(x))
            attack = torch.optim.LBFGS([noise]) if number == 1 else adam([noise])

            def closure(x=x, noise=noise, attack=attack):
                attack.zero_grad()
                loss = -model(x + noise).tanh().sum()
                loss.backward(inputs=[noise])
                return loss

            attack.step(closure)
            optimizer.zero_grad()
            model(x + noise.detach()).square().sum().backward()
            optimizer.step()
            noises.append(noise.detach().flatten())
        return torch.cat([flat(model), *noises])

    weights, sharded = by_both(attacked)

    assert torch.equal(weights, sharded)


@pytest.mark.ranks(2)
def test_a_step_that_raises_leaves_all_gradients_behind_and_cannot_be_passed_over():
    model = model_of()[:3]
    optimizer = Renamed(model.parameters(), 0.1)

    def run():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        with pytest.raises(LockstepError, match=r"the step of Renamed at .*test_zero1.py:\d+ has raised, and the script has caught the"):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(LockstepError, match="Let the error end the job"):
        parwrap.distributed(strategy="zero1")(run)()

    assert all(p.grad is not None for p in model.parameters())
    assert {} == dict(optimizer._optimizer_step_pre_hooks)


@pytest.mark.ranks(2)
def test_what_cannot_be_sharded_is_said():
    model = model_of()
    built_before = [[torch.optim.LBFGS(model.parameters())]]
    with parwrap.distributed(strategy="zero1"):
        with pytest.raises(UsageError, match=r"test_zero1.py:\d+ uses an LBFGS, which steps all parameters as one vector, so its state"):
            torch.optim.LBFGS(model_of().parameters())
        optimizer = adam(model_of().parameters())
        model[0].weight.sum().backward()
        with pytest.raises(UsageError, match="uses an LBFGS, which steps all parameters as one vector"):
            built_before[0][0].step(lambda: 0)

        @parwrap.rank_zero_only
        def save():
            with pytest.raises(UsageError, match=r"asks for Adam.state_dict\(\), which needs all ranks with strategy='zero1', because"):
                optimizer.state_dict()

        save()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("widths", "piece", "sent"),
    [
        ([8] * 24, 2**24, [("gather", 12 * 8)]),
        ([8] * 24, 64, [("gather", 32)] * 3),  # 32 elements of each rank at a time
        ([9, 7, 5, 4, 2, 1], 2**24, [("gather", 15)]),  # 9, 4, 2 and 7, 5, 1, beside what is frozen
        ([9], 2**24, [("broadcast", 9)]),  # an all-gather would send as much padding
        ([100, 3, 2], 16, [("gather", 100)]),  # larger than a piece
    ],
)
def test_a_step_sends_each_weight_once_by_few_all_gathers_without_much_padding(widths, piece, sent, monkeypatch):
    log, all_gather, broadcast = [], zero1.all_gather_single, dist.broadcast
    monkeypatch.setattr(zero1, "GATHERED", piece)
    monkeypatch.setattr(zero1, "_gathers", lambda group: True)  # as with NCCL
    with parwrap.distributed(strategy="zero1"):
        frozen = nn.Linear(3, 1)
        frozen.requires_grad_(False)
        layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for width in widths)
        optimizer = adam([*frozen.parameters(), *layers.parameters()])
        before = [p.detach().clone() for p in layers.parameters()]
        sum(layer(torch.ones(1, layer.in_features)).sum() for layer in layers).backward()
        with monkeypatch.context() as watched:
            watched.setattr(zero1, "all_gather_single", lambda out, own: log.append(("gather", own.numel())) or all_gather(out, own))
            watched.setattr(
                dist, "broadcast", lambda tensor, source: log.append(("broadcast", tensor.numel())) or broadcast(tensor, source)
            )
            optimizer.step()
        after = [p.detach().clone() for p in layers.parameters()]

    assert sorted(sent) == sorted(log)
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old, new)
        assert all(torch.equal(new, each) for each in parwrap.gather(new))


@pytest.mark.parametrize(("sizes", "ranks"), [([], 2), ([5], 3), ([3, 1, 4, 1, 5, 9, 2, 6], 3), ([10, 10], 2)])
def test_parameters_are_dealt_out_as_torch_does(sizes, ranks):
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    theirs = object.__new__(ZeroRedundancyOptimizer)
    theirs.world_size, theirs.param_groups, theirs._partition_parameters_cache = ranks, [{"params": parameters}], []
    rank_of = {id(p): rank for rank, groups in enumerate(theirs._partition_parameters()) for p in groups[0]["params"]}

    assert [rank_of[id(p)] for p in parameters] == dealt_out(sizes, [0] * ranks)


def test_one_rank_is_a_plain_loop():
    assert torch.equal(flat(train(adam)[0]), flat(parwrap.distributed(strategy="zero1")(train)(adam)[0]))
