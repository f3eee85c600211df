"""Steps in fp16 with optimizers of all sorts: what is skipped, what is seen of it, and what ends a training."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import parwrap
from scaled import FP16, batches, build, loss_of, same


def gan(data, backward, step, update):
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (critic, generator)]
    noise = torch.Generator().manual_seed(2)
    scales = []
    for real, _ in data:
        for optimizer, loss in ((optimizers[0], lambda fake, real=real: critic(fake.detach()).mean() - critic(real).mean()),
                                (optimizers[1], lambda fake: -critic(fake).mean())):  # fmt: skip
            optimizer.zero_grad()
            backward(lambda loss=loss: loss(generator(torch.randn(8, 3, generator=noise))))
            step(optimizer)
        scales.append(update())
    return generator.state_dict(), critic.state_dict(), scales


def test_two_optimizers_share_one_scale_that_changes_once_an_iteration():
    data = [(x * (1e5 if number in (3, 7) else 1), y) for number, (x, y) in enumerate(batches())]
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def backward_by_hand(loss):
        with torch.autocast("cpu", dtype=FP16, cache_enabled=False):
            scaled = scaler.scale(loss())
        scaled.backward()

    def update_by_hand():
        scaler.update()
        return scaler.get_scale()

    expected = gan(data, backward_by_hand, scaler.step, update_by_hand)
    with parwrap.amp(dtype="fp16", growth_interval=2):
        actual = gan(data, lambda loss: loss().backward(), lambda optimizer: optimizer.step(), lambda: parwrap.amp_state().scale)

    assert same(expected, actual)
    assert {16384.0, 32768.0, 65536.0} <= set(expected[2])


def test_a_closure_whose_gradients_overflow_changes_nothing():
    def train(closures):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
        for x, y in batches(overflowing=(0, 5, 6)):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            if closures:
                assert isinstance(optimizer.step(closure), torch.Tensor)
            else:
                closure()
                optimizer.step()
        return model.state_dict(), parwrap.amp_state().scale, parwrap.amp_state().skipped_steps

    expected, actual = (parwrap.amp(dtype="fp16")(train)(closures) for closures in (False, True))

    assert same(expected, actual)
    assert 3 <= actual[2]


def test_lbfgs_passes_over_an_overflow():
    def train():
        model = nn.Linear(6, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        for x, y in batches(overflowing=(0, 3)):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return model, parwrap.amp_state().skipped_steps

    model, skipped = parwrap.amp(dtype="fp16")(train)()

    assert skipped >= 2
    assert (model.weight[0, 0] - 2).abs() < 0.2


def test_schedulers_do_not_warn_about_a_skipped_step():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1)
        loss_of(model, *batches(1, overflowing=[0])[0]).backward()
        optimizer.step()
        scheduler.step()
        return parwrap.amp_state().skipped_steps

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 1 == parwrap.amp(dtype="fp16")(train)()


@pytest.mark.ranks(1)  # where what is alive, which is looked through for optimizers, is little
@pytest.mark.parametrize("owned", [True, False], ids=["an optimizer", "by hand"])
def test_a_training_that_has_diverged_ends_with_what_to_do(owned):
    @parwrap.amp(dtype="fp16", init_scale=8.0)
    def train():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1) if owned else None
        for _ in range(400):
            (weight * math.nan).sum().backward()
            if optimizer:
                optimizer.step()
            weight.grad = None

    with pytest.raises(parwrap.ParwrapError) as error:
        train()

    assert str(error.value) == (
        "gradients were not finite in 28 iterations in a row, and the loss scale has fallen to 3e-08: the training has diverged, or its "
        "gradients do not fit into float16. Compute in bf16 (parwrap.amp(dtype='bf16'), --amp bf16), lower the learning rate, or find "
        "out what makes the loss infinite or NaN."
    )


def test_an_optimizer_that_is_built_between_two_calls_skips_too():
    @parwrap.amp(dtype="fp16")
    def step(model, optimizer):
        loss_of(model, *batches(1, overflowing=[0])[0]).backward()
        optimizer.step()
        return parwrap.amp_state().skipped_steps

    for number in (1, 2):
        model = build()
        before = copy.deepcopy(model.state_dict())

        assert number == step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert same(before, model.state_dict())


def test_weights_that_are_changed_by_hand_are_not_ruined_by_an_overflow(capfd):
    def train():
        weight = torch.zeros(6, 1, requires_grad=True)
        for x, y in batches(40, overflowing=(0, 5)):
            nn.functional.mse_loss(x @ weight, y).backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
        return weight

    assert (parwrap.amp(dtype="fp16")(train)()[0] - 2).abs() < 0.1
    assert 1 == capfd.readouterr().err.count("the gradient of a tensor that no optimizer owns overflowed in float16. It was set to 0")


def test_a_step_that_calls_that_of_its_base_class_is_one_step():
    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    weight = nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight])  # so that torch's hooks are around the base class's step too
    with parwrap.amp(dtype="fp16", growth_interval=2):
        optimizer = Noted([weight], lr=0.1)
        for factor, scale in ((math.inf, 32768.0), (1.0, 32768.0), (1.0, 65536.0)):
            optimizer.zero_grad()
            (weight * factor).sum().backward()
            optimizer.step()

            assert scale == parwrap.amp_state().scale
        assert 1 == parwrap.amp_state().skipped_steps
    assert 0.8 == pytest.approx(weight.item())


def test_an_optimizer_that_wraps_another_steps_with_neither():
    class Lookahead(torch.optim.Optimizer):
        """Every step moves halfway to where the inner optimizer has gone."""

        def __init__(self, inner):
            self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, {}
            self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

        def step(self, closure=None):
            self.inner.step()
            for p, slow in zip([p for group in self.param_groups for p in group["params"]], self.slow, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)

    weight = nn.Parameter(torch.ones(1))
    with parwrap.amp(dtype="fp16"):
        optimizer = Lookahead(torch.optim.SGD([weight], lr=1.0))
        (weight * math.inf).sum().backward()
        optimizer.step()

    assert 1.0 == weight.item()


def test_a_step_that_cannot_be_skipped_is_an_error():
    weight = nn.Parameter(torch.ones(1))

    class Stubborn(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                weight.add_(1)

    with parwrap.amp(dtype="fp16"):
        optimizer = Stubborn([weight], lr=1.0)
        (weight * math.inf).sum().backward()
        with pytest.raises(parwrap.UsageError) as refusal:
            optimizer.step()

    assert str(refusal.value).endswith(
        ": Stubborn.step() has changed a parameter of shape (1,) in a step that parwrap has to skip. Let step() iterate over the "
        "parameters in self.param_groups, or train this part without parwrap.amp and parwrap.accumulate."
    )


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_does_not_hide_an_overflow(clip):
    weight = nn.Parameter(torch.ones(2))
    with parwrap.amp(dtype="fp16"):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for factor in (math.inf, 1.0):
            optimizer.zero_grad()
            (weight * torch.tensor([factor, 1.0])).sum().backward()
            getattr(nn.utils, clip)([weight], 0.5)
            optimizer.step()

        assert 1 == parwrap.amp_state().skipped_steps
    assert weight.isfinite().all()
    assert (weight < 1).all()


def test_an_overflow_whose_batch_the_loop_leaves_is_forgotten():
    weight = nn.Parameter(torch.ones(1))
    with parwrap.amp(dtype="fp16"):
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for factor in (math.inf, 1.0):
            optimizer.zero_grad()
            (weight * factor).sum().backward()
            nn.utils.clip_grad_norm_([weight], 10.0)
            if math.isfinite(factor):
                optimizer.step()

        assert (0, 0.5) == (parwrap.amp_state().skipped_steps, weight.item())


@pytest.mark.parametrize(("imaginary", "skipped"), [(1.0, 0), (math.inf, 1)])
def test_complex_gradients(imaginary, skipped):
    weight = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    with parwrap.amp(dtype="fp16"):
        optimizer = torch.optim.SGD([weight], lr=0.5)
        (weight * torch.tensor([complex(1.0, imaginary)])).abs().sum().backward()
        optimizer.step()

        assert skipped == parwrap.amp_state().skipped_steps
