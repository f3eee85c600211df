"""Loops that accumulate by hand, under ``@accumulate("auto")``: one average for each step, and the weights of a single process."""

import contextlib

import pytest
import torch
from torch import nn

import parwrap
from loops_by_hand import BATCHES, EPOCHS, assert_same, automatic, batches, build, by_itself, numbered, sends_of, watched

RANKS = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)]


def every(steps, last=True):
    """A step after so many batches, and after the last."""
    return lambda epoch, i: (i + 1) % steps == 0 or (last and i + 1 == BATCHES)


def train(steps_after, clip=False, to_none=True, scaler=None, by_batch=False, epochs=EPOCHS, inside=lambda model, epoch, i: None):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    reader = batches()
    for epoch in range(epochs):
        for i, (x, y) in numbered(reader):
            loss = nn.functional.mse_loss(model(x), y) / 4
            (scaler.scale(loss) if scaler else loss).backward()
            inside(model, epoch, i)
            if steps_after(epoch, i):
                if scaler:
                    scaler.unscale_(optimizer)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            if by_batch:
                schedule.step()
        schedule.step()
    return model


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_it_is_the_plain_loop(size, clip, to_none, monkeypatch):
    sent = watched(monkeypatch)
    how = {"steps_after": every(4), "clip": clip, "to_none": to_none}

    assert_same(by_itself(train, **how), automatic(train, **how))
    if size > 1:
        assert sends_of(sent)[-1] == [3, 7, 9]


WAYS = {
    "windows over epochs": {"steps_after": every(4, last=False)},
    "a schedule by batch": {"steps_after": every(4), "by_batch": True},
    "no accumulation": {"steps_after": every(1)},
    "shorter windows later": {"steps_after": lambda epoch, i: (i + 1) % (4 if epoch < 4 else 3) == 0},
    "other steps later": {"steps_after": lambda epoch, i: i + 1 in ((4, 8) if epoch < 4 else (1, 6, 7))},
    "sevens": {"steps_after": lambda epoch, i: (epoch * BATCHES + i) % 7 == 0},
    "one left out": {"steps_after": lambda epoch, i: (epoch, i) != (4, 3) and (i + 1) % 4 == 0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.ranks(2)
def test_it_is_the_plain_loop_wherever_it_steps(way, clip):
    assert_same(by_itself(train, clip=clip, **WAYS[way]), automatic(train, clip=clip, **WAYS[way]))


@pytest.mark.ranks(2)
def test_nothing_is_sent_before_a_step_once_the_ranks_have_learned_where_steps_are(monkeypatch):
    sent = watched(monkeypatch)
    automatic(train, every(5))
    epochs = sends_of(sent)

    assert epochs[0] == list(range(BATCHES)), "nothing is known yet"
    assert epochs[2:] == [[4, 9]] * (EPOCHS - 2)


@pytest.mark.ranks(2)
def test_gradients_may_be_views_of_buckets():
    options = {"gradient_as_bucket_view": True}
    assert_same(by_itself(train, every(4), to_none=False), automatic(train, every(4), to_none=False, options=options))


@pytest.mark.ranks(2)
def test_a_script_with_a_scaler_of_its_own():
    def scaled(**options):
        return train(every(4, last=False), scaler=torch.amp.GradScaler("cpu", **options), clip=True)

    assert_same(by_itself(scaled, init_scale=8.0), automatic(scaled, init_scale=8.0))


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks_before_a_step_that_comes_early():
    """A step after the second batch of windows of four, where this rank alone has lost its gradients."""

    def spoil(model, epoch, i):
        if (epoch, i) == (4, 5) and parwrap.rank() == 1:
            next(model.parameters()).grad.fill_(torch.inf)

    def scaled():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        early = lambda epoch, i: (i + 1) % 4 == 0 if epoch < 4 else i in (3, 5)  # noqa: E731
        return train(early, scaler=scaler, inside=spoil), scaler.get_scale()

    model, scale = automatic(scaled)
    (first, _), (second, _) = parwrap.gather((model.state_dict(), scale))

    assert scale == 4.0
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.ranks(2)
def test_two_optimizers_of_a_gan(together, monkeypatch):
    """Both accumulate, step after step or each in a loop of its own."""

    sent = watched(monkeypatch)

    def gan():
        torch.manual_seed(0)
        D, G = nn.Linear(6, 1).double(), nn.Linear(6, 6).double()
        of_D, of_G = torch.optim.SGD(D.parameters(), lr=0.1), torch.optim.Adam(G.parameters(), lr=0.01)

        def discriminate(x):
            (D(x) - 1).square().mean().add(D(G(x).detach()).square().mean()).backward()

        def generate(x):
            for p in D.parameters():
                p.requires_grad_(False)
            (D(G(x)) - 1).square().mean().backward()
            for p in D.parameters():
                p.requires_grad_(True)

        def step(optimizer):
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(EPOCHS):
            for i, (x, _) in numbered(batches()):
                if together:
                    discriminate(x)
                    generate(x)
                    if (i + 1) % 2 == 0:
                        step(of_D)
                        step(of_G)
                else:
                    (discriminate if i % 4 < 2 else generate)(x)
                    if i % 2:
                        step(of_D if i % 4 < 2 else of_G)
        return nn.ModuleList([D, G])

    assert_same(by_itself(gan), automatic(gan))
    assert sends_of(sent)[-1] == ([1, 1, 3, 3, 5, 5, 7, 7, 9, 9] if together else [1, 3, 5, 7, 9])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.ranks(2)
def test_what_no_optimizer_steps_with_is_averaged_in_each_backward(kept, monkeypatch):
    """A weight that the loop changes itself, by the gradient of each batch."""

    sent = watched(monkeypatch)

    def train_partly_by_hand():
        torch.manual_seed(0)
        model, own = build(), torch.zeros(1, dtype=torch.float64, requires_grad=kept)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(EPOCHS):
            for i, (x, y) in numbered(batches()):
                nn.functional.mse_loss(model(x) + own, y).backward()
                if kept:
                    with torch.no_grad():
                        own -= 0.1 * own.grad
                        own.grad = None
                if (i + 1) % 5 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return nn.ParameterList([*model.parameters(), own])

    assert_same(by_itself(train_partly_by_hand), automatic(train_partly_by_hand))
    assert sends_of(sent)[-1] == (list(range(BATCHES)) if kept else [4, 9])


@pytest.mark.ranks(2)
def test_what_no_step_has_used_in_the_end_is_averaged_too(monkeypatch):
    def left_open(part=slice(None)):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(EPOCHS):
            for i, (x, y) in numbered(batches(loader=False)):
                nn.functional.mse_loss(model(x[part]), y[part]).backward()
                if i % 5 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return model

    sent = watched(monkeypatch)
    expected, actual = by_itself(left_open), automatic(left_open, part=slice(parwrap.rank(), None, 2))

    for p, q in zip(expected.parameters(), actual.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-12
    assert sends_of(sent)[-1] == [1, 6], "the others are averaged when the function returns"


def test_on_one_rank_it_changes_nothing():
    with contextlib.nullcontext():
        expected = train(every(4))
    assert_same(expected, parwrap.accumulate("auto")(train)(every(4)), tolerance=1e-300)
