"""Which parameters a backward averages where a line trains several models: every gradient that a step uses is the mean of all ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.decorators.distributed import open_passes
from parwrap.errors import UsageError
from parwrap.ranks.agreement import agree
from parwrap.strategies import ddp_sites
from parwrap.strategies.ddp_sites import Sites

MEAN = 1.5
"""The mean of 1 on rank 0 and 2 on rank 1."""


def scale():
    return float(parwrap.rank() + 1)


def linear():
    return nn.Linear(3, 1, bias=False)


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def loss_of(model):
    """Its gradient is 1 on rank 0 and 2 on rank 1."""
    return model(torch.ones(1, 3)).sum() * scale()


def grads(*models):
    return [None if model.weight.grad is None else model.weight.grad.to_dense().flatten().tolist() for model in models]


def distributed(function, **options):
    return parwrap.distributed(**options)(function)()


def numbers():
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


def as_one_process(train, strategy="ddp"):
    """Run ``train``, which returns models, alone and then on all ranks with a global batch; compare the weights."""
    results = []
    for run in (train, parwrap.distributed(batch="global", strategy=strategy)(train)):
        torch.manual_seed(0)
        results.append([p.detach().to_dense() for model in run() for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# another order on each rank, as of a set of parameters


def own_order(model):
    """The parameters in another order on each rank, as in a ``set``, which Python orders by addresses."""
    parameters = list(model.parameters())
    return parameters[::-1] if parwrap.rank() else parameters


def one_optimizer(parameters):
    return [torch.optim.Adam(parameters, 0.05)]


def one_each(parameters):
    return [torch.optim.Adam([p], 0.05) for p in parameters]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("made", [one_optimizer, one_each])
@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_ranks_that_order_their_parameters_differently_train_as_one_process(made, lazily, layers):
    def train():
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(layers)], nn.Linear(4, 1))
        optimizers = [] if lazily else made(own_order(model))
        for _ in range(3):
            for (x,) in DataLoader(TensorDataset(numbers()), 4, shuffle=True):
                for each in optimizers:
                    each.zero_grad()
                F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
                if not optimizers:  # as pyro does
                    for each in made(own_order(model)):
                        optimizers.append(each)
                        each.step()
                    continue
                for each in optimizers:
                    each.step()
        return [model]

    as_one_process(train)


# several models at one line


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", ["aba", "abaabba", "abcbacacb"])
@pytest.mark.parametrize("zero", ["before", "after", "by hand"])
def test_one_line_trains_several_models_in_any_order(order, zero):
    def step(model, optimizer):
        if zero == "before":
            optimizer.zero_grad()
        loss_of(model).backward()
        left = grads(model)
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()
        elif zero == "by hand":
            model.weight.grad = None
        return left

    def run():
        models = {name: linear() for name in "abc"}
        optimizers = {name: sgd(model) for name, model in models.items()}
        for name in "abc":
            loss_of(models[name]).backward()  # at another line, so that every set is known before
            optimizers[name].zero_grad()
        return [step(models[name], optimizers[name]) for name in order for _ in range(2)]

    assert [[[MEAN] * 3]] * 2 * len(order) == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("named", ["ab", "aba", "a-b", "-a-b-"])
def test_a_line_with_other_inputs_than_before(named):
    def backward(loss, inputs):
        loss.backward(**({} if inputs is None else {"inputs": inputs}))

    def run():
        models = {name: linear() for name in "ab"}
        held = [sgd(model) for model in models.values()]
        for model in models.values():
            loss_of(model).backward()
        for name in named:
            for optimizer in held:
                optimizer.zero_grad()
            backward(loss_of(models["a"]) + loss_of(models["b"]), None if name == "-" else [models[name].weight])
            yield [models[each].weight.grad for each in "ab" if name in ("-", each)]

    assert all(grad.tolist() == [[MEAN] * 3] for grads in distributed(lambda: list(run())) for grad in grads)


@pytest.mark.ranks(2)
def test_heads_with_optimizers_of_their_own_of_which_each_rank_reaches_another():
    def run():
        trunk, heads = linear(), nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))
        for head in heads:
            nn.init.ones_(head.weight)
        optimizers = [sgd(each) for each in (trunk, *heads)]
        found = []
        for chosen in ((0, 0), (1, 1), (2, 3), (0, 3)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (heads[chosen[parwrap.rank()]](trunk(torch.ones(1, 3)) * 0 + 1).sum() * scale()).backward()
            found.append([sum(grad) if grad else 0.0 for grad in grads(*heads)])
        return found

    assert [[1.5, 0, 0, 0], [0, 1.5, 0, 0], [0, 0, 0.5, 1], [0.5, 0, 0, 1]] == distributed(run)


@pytest.mark.ranks(2)
def test_ranks_that_reach_different_models_at_the_first_backward_average_both():
    def run():
        models = [linear(), linear()]
        held = [sgd(model) for model in models]
        loss_of(models[parwrap.rank()]).backward()
        return grads(*models), held

    assert [[0.5] * 3, [1.0] * 3] == distributed(run)[0]


@pytest.mark.ranks(2)
def test_two_optimizers_that_share_a_backbone():
    def train():
        backbone, heads = nn.Linear(4, 4), [nn.Linear(4, 1) for _ in range(2)]
        optimizers = [sgd(backbone, head) for head in heads]

        def step(number, x):
            optimizers[number].zero_grad()
            heads[number](backbone(x).tanh()).square().mean().backward()
            optimizers[number].step()

        for number in (0, 1, 1, 0):
            for (x,) in DataLoader(TensorDataset(numbers()), 4):
                step(number, x)
        return [backbone, *heads]

    as_one_process(train)


@pytest.mark.ranks(2)
def test_an_adversarial_game_by_one_function():
    def train():
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = {model: sgd(model) for model in (generator, critic)}

        def step(model, loss):
            loss.backward()
            optimizers[model].step()
            for each in optimizers.values():
                each.zero_grad()

        for number, (x,) in enumerate(list(DataLoader(TensorDataset(numbers()), 4)) * 2):
            step(critic, F.softplus(critic(x)).mean() + F.softplus(-critic(generator(x).detach())).mean())
            if number % 3 == 2:
                step(generator, F.softplus(critic(generator(x))).mean())
        return [generator, critic]

    as_one_process(train)


@pytest.mark.ranks(2)
def test_sparse_gradients_outside_of_the_set_are_averaged_and_stay_sparse():
    def table():
        return nn.Embedding(3, 1, sparse=True)

    def run():
        tables = [table(), table()]
        held = [sgd(each) for each in tables]
        found = []
        for number, reached in ((0, 0), (0, 0), (1, 1), (0, 0), (1, parwrap.rank())):
            (tables[reached](torch.tensor([1 + parwrap.rank()])) * torch.ones(1)).sum().backward()
            found.append(grads(tables[number]))
            assert all(each.weight.grad is None or each.weight.grad.is_sparse for each in tables)
            held[number].step()
            for optimizer in held:
                optimizer.zero_grad()
        return found

    assert [[[0, 0.5, 0.5]]] * 4 + [[[0, 0, 0.5]]] == distributed(run)


class Reentrant(nn.Module):
    """Uses its weight in two re-entrant checkpoints, so its gradient arrives in two parts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 3))

    def forward(self, x):
        x = x.clone().requires_grad_()
        return sum(checkpoint(lambda x: x @ self.weight.T, x, use_reentrant=True) for _ in range(2))


