"""``@accumulate``: what a loop does between a backward and a step, against larger batches, by hand, and DDP with ``no_sync``."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import parwrap
from drawn_order import DrawnOrder
from parwrap.decorators.distributed import open_loop
from parwrap.ranks.group import alone
from parwrap.strategies.ddp_averager import GradientAverager

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)]


def weight(value=0.0):
    return nn.Parameter(torch.full((1,), value, dtype=torch.float64))


def trained(body, steps=4, batches=4, loader=False):
    """The weight before each batch and at the end, of a loop that calls ``body(w, optimizer, number)``."""
    w, seen = weight(), []

    @parwrap.accumulate(steps)
    def train():
        optimizer = torch.optim.SGD([w], lr=1.0)
        for number in DataLoader(range(batches), batch_size=None) if loader else range(batches):
            seen.append(w.item())
            body(w, optimizer, int(number))

    train()
    return [*seen, w.item()]


def step(w, optimizer, number):
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()


# one process with larger batches


def dataset(samples=72):
    features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(features, features[:, :1] * 2)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(batch_size, epochs=3, clip=None, to_none=True, samples=72, leave=None):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(dataset(samples), batch_size=batch_size)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad(set_to_none=to_none)
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                clip(model)
            optimizer.step()
            if number == leave:
                break
        schedule.step()
    return model


def by_itself(function, *args, **kwargs):
    """What one process does without anything of parwrap."""
    with alone():
        return function(*args, **kwargs)


def accumulated(function, *args, steps=4, **kwargs):
    return parwrap.distributed(batch="global")(parwrap.accumulate(steps)(function))(*args, **kwargs)


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def value(model):
    torch.nn.utils.clip_grad_value_(list(model.parameters()), 0.01)


def with_norm(model):
    grads = [p.grad for p in model.parameters()]
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, nn.utils.get_total_norm(grads))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clip", [None, norm, value, with_norm])
def test_it_is_the_loop_with_larger_batches(size, to_none, clip):
    expected = by_itself(train, 24, clip=clip)
    actual = accumulated(train, 6, clip=clip, to_none=to_none)

    assert distance(actual, expected) < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [60, 66, 30])
def test_the_last_window_of_an_epoch_is_shorter(size, samples):
    expected = by_itself(train, 24, samples=samples)
    actual = accumulated(train, 6, samples=samples)

    assert distance(actual, expected) < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("clip", [None, norm, value, with_norm])
def test_after_a_break_the_open_window_is_applied(size, clip):
    def plain():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x, y in (dataset()[:24], dataset()[24:36]):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                clip(model)
            optimizer.step()
        return model

    actual = accumulated(train, 6, epochs=1, clip=clip, leave=5)

    assert distance(actual, by_itself(plain)) < 1e-12


class Feed:
    """Holds its iterator in a cycle."""

    def __init__(self, loader):
        self.me, self.batches = self, iter(loader)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collected", [None, 0, 1, 6])
def test_an_iterator_that_the_garbage_collector_finds_ends_no_window(size, collected):
    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    def plain():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        twice = ConcatDataset([Subset(dataset(), range(12)), dataset()])
        for x, y in DataLoader(twice, batch_size=24):
            step(model, optimizer, x, y)
        return model

    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(dataset(), batch_size=6)
        feed = Feed(loader)
        for _ in range(2):
            step(model, optimizer, *next(feed.batches))
        del feed
        for number, (x, y) in enumerate(loader):
            if number == collected and parwrap.rank() == 0:
                gc.collect()
            step(model, optimizer, x, y)
        return model

    assert distance(accumulated(train), by_itself(plain)) < 1e-12


@pytest.mark.ranks(2)
def test_evaluation_inside_a_window_and_schedules_by_batch():
    def train(batch_size, steps):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=12)
        seen, rates = [], []
        for _ in range(2):
            for number, (x, y) in enumerate(DataLoader(dataset(), batch_size=batch_size)):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                for _ in range(steps):
                    schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
                if number % 2:
                    model.eval()
                    seen.append(sum(len(model(x)) for x, _ in DataLoader(dataset(30), batch_size=10)))
                    model.train()
        return model, seen, rates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _, _ = by_itself(train, 24, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, seen, rates = accumulated(train, 6, 1)

    assert distance(actual, expected) < 1e-12
    assert [30] * 12 == seen
    assert [0.01] * 11 + [0.001] * 12 + [0.0001] == pytest.approx(rates)


def batch_of(rank, number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64)


def gan_losses(G, D, rank, number):
    fake = G(batch_of(rank, number)[:, :2])
    softplus = nn.functional.softplus
    critic = softplus(-D(batch_of(rank, number)[:, 1:] + 2)).mean() + softplus(D(fake.detach())).mean()
    return critic, lambda: softplus(-D(fake)).mean()


def gan():
    torch.manual_seed(0)
    models = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return [model.double() for model in models]


def train_gan(numbers):
    """The loop of torch's tutorial; the generator's backward leaves gradients in the discriminator, which the next zero_grad drops."""
    G, D = gan()
    opt_d, opt_g = torch.optim.SGD(D.parameters(), lr=0.5, momentum=0.5), torch.optim.SGD(G.parameters(), lr=0.5)
    for number in map(int, parwrap.replicate(DataLoader(list(numbers), batch_size=None))):
        critic, generator = gan_losses(G, D, parwrap.rank(), number)
        D.zero_grad()
        critic.backward()
        opt_d.step()
        G.zero_grad()
        generator().backward()
        opt_g.step()
    return nn.ModuleList([G, D])


def gan_by_hand(windows, size):
    """What it should be: earlier batches of a window see the discriminator from before its step."""
    G, D = gan()
    opt_d, opt_g = torch.optim.SGD(D.parameters(), lr=0.5, momentum=0.5), torch.optim.SGD(G.parameters(), lr=0.5)
    for window in windows:
        is_shorter = len(window) < len(windows[0])
        share = len(window) * size
        losses = [[gan_losses(G, D, rank, number) for rank in range(size)] for number in window]
        opt_d.zero_grad()
        (sum(critic for several in losses for critic, _ in several) / share).backward(retain_graph=True)
        earlier = losses if is_shorter else losses[:-1]  # the steps of a shorter window come together, at its end
        before = sum(generator() / share for several in earlier for _, generator in several)
        grads = torch.autograd.grad(before, list(G.parameters()), retain_graph=True)
        opt_d.step()
        opt_g.zero_grad()
        if not is_shorter:
            sum(gan_losses(G, D, rank, window[-1])[1]() / share for rank in range(size)).backward()
        for p, grad in zip(G.parameters(), grads, strict=True):
            p.grad = grad if p.grad is None else p.grad + grad
        opt_g.step()
    return nn.ModuleList([G, D])


@pytest.mark.parametrize("size", SIZES)
def test_two_optimizers_of_a_gan(size):
    with alone():
        expected = gan_by_hand([range(3), range(3, 6), range(6, 7)], size)
    actual = parwrap.distributed(parwrap.accumulate(3)(train_gan))(range(7))

    assert distance(actual, expected) < 1e-12


# DDP by hand with no_sync


def ddp_with_no_sync(model, data, n, amp):
    """Accumulation as torch's documentation has it."""
    ddp, scaler = DistributedDataParallel(model), torch.amp.GradScaler("cpu", enabled=amp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sampler = DrawnOrder(data, seed=3)
    for _ in range(2):
        for number, (x, y) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
            closes = (number + 1) % n == 0
            with contextlib.nullcontext() if closes else ddp.no_sync():
                with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                    loss = nn.functional.mse_loss(ddp(x), y * (1e3 if number == 1 else 1)) / n
                scaler.scale(loss).backward()
            if closes:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("amp", [False, True])
def test_it_is_bit_for_bit_ddp_with_no_sync(amp):
    data = TensorDataset(*(each.float() for each in dataset(64).tensors))
    by_hand, model = build().float(), build().float()
    scale = ddp_with_no_sync(by_hand, data, 4, amp)

    @parwrap.distributed(seed=3)
    @parwrap.amp(dtype="fp16" if amp else "O0")
    @parwrap.accumulate(4)
    def train():
        optimizer, loader = torch.optim.AdamW(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True)
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y * (1e3 if number == 1 else 1)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return parwrap.amp_state().scale

    assert scale == train()
    assert [] == [name for name, p in by_hand.named_parameters() if not torch.equal(p, model.get_parameter(name))]
    assert not amp or scale < 65536


@pytest.mark.ranks(2)
def test_gradients_travel_once_a_step(monkeypatch):
    sent, run = [], GradientAverager.run
    monkeypatch.setattr(GradientAverager, "run", lambda self, *args: (sent.append(1), run(self, *args))[1])
    accumulated(train, 6, epochs=1)

    assert 3 == len(sent)


@pytest.mark.ranks(2)
def test_a_block_around_a_distributed_function_does_the_same():
    expected = accumulated(train, 6)
    with parwrap.accumulate(4):
        actual = parwrap.distributed(batch="global")(train)(6)

    assert distance(actual, expected) < 1e-12


@pytest.mark.ranks(2)
def test_an_overflow_of_one_rank_in_a_window_skips_the_step_on_all():
    @parwrap.distributed
    @parwrap.amp(dtype="fp16", init_scale=1024.0)
    @parwrap.accumulate(2)
    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = []
        for number in range(6):
            optimizer.zero_grad()
            factor = 1e9 if (number, parwrap.rank()) == (2, 1) else 0.5 + parwrap.rank()
            (model(torch.ones(8, 4)).float().mean() * factor).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            weights.append(model.weight.detach().clone())
        return weights, parwrap.amp_state()

    weights, state = train()

    assert torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[3], weights[5])
    assert (512.0, 1) == (state.scale, state.skipped_steps)


