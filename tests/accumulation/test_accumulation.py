"""What loops do between a backward and a step, under ``@accumulate``."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import parwrap


def weight(value=0.0):
    return torch.nn.Parameter(torch.full((1,), value, dtype=torch.float64))


def trained(body, steps=4, batches=4, loader=False, optimizer=None):
    """The weight before each batch and at the end, of a loop that calls ``body(w, optimizer, number)``."""
    w = weight()
    seen = []

    @parwrap.accumulate(steps)
    def train():
        sgd = (optimizer or torch.optim.SGD)([w], lr=1.0)
        for number in DataLoader(range(batches), batch_size=None) if loader else range(batches):
            seen.append(w.item())
            body(w, sgd, int(number))

    train()
    return [*seen, w.item()]


def step(w, optimizer, number):
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("warm_up", [3, 4, 6])
def test_a_loop_that_follows_another_goes_on_with_its_batches(warm_up):
    def in_two_loops():
        w = weight()
        optimizer, seen = torch.optim.SGD([w], lr=1.0), []
        for number in range(warm_up):
            step(w, optimizer, number)
            seen.append(w.item())
        for number in range(12 - warm_up):
            step(w, optimizer, number)
            seen.append(w.item())
        return seen

    assert [-1.0 * (done // 4) for done in range(1, 13)] == parwrap.accumulate(4)(in_two_loops)()


def test_two_losses_of_a_batch_at_different_places_are_steps_of_their_own():
    def twice(w, optimizer, number):
        step(w, optimizer, number)
        optimizer.zero_grad()
        (w * 10.0).sum().backward()
        optimizer.step()

    assert trained(twice, steps=2, batches=6) == [0, 0, -11, -11, -22, -22, -33]


def test_a_hook_on_a_parameter_sees_each_gradient_once():
    def hooked(w, optimizer, number):
        if number == 0:
            w.register_hook(lambda grad: grad * 0.5)
        step(w, optimizer, number)

    assert trained(hooked) == [0, 0, 0, 0, -0.5]


@pytest.mark.parametrize("steps", [2, 4])
def test_gradients_that_a_loop_keeps_stay_as_they_are(steps):
    kept = []

    def keeping(w, optimizer, number):
        step(w, optimizer, number)
        kept.append(w.grad)

    trained(keeping, steps=steps, batches=12)

    part = 1 / steps
    assert [grad.item() for grad in kept] == ([part] * (steps - 1) + [1.0]) * (12 // steps)


@pytest.mark.parametrize("by", [lambda w: w.grad.add_(0.1), lambda w: setattr(w, "grad", w.grad + 0.1)], ids=["in place", "anew"])
def test_gradients_that_are_changed_by_hand_are_said_once(by):
    def changing(w, optimizer, number):
        optimizer.zero_grad()
        w.sum().backward()
        by(w)
        optimizer.step()

    with pytest.warns(UserWarning, match=r"changed between backward\(\) and the step at .*test_accumulation.py:\d+\. Inside a wi") as said:
        trained(changing, batches=12)

    assert len(said) == 1


def test_gradients_that_are_not_changed_are_not_said():
    def clipped(w, optimizer, number):
        optimizer.zero_grad(set_to_none=number % 2)
        w.sum().backward()
        (w * 2).sum().backward()
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(clipped, batches=12)


@pytest.mark.parametrize("loader", [False, True])
def test_a_second_loader_may_be_read_inside_of_a_batch(loader):
    others = iter(DataLoader(range(100)))

    def two(w, optimizer, number):
        optimizer.zero_grad()
        w.sum().backward()
        next(others)
        (w * 2).sum().backward()
        optimizer.step()

    assert trained(two, loader=loader) == [0, 0, 0, 0, -3]


@pytest.mark.parametrize("loader", [False, True])
def test_a_batch_may_be_evaluated_before_its_step(loader):
    def evaluated(w, optimizer, number):
        optimizer.zero_grad()
        w.sum().backward()
        for _ in DataLoader(range(3)):
            with torch.no_grad():
                w.sum()
        optimizer.step()

    assert trained(evaluated, batches=8, loader=loader) == [0, 0, 0, 0, -1, -1, -1, -1, -2]


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("loader", [False, True])
def test_a_batch_whose_loss_is_not_finite_may_be_left(loader, left):
    def guarded(w, optimizer, number):
        optimizer.zero_grad()
        loss = (w * (float("nan") if number == left else 1.0)).sum()
        loss.backward()
        if not loss.isfinite():
            optimizer.zero_grad()
            return
        optimizer.step()

    assert trained(guarded, batches=5, loader=loader)[-1] == -1, "the mean of the four others"


def test_a_backward_that_fails_may_be_left():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError("out of memory")

    def failing(w, optimizer, number):
        optimizer.zero_grad()
        try:
            (Failing.apply(w) if number == 1 else w).sum().backward()
        except RuntimeError:
            return
        optimizer.step()

    assert trained(failing, steps=2, batches=3) == [0, 0, 0, -1]
    assert trained(failing, steps=2, batches=5)[-1] == -2


class Scaled:
    """A loop with a scaler of its own, after whose last batch there may be an open window."""

    def __init__(self, **options):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000, **options)

    def __call__(self, w, optimizer, number, factor=1.0):
        optimizer.zero_grad()
        self.scaler.scale((w * (number + 1) * factor).sum()).backward()
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([w], 100.0)
        self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize(("batches", "expected"), [(4, -2.5), (6, -2.5 - 5.5), (5, -2.5 - 5.0)])
def test_a_script_with_a_scaler_of_its_own(batches, expected):
    assert trained(Scaled(), batches=batches)[-1] == expected


def test_a_script_with_a_scaler_of_its_own_leaves_out_the_window_that_has_overflowed():
    loop = Scaled()

    def overflowing(w, optimizer, number):
        loop(w, optimizer, number, factor=float("inf") if number == 1 else 1.0)

    assert trained(overflowing, batches=8) == [0] * 8 + [-(5 + 6 + 7 + 8) / 4]
    assert loop.scaler.get_scale() == 512


@pytest.mark.ranks(2)
def test_ranks_with_scalers_of_their_own_leave_out_the_same_windows():
    loop = Scaled()

    def overflowing(w, optimizer, number):
        loop(w, optimizer, number, factor=float("inf") if number == 1 and parwrap.rank() == 1 else 1.0)

    ended = parwrap.distributed(lambda: trained(overflowing, batches=8)[-1])()

    assert parwrap.gather((ended, loop.scaler.get_scale())) == [(-(5 + 6 + 7 + 8) / 4, 512)] * 2
