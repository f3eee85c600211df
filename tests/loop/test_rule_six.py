"""Rule 6: what is made inside a training pass belongs to the batch."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError
from parwrap.ranks.group import alone

X = torch.linspace(-1, 1, 16).view(16, 1)


def loader(batch_size=2):
    return DataLoader(TensorDataset(X, X**2), batch_size=batch_size)


def made():
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def same(model):
    return 1 == len({str(each) for each in parwrap.gather([p.tolist() for p in model.parameters()])})


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_latents_of_a_batch_with_an_optimizer_are_this_ranks(kind):
    with parwrap.distributed():
        model, optimizer = made()
        fitted = []
        for x, y in loader():
            start = torch.zeros(2, 1)
            latent = nn.Parameter(start) if kind == "parameter" else start.requires_grad_()
            own = torch.optim.SGD([latent], lr=0.5)
            for _ in range(3):
                own.zero_grad()
                nn.functional.mse_loss(latent, x).backward()
                own.step()
            fitted += (latent.detach() / x).flatten().tolist()
            step(model, optimizer, latent.detach(), y)

        assert same(model)
    assert [pytest.approx(1 - 0.5**3)] * 8 == fitted


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_gradients_of_inputs_are_this_ranks():
    with parwrap.distributed():
        model, optimizer = made()
        for x, y in loader():
            adversarial = x.clone().requires_grad_()
            nn.functional.mse_loss(model(adversarial), y).backward()
            alone = torch.autograd.grad(nn.functional.mse_loss(model(mine := x.clone().requires_grad_()), y), mine)[0]

            assert torch.allclose(alone, adversarial.grad)
            step(model, optimizer, x + 0.1 * adversarial.grad.sign(), y)

        assert same(model)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_copies_that_a_task_trains_are_this_ranks():
    with parwrap.distributed():
        model, optimizer = made()
        for x, y in loader():
            fast = copy.deepcopy(model)
            inner, alone = torch.optim.SGD(fast.parameters(), lr=0.1), copy.deepcopy(model)
            step(fast, inner, x, y)
            gradients = torch.autograd.grad(nn.functional.mse_loss(alone(x), y), list(alone.parameters()))
            expected = [p - 0.1 * g for p, g in zip(alone.parameters(), gradients, strict=True)]

            assert all(torch.allclose(a, b) for a, b in zip(expected, fast.parameters(), strict=True))
            step(model, optimizer, x, y)

        assert same(model)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_copies_that_are_not_trained_may_live_on():
    with parwrap.distributed():
        model, optimizer = made()
        average = best = None
        for _ in range(2):
            for x, y in loader():
                step(model, optimizer, x, y)
                average = average or copy.deepcopy(model)
                with torch.no_grad():
                    for a, p in zip(average.parameters(), model.parameters(), strict=True):
                        a.lerp_(p, 0.1)
                best = copy.deepcopy(model)

        assert same(model)
        assert same(average)
        assert same(best)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_an_optimizer_of_older_parameters_that_is_built_inside_is_averaged():
    with parwrap.distributed():
        model, optimizer = made()
        for epoch in range(2):
            for index, (x, y) in enumerate(loader()):
                if epoch == 1 and index == 1:
                    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                step(model, optimizer, x, y)

        assert same(model)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_what_is_made_outside_of_passes_is_averaged_whenever_it_is_trained():
    with parwrap.distributed():
        model, optimizer = made()
        codes = torch.zeros(16, 1, requires_grad=True)
        of_codes = torch.optim.SGD([codes], lr=0.1)
        for x, y in loader():
            of_codes.zero_grad()
            step(model, optimizer, x + codes[:2], y)
            of_codes.step()

        assert same(model)
        assert 1 == len({str(each) for each in parwrap.gather(codes.tolist())})


@pytest.mark.ranks(2)
def test_without_an_optimizer_bare_tensors_are_parameters():
    with parwrap.distributed():
        weight = torch.zeros(1, 1, requires_grad=True)
        for _ in range(2):
            for x, y in parwrap.shard(loader()):
                nn.functional.mse_loss(x @ weight, y + x).backward()
                with torch.no_grad():
                    weight -= 0.1 * weight.grad
                weight.grad = None

        assert 1 == len(set(parwrap.gather(weight.item())))


MODEL_LATER = (
    r"test_rule_six.py:\d+ trains the parameters of a SGD, which test_rule_six.py:\d+ created in an earlier batch of the training pass at "
    r"(test_rule_six.py:\d+). A parameter created inside a training pass belongs to one batch: each rank has its own, and its "
    r"gradient is not averaged. To train it in several batches, create it before the first pass at \1; there, all ranks create the "
    r"same one."
)


@pytest.mark.ranks(2)
def test_a_model_made_inside_and_trained_in_a_later_batch_is_an_error():
    @parwrap.distributed
    def train():
        first, late = made(), None
        for x, y in loader():
            late = late or made()
            step(*late, x, y)
        return first

    with pytest.raises(UsageError, match=MODEL_LATER.replace("the parameters of a SGD", r"a parameter of shape \(1,\)")):
        train()


@pytest.mark.ranks(2)
def test_latents_with_an_optimizer_that_are_kept_for_a_later_batch_are_an_error():
    @parwrap.distributed
    def train():
        model, optimizer = made()
        of_latent = None
        for x, y in loader():
            if of_latent is None:
                latent = torch.zeros(2, 1, requires_grad=True)
                of_latent = torch.optim.SGD([latent], lr=0.1)
            step(model, optimizer, x + latent, y)
            of_latent.step()

    with pytest.raises(UsageError, match=MODEL_LATER):
        train()


NOT_AVERAGED = r"does not average the gradient of a tensor of shape \(2, 1\) .* write nn\.Parameter\(tensor\)"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch.Tensor.requires_grad_, nn.Parameter])
def test_a_bare_tensor_that_is_trained_by_hand_is_this_ranks_as_in_ddp_which_is_said_once(make):
    """As in free adversarial training, which keeps a perturbation and changes it by hand. A parameter is averaged."""
    with parwrap.distributed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer = made()
        delta = make(torch.zeros(2, 1))
        for _ in range(2):
            for x, y in loader():
                step(model, optimizer, x + delta, y)
                with torch.no_grad():
                    delta += 0.1 * delta.grad
                delta.grad = None
        deltas, is_averaged = parwrap.gather(delta.tolist()), make is nn.Parameter

        assert same(model)
    assert (deltas[0] == deltas[1]) is is_averaged
    assert (0 if is_averaged else 1) == sum(bool(re.search(NOT_AVERAGED, str(each.message))) for each in said)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_bare_tensors_that_are_not_trained_or_belong_to_a_batch_are_not_named():
    with parwrap.distributed():
        model, optimizer = made()
        points, kept = torch.ones(2, 1, requires_grad=True), []
        for x, y in loader():
            latents = torch.zeros_like(x).requires_grad_()
            kept.append(latents)
            for _ in range(3):
                step(model, optimizer, x + latents + points, y)
                with torch.no_grad():
                    latents -= 0.1 * latents.grad


@pytest.mark.ranks(2)
def test_an_optimizer_of_an_earlier_batch_that_steps_on_gradients_made_by_hand_is_an_error():
    @parwrap.distributed
    def train():
        model, optimizer = made()
        kept = None
        for x, y in loader():
            step(model, optimizer, x, y)
            if kept is None:
                latent = torch.zeros(2, 1, requires_grad=True)
                kept = torch.optim.SGD([latent], lr=0.1)
            latent.grad = torch.ones(2, 1)
            kept.step()

    with pytest.raises(UsageError, match=MODEL_LATER):
        train()


@pytest.mark.ranks(2)
def test_a_parameter_of_an_earlier_batch_that_a_backward_at_another_line_reaches_is_an_error():
    @parwrap.distributed
    def train():
        model, optimizer = made()
        kept = None
        for x, y in loader():
            if kept is None:
                kept = nn.Parameter(torch.zeros(2, 1))
                step(model, optimizer, x + kept, y)
            else:
                nn.functional.mse_loss(model(x + kept), y).backward()

    text = r"test_rule_six.py:\d+ trains a parameter of shape \(2, 1\), which test_rule_six.py:\d+ created in an earlier batch"
    with pytest.raises(UsageError, match=text):
        train()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [0, 2])
def test_a_parameter_that_a_batch_makes_and_a_later_batch_trains_by_hand_is_refused_at_a_line_that_trained_before(first):
    with parwrap.distributed():
        model, optimizer = made()
        batches = iter(loader())
        for _ in range(first):
            step(model, optimizer, *next(batches))
        x, y = next(batches)
        offset = made_here()
        step(model, optimizer, x + offset, y)
        x, y = next(batches)
        with pytest.raises(UsageError, match=rf"trains a parameter of shape \(2, 1\), which .*:{line_of(made_here)} created in"):
            step(model, optimizer, x + offset, y)


def made_here():
    return nn.Parameter(torch.zeros(2, 1))


def line_of(function):
    return function.__code__.co_firstlineno + 1


@pytest.mark.ranks(2)
def test_parameters_that_a_batch_makes_keep_no_hook():
    with parwrap.distributed():
        model, optimizer = made()
        for x, y in loader():
            latent = made_here()
            step(model, optimizer, x + latent, y)

    assert not latent._post_accumulate_grad_hooks


@pytest.mark.ranks(2)
def test_a_model_that_a_pass_over_everything_makes_is_trained_by_an_optimizer_that_is_built_afterwards():
    with parwrap.distributed():
        for x, _ in loader():
            model = nn.Linear(x.shape[1], 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader():
            step(model, optimizer, x, y)

        assert same(model)


@pytest.mark.ranks(2)
def test_a_model_that_is_made_in_a_pass_that_reads_everything_is_the_scripts():
    """For example one that is built from the shape of the first batch: the next pass trains it on shares."""
    with parwrap.distributed():
        batches, model = [], None
        for _ in range(3):
            batches.append(0)
            for x, y in loader():
                if model is None:
                    model, optimizer = made()
                step(model, optimizer, x, y)
                batches[-1] += 1
        alike = same(model)

    assert [8, 4, 4] == batches
    assert alike


def batches(data, held):
    if held:
        yield from data
    while not held:
        yield next(iter(data))


def ensemble(make, held):
    """Two models that are trained one after the other, of which ``make`` makes all at once or each in its turn."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(X, X**2), batch_size=4, shuffle=True)
    models = make()
    for model, optimizer in models:
        taken = batches(data, held)
        for _ in range(3):
            step(model, optimizer, *next(taken))
        yield model


def in_turn():
    return (made() for _ in range(2))


def at_once():
    return [made() for _ in range(2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("held", [False, True])
def test_models_of_an_ensemble_are_made_before_the_first_pass_as_the_error_says(held):
    with alone():
        expected = list(ensemble(at_once, held))
    with parwrap.distributed(batch="global"):
        actual = list(ensemble(at_once, held))
    for one, other in zip(expected, actual, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    open_still = "" if held else r"\1 begins a pass for every batch, and its last one is open until another begins. "
    text = rf"in an earlier batch of the training pass at (test_rule_six.py:\d+). {open_still}A parameter .* before the first pass at \1; "
    with parwrap.distributed(batch="global"), pytest.raises(UsageError, match=text):
        list(ensemble(in_turn, held))