@pytest.mark.ranks(2)
def test_the_loss_of_the_batch_that_closes_a_window_is_the_mean_over_ranks():
    seen = []

    def body(w, optimizer, number):
        loss = ((w + 1) * (1 + 2 * parwrap.rank())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())

    with parwrap.distributed():
        trained(body, steps=2, batches=2)

    assert [1.0 + 2 * parwrap.rank(), 2.0] == seen


@pytest.mark.ranks(2)
def test_a_window_that_another_line_closes_is_averaged_before_the_step():
    def body(w, optimizer, number):
        optimizer.zero_grad()
        if number < 2:
            (w * (1 + parwrap.rank())).sum().backward()
        else:
            (w * (4 + parwrap.rank())).sum().backward()
        optimizer.step()

    with parwrap.distributed():
        assert [0, 0, 0, -2.5] == pytest.approx(trained(body, steps=3, batches=3))


# what loops do


def zero(way, w, optimizer):
    if way == "dropped by hand":
        w.grad = None
    elif way == "zeroed by hand" and w.grad is not None:
        w.grad.data.zero_()
    else:
        optimizer.zero_grad(set_to_none=way == "set to none")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loader", [True, False])
@pytest.mark.parametrize("way", ["set to none", "zeroed", "dropped by hand", "zeroed by hand"])
@pytest.mark.parametrize("after", [True, False])
def test_whatever_a_loop_does_with_gradients_that_were_used(size, loader, way, after):
    def body(w, optimizer, number):
        if not after:
            zero(way, w, optimizer)
        (w * (number + 1 + parwrap.rank())).sum().backward()
        optimizer.step()
        if after:
            zero(way, w, optimizer)

    with parwrap.distributed():
        seen = trained(body, steps=2, batches=4, loader=loader and size == 1)

    more = (size - 1) / 2
    assert [0, 0, -1.5 - more, -1.5 - more, -5 - 2 * more] == seen