@pytest.mark.ranks(2, fresh=True)  # torch keeps the kind of device of the first checkpoint
@pytest.mark.parametrize("joins", [False, True])
def test_a_reentrant_checkpoint_outside_of_the_set(joins):
    """Either the line changes to its model, or its loss is added to that of the model before."""

    def run():
        plain, model = linear(), Reentrant()
        held = [sgd(plain), sgd(model)]
        found = []
        for number in range(6):
            later = number >= 2
            loss = loss_of(plain) if joins or not later else 0
            (loss + loss_of(model) if later else loss).backward()
            found.append(grads(model))
            held[later].step()
            for optimizer in held:
                optimizer.zero_grad()
        return found

    assert [[None]] * 2 + [[[2 * MEAN] * 3]] * 4 == distributed(run)


@pytest.mark.ranks(2, fresh=True)
def test_a_reentrant_checkpoint_that_a_known_line_switches_on_is_an_error_if_its_gradient_arrives_in_parts():
    def run():
        model = Reentrant()
        optimizer = sgd(model)
        for later in (False, True):
            optimizer.zero_grad()
            x = torch.ones(1, 3)
            (model(x) if later else x @ model.weight.T).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"test_sites\.py:\d+ computes .* re-entrant .* use_reentrant=False"):
        distributed(run)


@pytest.mark.ranks(2)
def test_gradients_that_several_models_add_up_inside_no_sync():
    def run():
        models = [linear(), linear()]
        held = [sgd(model) for model in models]

        def backward(model):
            loss_of(model).backward()

        found = []
        for context in (contextlib.nullcontext, parwrap.no_sync, contextlib.nullcontext):
            with context():
                for model in models:
                    backward(model)
            found.append(grads(*models))
        return found[0], found[2], held

    first, last, _ = distributed(run)

    assert ([[MEAN] * 3] * 2, [[3 * MEAN] * 3] * 2) == (first, last)


