"""A loop under ``@accumulate(steps)`` against the same loop in one process with larger batches."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parwrap
from accumulated import SIZES, accumulated_in, batch_of, build, dataset, parwrap_loader, train, train_by_rank
from parwrap.errors import UsageError
from parwrap.group.group import alone


def by_itself(function, *args, **kwargs):
    """What one process does without anything of parwrap."""
    with alone():
        return function(*args, **kwargs)


def accumulated(function, *args, steps=4, batch="global", **kwargs):
    return parwrap.distributed(batch=batch)(parwrap.accumulate(steps)(function))(*args, **kwargs)


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
    expected, _ = by_itself(train, 24, clip=clip)
    actual, lengths = accumulated(train, 6, clip=clip, to_none=to_none)

    assert distance(actual, expected) < 1e-12
    assert lengths == [12, 12, 12]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [60, 66, 30, 63, 49])
def test_the_last_window_of_an_epoch_has_its_true_size(size, samples):
    expected, _ = by_itself(train, 24, samples=samples)
    actual, _ = accumulated(train, 6, samples=samples)

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

    actual, _ = accumulated(train, 6, epochs=1, clip=clip, leave=lambda epoch, i: i == 5)

    assert distance(actual, by_itself(plain)) < 1e-12


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_has_batches_of_its_own(size):
    expected, _ = by_itself(train, 12 * size)
    actual, lengths = accumulated(train, 3, batch="per_rank")

    assert distance(actual, expected) < 1e-12
    assert [24 // size] * 3 == lengths


@pytest.mark.ranks(2)
def test_gradients_are_sent_once_for_a_step(monkeypatch):
    from parwrap.strategies.ddp.gradient_averager import GradientAverager

    sent = []
    run = GradientAverager.run
    monkeypatch.setattr(GradientAverager, "run", lambda self, call, weight: (sent.append(weight), run(self, call, weight))[1])
    parwrap.distributed(accumulated_in(4, train_by_rank))(range(10))

    assert [1.0] * 3 == sent


def gan():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double(), nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)
    ).double()


def noise(rank, number):
    return batch_of(rank, number)[:, :2]


def real(rank, number):
    return batch_of(rank, number)[:, 1:] + 2


def train_gan(numbers, generator_every=1, loader=True):
    """The loop of torch's tutorial; the generator's backward leaves gradients in the discriminator, which the next zero_grad drops."""
    G, D = gan()
    opt_d, opt_g = torch.optim.SGD(D.parameters(), lr=0.5, momentum=0.5), torch.optim.SGD(G.parameters(), lr=0.5)
    for number in map(int, parwrap_loader(numbers)) if loader else numbers:
        rank = parwrap.rank()
        D.zero_grad()
        nn.functional.softplus(-D(real(rank, number))).mean().backward()
        fake = G(noise(rank, number))
        nn.functional.softplus(D(fake.detach())).mean().backward()
        opt_d.step()
        if number % generator_every == 0:
            G.zero_grad()
            nn.functional.softplus(-D(fake)).mean().backward()
            opt_g.step()
    return nn.ModuleList([G, D])


def gan_by_hand(windows, size, generator_every=1):
    """What it should be: earlier batches of a window see the discriminator from before its step."""
    G, D = gan()
    opt_d, opt_g = torch.optim.SGD(D.parameters(), lr=0.5, momentum=0.5), torch.optim.SGD(G.parameters(), lr=0.5)
    for window in windows:
        share = len(window) * size
        batches = [(rank, number) for number in window for rank in range(size)]
        generates = [each for each in batches if each[1] % generator_every == 0]
        earlier = [each for each in generates if each[1] != window[-1]]

        def generator_loss(several, share=share):
            return sum(nn.functional.softplus(-D(G(noise(*each)))).mean() for each in several) / share

        before = torch.autograd.grad(generator_loss(earlier), list(G.parameters())) if earlier else []
        loss = sum(
            nn.functional.softplus(-D(real(*each))).mean() + nn.functional.softplus(D(G(noise(*each)).detach())).mean() for each in batches
        )
        opt_d.zero_grad()
        (loss / share).backward()
        opt_d.step()
        now = [each for each in generates if each not in earlier]
        opt_g.zero_grad()
        if now:
            generator_loss(now).backward()
        for p, gradient in zip(G.parameters(), before, strict=False):
            p.grad = gradient if p.grad is None else p.grad + gradient
        if generates:
            opt_g.step()
    return nn.ModuleList([G, D])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loader", [True, False])
@pytest.mark.parametrize("generator_every", [1, 2])
def test_two_optimizers_of_a_gan(size, loader, generator_every):
    windows = [range(3), range(3, 6), range(6, 9), *([range(9, 10)] if loader else [])]
    with alone():
        expected = gan_by_hand(windows, size, generator_every)
    actual = parwrap.distributed(accumulated_in(3, train_gan))(range(windows[-1][-1] + 1), generator_every, loader)

    assert distance(actual, expected) < 1e-12


@pytest.mark.ranks(2)
def test_evaluation_inside_a_window_and_schedules_by_batch():
    def train(batch_size, steps):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=12)
        seen, rates = [], []
        for _ in range(2):
            for i, (x, y) in enumerate(DataLoader(dataset(), batch_size=batch_size)):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                for _ in range(steps):
                    schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
                if i % 2:
                    model.eval()
                    seen.append(sum(len(model(x)) for x, _ in DataLoader(dataset(30), batch_size=10)))
                    model.train()
        return model, seen, rates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _, _ = by_itself(train, 24, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, seen, rates = parwrap.distributed(batch="global")(accumulated_in(4, train))(6, 1)

    assert distance(actual, expected) < 1e-12
    assert [30] * 12 == seen
    assert [0.01] * 11 + [0.001] * 12 + [0.0001] == pytest.approx(rates)


@pytest.mark.parametrize("size", SIZES)
def test_sparse_gradients_and_two_steps_in_a_batch(size):
    def train(numbers, ranks):
        torch.manual_seed(0)
        words, head = nn.Embedding(9, 4, sparse=True).double(), nn.Linear(4, 1).double()
        optimizers = [torch.optim.SGD(words.parameters(), lr=0.5), torch.optim.SGD(head.parameters(), lr=0.1)]
        for several in numbers:
            for optimizer in optimizers:
                optimizer.zero_grad()
            indices = [torch.tensor([(3 * number + rank) % 9, number % 4]) for number in several for rank in ranks]
            sum(head(words(each)).tanh().mean() for each in indices).div(len(indices)).backward()
            for optimizer in [*optimizers, optimizers[1]]:
                optimizer.step()
        return nn.ModuleList([words, head])

    expected = by_itself(train, [range(begin, begin + 3) for begin in (0, 3, 6, 9)], range(size))
    function = parwrap.distributed(accumulated_in(3, train))
    actual = function([[number] for number in range(12)], [parwrap.rank()])

    assert distance(actual, expected) < 1e-12


@pytest.mark.parametrize(
    "steps",
    [
        0,
        True,
        None,
        "automatic",
    ],
)
def test_steps_that_make_no_sense(steps):
    with pytest.raises(UsageError) as refusal:
        parwrap.accumulate(steps=steps)

    assert str(refusal.value) == (
        f"accumulate(steps={steps!r}): steps must be a positive integer, the number of batches in one optimizer step, or 'auto' for a "
        "loop that accumulates by hand."
    )


def test_without_steps_it_decorates_nothing():
    with pytest.raises(UsageError, match=r"accumulate\(steps=None\)"):
        parwrap.accumulate(train)


@pytest.mark.ranks(2)
def test_it_must_be_inside_of_distributed():
    with (
        pytest.raises(UsageError, match=r"was opened before parwrap\.distributed: open it inside, or decorate the same function"),
        parwrap.accumulate(2),
    ):
        parwrap.distributed(train_by_rank)(range(4))