def test_a_hook_on_a_parameter_sees_each_gradient_once():
    def hooked(w, optimizer, number):
        if number == 0:
            w.register_hook(lambda grad: grad * 0.5)
        step(w, optimizer, number)

    assert [0, 0, 0, 0, -0.5] == trained(hooked)


def test_gradients_that_a_loop_keeps_stay_as_they_are():
    kept = []

    def keeping(w, optimizer, number):
        step(w, optimizer, number)
        kept.append(w.grad)

    trained(keeping, steps=4, batches=12)

    assert [0.25, 0.25, 0.25, 1.0] * 3 == [grad.item() for grad in kept]


def test_norms_that_are_asked_for_inside_a_window_are_those_of_its_batch():
    norms = []

    def body(w, optimizer, number):
        optimizer.zero_grad()
        (w * (3.0 + 2 * number)).sum().backward()
        norms.append(nn.utils.clip_grad_norm_((p for p in [w]), 1.0).item())
        optimizer.step()

    assert -1.0 == pytest.approx(trained(body, steps=2, batches=2)[-1], abs=1e-5)
    assert [1.5, 4.0] == norms


def test_a_second_loader_may_be_read_inside_a_batch():
    others = iter(DataLoader(range(100)))

    def two(w, optimizer, number):
        optimizer.zero_grad()
        w.sum().backward()
        next(others)
        (w * 2).sum().backward()
        optimizer.step()

    assert [0, 0, 0, 0, -3] == trained(two, loader=True)


def test_each_batch_may_come_from_an_iterator_of_its_own():
    def body(w, optimizer, number):
        (x,) = next(iter(DataLoader(range(1))))
        optimizer.zero_grad()
        (w * (1 + x)).sum().backward()
        optimizer.step()

    assert [0, 0, 0, 0, -1] == trained(body)


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_batch_whose_loss_is_not_finite_may_be_left(left):
    def guarded(w, optimizer, number):
        optimizer.zero_grad()
        loss = (w * (float("nan") if number == left else 1.0)).sum()
        loss.backward()
        if not loss.isfinite():
            optimizer.zero_grad()
            return
        optimizer.step()

    assert [0, 0, 0, 0, 0, -1] == trained(guarded, batches=5)