@pytest.mark.ranks(2)
def test_a_line_that_only_reached_a_bare_tensor_before():
    def run():
        model, x = linear(), torch.ones(1, 3, requires_grad=True)
        optimizer = sgd(model)

        def backward(loss):
            loss.backward()

        model.requires_grad_(False)
        backward((model(x) * scale()).sum())
        model.requires_grad_(True)
        for _ in range(2):
            optimizer.zero_grad()
            backward(loss_of(model))
        return grads(model)

    assert [[MEAN] * 3] == distributed(run)


# optimizers that are copied


def by_copy(model, optimizer):
    return copy.deepcopy((model, optimizer))


def by_pickle(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def by_file(model, optimizer):
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("copied", [by_copy, by_pickle, by_file])
@pytest.mark.parametrize("later", [False, True])
def test_the_first_backward_of_a_copy_is_averaged(copied, later):
    def run():
        first = linear()
        pairs, found = [(first, sgd(first))], []
        for number in [0, 0, 0, 1, 1] if later else [0, 1, 1]:
            if len(found) == 1:
                pairs.append(copied(*pairs[0]))  # a snapshot for a while, if it is used later
                pairs[1][1].param_groups[0]["params"][0].grad = None
            model, optimizer = pairs[number]
            loss_of(model).backward()
            found.append(grads(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert [[[MEAN] * 3]] * (5 if later else 3) == distributed(run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_copies_train_as_in_one_process(strategy):
    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            for (x,) in DataLoader(TensorDataset(numbers()), 4):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            model, optimizer = copy.deepcopy((model, optimizer))
        return [model]

    as_one_process(train, strategy)


# modules without values


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_lazy_modules_train_as_in_one_process(strategy):
    def train():
        model, other = (nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(1)) for _ in range(2))
        unused = copy.deepcopy(model[0])
        model[1].eval()
        optimizer = torch.optim.Adam([*model.parameters(), *unused.parameters()], lr=0.01)
        for _ in range(2):
            for (x,) in DataLoader(TensorDataset(numbers()), 4, shuffle=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for (x,) in DataLoader(TensorDataset(numbers()), 4):
                    model(x)
        other.load_state_dict(model.state_dict())
        return [model, other]

    as_one_process(train, strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_modules_on_the_meta_device_take_no_part(strategy):
    def train():
        with torch.device("meta"):
            reference, filled = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)
        reference(torch.ones(2, 4, device="meta")).sum().backward()
        reference.eval()
        filled = filled.to_empty(device="cpu")
        filled.reset_parameters()
        skipped = nn.utils.skip_init(nn.Linear, 4, 1)
        for p in skipped.parameters():
            nn.init.normal_(p)
        optimizer = sgd(filled, skipped, reference)
        for _ in range(2):
            for (x,) in DataLoader(TensorDataset(numbers()), 4, shuffle=True):
                optimizer.zero_grad()
                (filled(x) + skipped(x)).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for (x,) in DataLoader(TensorDataset(numbers()), 4):
                    filled(x)
        return [filled, skipped]

    as_one_process(train, strategy)


# what is kept, and errors


@pytest.mark.ranks(2)
def test_the_line_that_is_used_most_is_not_forgotten(monkeypatch):
    found = []
    original = Sites._found
    monkeypatch.setattr(ddp_sites, "MOST", 2)
    monkeypatch.setattr(Sites, "_found", lambda self, call, codes: found.append(call) or original(self, call, codes))

    def run():
        model = linear()
        sgd(model)
        lines = [lambda: loss_of(model).backward(), lambda: loss_of(model).backward(), lambda: loss_of(model).backward()]
        for other in (1, 2, 1, 2):
            lines[0]()
            lines[other]()

    distributed(run)

    assert 1 + 4 == len(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seen", ["by its number", "by its page"])
def test_ranks_that_reach_outside_of_the_set_in_different_backwards_are_an_error_that_names_the_parameter(monkeypatch, seen):
    """As on GPUs, where a rank does not wait for what the others have reached."""

    def apart(group, kind, *args):
        if kind == "a set of parameters that grows":
            raise parwrap.LockstepError("the ranks have come apart")
        return agree(group, kind, *args)

    def run():
        model, other = linear(), linear()
        held = [sgd(model), sgd(other)]
        for number, _ in enumerate(DataLoader(TensorDataset(torch.ones(8, 3)), 2)):
            if seen == "by its number" and parwrap.rank() == 1 and number == 1:
                open_passes().backwards += 1
            (loss_of(model) + loss_of(other) if number else loss_of(model)).backward()
        return held

    if seen == "by its page":
        monkeypatch.setattr(ddp_sites, "agree", apart)
    with pytest.raises(parwrap.LockstepError, match=r"(?s)weight of a Linear.*(backward 2.*backward 3|come apart)"):
        distributed(run)