@pytest.mark.parametrize("by", [lambda w: w.grad.add_(0.1), lambda w: setattr(w, "grad", w.grad + 0.1)], ids=["in place", "anew"])
def test_gradients_that_are_changed_by_hand_are_said_once(by):
    def changing(w, optimizer, number):
        optimizer.zero_grad()
        w.sum().backward()
        by(w)
        optimizer.step()

    with pytest.warns(UserWarning, match=r"gradients were changed between backward\(\) and step\(\)\. With parwrap\.accumulate") as said:
        trained(changing, batches=12)

    assert len(said) == 1


def test_gradients_that_are_not_changed_are_not_said():
    def clipped(w, optimizer, number):
        optimizer.zero_grad(set_to_none=number % 2)
        w.sum().backward()
        (w * 2).sum().backward()
        nn.utils.clip_grad_norm_([w], 1.0)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(clipped, batches=12)


class Scaled:
    """A loop with a scaler of its own, after whose last batch there may be an open window."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def __call__(self, w, optimizer, number, factor=1.0):
        optimizer.zero_grad()
        self.scaler.scale((w * (number + 1) * factor).sum()).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([w], 100.0)
        self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize(("batches", "expected"), [(4, -2.5), (6, -2.5 - 5.5), (5, -2.5 - 5.0)])
def test_a_script_with_a_scaler_of_its_own(batches, expected):
    assert expected == trained(Scaled(), batches=batches)[-1]


@pytest.mark.parametrize("size", SIZES)
def test_a_script_with_a_scaler_of_its_own_leaves_out_the_window_that_has_overflowed(size):
    loop = Scaled()

    def overflowing(w, optimizer, number):
        loop(w, optimizer, number, factor=float("inf") if number == 1 and parwrap.rank() == size - 1 else 1.0)

    with parwrap.distributed():
        assert [0] * 8 + [-(5 + 6 + 7 + 8) / 4] == trained(overflowing, batches=8)
    assert 512 == loop.scaler.get_scale()


@pytest.mark.parametrize("error", [True, False])
def test_what_outlives_the_function_does_nothing_any_more(error):
    w, kept = weight(), []

    @parwrap.accumulate(4)
    def train():
        optimizer = torch.optim.SGD([w], lr=1.0)
        kept.append(iter(DataLoader(range(10), batch_size=None)))
        for number in kept[0]:
            step(w, optimizer, number)
            if number == 1:
                break
        if error:
            raise KeyError("on purpose")

    with pytest.raises(KeyError) if error else contextlib.nullcontext():
        train()
    kept.clear()

    assert (0.0 if error else -1.0) == w.item()


@pytest.mark.ranks(2)
def test_sparse_gradients():
    def train(several, ranks, n):
        torch.manual_seed(0)
        words, head = nn.Embedding(9, 4, sparse=True).double(), nn.Linear(4, 1).double()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (words, head)]
        for numbers in several:
            for optimizer in optimizers:
                optimizer.zero_grad()
            indices = [torch.tensor([(3 * number + rank) % 9, number % 4]) for number in numbers for rank in ranks]
            sum(head(words(each)).tanh().mean() for each in indices).div(len(indices)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return nn.ModuleList([words, head])

    expected = by_itself(train, [range(begin, begin + 3) for begin in (0, 3, 6)], range(2), 1)
    function = parwrap.distributed(parwrap.accumulate(3)(train))

    assert distance(function([[number] for number in range(9)], [parwrap.rank()], 3), expected) < 1e-12


@pytest.mark.ranks(2, fresh=True)
def test_a_checkpoint_that_runs_a_backward_inside_another():
    """Its gradients arrive in two backwards, of which only the outer one counts."""
    inner, outer, x = weight(1.0), weight(1.0), torch.ones(1, dtype=torch.float64, requires_grad=True)

    @parwrap.accumulate(2)
    def train():
        optimizer = torch.optim.SGD([inner, outer], lr=1.0)
        for number in range(2):
            optimizer.zero_grad()
            (outer * checkpoint(lambda x: x * inner, x, use_reentrant=True)).sum().mul(1 + number + parwrap.rank()).backward()
            optimizer.step()

    parwrap.distributed(train)()

    assert (-1.0, -1.0) == (inner.item(), outer.item())


def test_nothing_of_a_training_is_kept_alive_once_its_windows_are_closed():
    @parwrap.accumulate(2)
    def train():
        kept = []
        for _ in range(2):
            w = weight()
            optimizer = torch.optim.SGD([w], lr=1.0)
            for number in range(4):
                step(w, optimizer, number)
            kept.append((weakref.ref(optimizer), weakref.ref(w)))
        return kept[0]

    assert [None, None] == [each() for each in train()]


def test_samples_are_made_without_autocast_in_a_window_too():
    with parwrap.amp(dtype="bf16"), parwrap.accumulate(2):
        w = weight()
        optimizer, dtypes = torch.optim.SGD([w], lr=1.0), []
        for x in DataLoader([torch.ones(1, 3)] * 4, batch_size=2, collate_fn=lambda several: several[0] @ torch.ones(3, 3)):
            dtypes.append((x.dtype, (x @ torch.ones(3, 3)).dtype))
            step(w, optimizer, 0)

    assert [(torch.float32, torch.bfloat16)] * 2 == dtypes


# refusals


def by_hand(w, optimizer, number):
    w.sum().backward()


def with_closure(w, optimizer, number):
    optimizer.step(lambda: w.sum().backward())


def with_gradients_of_its_own(w, optimizer, number):
    (w.grad,) = torch.autograd.grad(w.sum(), w)
    optimizer.step()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            by_hand,
            r"accumulate\(2\) is for a loop that calls optimizer.step\(\) after each backward, but this loop never called step: the g",
        ),
        (with_closure, r"test_accumulation.py:\d+ calls SGD.step\(closure\), which cannot be accumulated: the closure computes the"),
        (with_gradients_of_its_own, r"test_accumulation.py:\d+ calls SGD.step\(\) without a backward since its last step, but"),
    ],
)
def test_loops_that_cannot_be_accumulated(body, text):
    with pytest.raises(parwrap.UsageError, match=text):
        trained(body, steps=2)


@pytest.mark.parametrize("steps", [0, True, None, "automatic"])
def test_steps_that_make_no_sense(steps):
    with pytest.raises(parwrap.UsageError) as refusal:
        parwrap.accumulate(steps=steps)

    assert str(refusal.value) == (
        f"accumulate(steps={steps!r}): steps must be a positive integer, the number of batches in one optimizer step."
    )


def test_inside_another():
    with parwrap.accumulate(2):
        assert [0, 0, -1] == trained(step, steps=2, batches=2)
    with parwrap.accumulate(2), pytest.raises(parwrap.UsageError) as refusal:
        trained(step, steps=3)

    assert str(refusal.value) == (
        "parwrap.accumulate(3) cannot be opened inside parwrap.accumulate(2), because each batch counts for one step only. Use the same "
        "number for both, or remove one of the two."
    )


def test_one_step_for_each_batch_changes_nothing():
    assert [0, -1, -2] == trained(step, steps=1, batches=2)
    model = copy.deepcopy(build())

    assert 0 == distance(model, build())


@pytest.mark.ranks(2)
def test_skipped_steps_are_not_counted():
    with parwrap.distributed(), parwrap.accumulate(2):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(torch.ones(10, 1), batch_size=1):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        steps = open_loop().optimizers.steps

    assert 3 == steps


def test_a_function_that_trains_on_one_batch_in_each_call_is_told_once():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    @parwrap.accumulate(4)
    def step():
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    step()
    with pytest.warns(UserWarning, match=r"step .* has one backward each time it runs, and accumulate\(4\) ends when it returns"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()

    assert -3.0 == weight.item()


# over accumulation by hand


def accumulating(steps, every, lines=1):
    w = weight()

    @parwrap.accumulate(steps)
    def train():
        optimizer = torch.optim.SGD([w], lr=1.0)
        for number, batch in enumerate(DataLoader(range(24), batch_size=2), 1):
            for _ in range(lines):
                (batch.sum() * w).sum().backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    train()


def test_accumulation_by_hand_inside_is_warned_about_once():
    with pytest.warns(UserWarning, match=r"runs 2 backwards for each step, on a batch each, so accumulate\(3\) .* every 6 batches") as said:
        accumulating(steps=3, every=2)

    assert 1 == len(said)


@pytest.mark.parametrize("loop", [{"steps": 3, "every": 1}, {"steps": 3, "every": 1, "lines": 2}, {"steps": 1, "every": 2}])
def test_loops_that_step_after_each_batch_are_not_warned_about(loop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulating(**loop)
