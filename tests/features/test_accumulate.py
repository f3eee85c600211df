"""A loop under ``@accumulate(steps)`` against the same loop, by itself in one process, with batches that are as much larger."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError
from parwrap.group import alone

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)]


def dataset(samples=72):
    features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(features, features[:, :1] * 2)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(batch_size, epochs=3, clip=None, to_none=True, samples=72, leave=lambda epoch, i: False):
    """A plain loop."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(dataset(samples), batch_size=batch_size)
    lengths = []
    for epoch in range(epochs):
        lengths.append(len(loader))
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad(set_to_none=to_none)
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                clip(model)
            optimizer.step()
            if leave(epoch, i):
                break
        schedule.step()
    return model, lengths


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


def batch_of(rank, number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64)


def weight():
    return nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))


def loss_of(w, x):
    return (((x @ w).tanh() - 0.5) ** 2).mean()


def stepped(steps):
    """The weight after steps that each take the mean gradient of some batches, given by rank and number."""
    w = weight()
    for batches in steps:
        gradients = [torch.autograd.grad(loss_of(w, batch_of(*each)), w)[0] for each in batches]
        w = nn.Parameter(w.detach() - 0.5 * sum(gradients) / len(gradients))
    return w


def train_by_rank(numbers, to_zero=lambda optimizer: optimizer.zero_grad(), loader=True, left=None):
    """A loop over this rank's batches of those numbers, which is left after as many as ``left``."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for number in parwrap_loader(numbers) if loader else numbers:
        to_zero(optimizer)
        loss_of(w, batch_of(parwrap.rank(), int(number))).backward()
        optimizer.step()
        if number + 1 == left:
            break
    return w


def parwrap_loader(numbers):
    """A loader that gives every rank all of ``numbers``."""
    return parwrap.replicate(DataLoader(list(numbers), batch_size=None))


def after(model):
    """The same weights on all ranks, to compare with a reference."""
    for other in parwrap.gather(model.data):
        assert torch.equal(other, model.data)
    return model


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loader", [True, False])
@pytest.mark.parametrize("way", ["set to none", "zeroed", "dropped by hand", "zeroed by hand"])
def test_whatever_a_loop_does_with_gradients_that_were_used(size, loader, way):
    def to_zero(optimizer):
        if way in ("set to none", "zeroed"):
            optimizer.zero_grad(set_to_none=way == "set to none")
            return
        for p in optimizer.param_groups[0]["params"]:
            if way == "dropped by hand":
                p.grad = None
            elif p.grad is not None:
                p.grad.data.zero_()

    @parwrap.distributed
    def train():
        return after(accumulated_in(3, train_by_rank)(range(7), to_zero, loader))

    expected = stepped([[(rank, number) for rank in range(size) for number in window] for window in ([0, 1, 2], [3, 4, 5], [6])])

    assert (train() - expected).abs().max() < 1e-12


def accumulated_in(steps, function):
    return parwrap.accumulate(steps=steps)(function)


@pytest.mark.ranks(2)
def test_gradients_are_sent_once_for_a_step(monkeypatch):
    from parwrap.strategies.averager import Averager

    sent = []
    run = Averager.run
    monkeypatch.setattr(Averager, "run", lambda self, call, weight: (sent.append(weight), run(self, call, weight))[1])
    parwrap.distributed(accumulated_in(4, train_by_rank))(range(10))

    assert [1.0] * 3 == sent


@pytest.mark.ranks(3)
@pytest.mark.parametrize("loader", [True, False])
def test_a_rank_that_leaves_first_sends_its_open_window(loader):
    left = {0: 12, 1: 6, 2: 12}

    @parwrap.distributed
    def train():
        return train_until(range(12), loader=loader, left=left[parwrap.rank()])

    train_until = accumulated_in(4, train_by_rank)
    expected = stepped(
        [
            [(rank, number) for rank in range(3) for number in range(4)],
            [(rank, number) for rank in range(3) for number in range(4, min(8, left[rank]))],
            [(rank, number) for rank in (0, 2) for number in range(8, 12)],
        ]
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        actual = train()

    assert (actual - expected).abs().max() < 1e-12
    assert [parwrap.rank() == 0] == [any("it ran fewer batches" in str(each.message) for each in said)]


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_before_its_first_average_changes_nothing_that_it_does_not_know():
    """It has never agreed with the others on a layer that no optimizer owns."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

    @parwrap.distributed
    @parwrap.accumulate(2)
    def train():
        model = build()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for _ in range((1, 2, 5)[parwrap.rank()]):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    model = train()

    assert torch.equal(model[1].weight, build()[1].weight)


@pytest.mark.ranks(3)
def test_ranks_that_leave_in_different_windows():
    left = {0: 5, 1: 6, 2: 11}

    @parwrap.distributed
    def train():
        return accumulated_in(4, train_by_rank)(range(20), left=left[parwrap.rank()])

    expected = stepped(
        [
            [(rank, number) for rank in range(3) for number in range(4)],
            [(rank, number) for rank in range(3) for number in range(4, min(8, left[rank]))],
            [(2, number) for number in range(8, 11)],
        ]
    )

    assert (train() - expected).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_window_that_ends_with_the_data_of_its_rank_counts_as_much_as_the_others():
    @parwrap.distributed
    def train():
        return accumulated_in(4, train_by_rank)(range(4 - parwrap.rank()))

    counted = [(0, number) for number in range(4) for _ in range(3)] + [(1, number) for number in range(3) for _ in range(4)]

    assert (train() - stepped([counted])).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_batch_that_is_left_before_its_step_counts_for_nothing():
    def train(numbers):
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in parwrap_loader(numbers):
            optimizer.zero_grad()
            loss_of(w, batch_of(parwrap.rank(), int(number))).backward()
            if number == 6:
                break
            optimizer.step()
        return w

    expected = stepped([[(rank, number) for rank in range(2) for number in window] for window in (range(4), range(4, 6))])

    assert (parwrap.distributed(accumulated_in(4, train))(range(9)) - expected).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_layer_that_one_rank_uses_in_an_earlier_batch_of_a_window():
    uses = [(0, 6), (1, 6), (1, 7), (0, 8)]

    def losses(w, extra, rank, number):
        x = batch_of(rank, number)
        return loss_of(w * extra if (rank, number) in uses else w, x)

    @parwrap.distributed
    @parwrap.accumulate(steps=2)
    def train():
        w, extra = weight(), nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        optimizer = torch.optim.SGD([w, extra], lr=0.5)
        for number in range(12):
            optimizer.zero_grad()
            losses(w, extra, parwrap.rank(), number).backward()
            optimizer.step()
        return w, extra

    w, extra = weight(), nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
    reference = torch.optim.SGD([w, extra], lr=0.5)
    for begin in range(0, 12, 2):
        reference.zero_grad()
        with alone():
            (sum(losses(w, extra, rank, number) for rank in (0, 1) for number in (begin, begin + 1)) / 4).backward()
        reference.step()
    actual = train()

    assert (actual[0] - w).abs().max() < 1e-12
    assert (actual[1] - extra).abs().max() < 1e-12


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


def test_norms_that_are_asked_for_inside_a_window_are_those_of_its_batch():
    w = nn.Parameter(torch.tensor([1.0]))
    norms = []

    @parwrap.accumulate(2)
    def train():
        optimizer = torch.optim.SGD([w], lr=1.0)
        for batch in (3.0, 5.0):
            optimizer.zero_grad()
            (batch * w).sum().backward()
            norms.append(nn.utils.clip_grad_norm_((p for p in [w]), 1.0).item())
            optimizer.step()

    train()

    assert [1.5, 4.0] == norms
    assert w.item() == pytest.approx(0.0, abs=1e-5)


def test_a_step_that_is_left_out_at_the_end_of_a_window_is_said():
    @parwrap.accumulate(2)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in map(int, parwrap_loader(range(4))):
            optimizer.zero_grad()
            loss_of(w, batch_of(0, number)).backward()
            if number != 1:
                optimizer.step()
        return w

    with pytest.warns(UserWarning, match="a step that the batches before it had asked for was left out"):
        actual = train()

    assert (actual - stepped([[(0, 2), (0, 3)]])).abs().max() < 1e-12


@pytest.mark.parametrize("in_place", [True, False])
def test_a_loop_that_begins_to_zero_gradients_in_another_way(in_place):
    @parwrap.accumulate(3)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in range(9):
            loss_of(w, batch_of(0, number)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number < 6 or not in_place)
        return w

    if not in_place:
        assert (train() - stepped([[(0, number) for number in range(begin, begin + 3)] for begin in (0, 3, 6)])).abs().max() < 1e-12
        return
    with pytest.raises(
        UsageError, match=r"a gradient was changed in place after optimizer.step\(\) was called on it, where batches before"
    ):
        train()


def test_gradients_that_are_kept_after_they_were_dropped():
    @parwrap.accumulate(3)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in range(9):
            if number != 4:
                optimizer.zero_grad()
            loss_of(w, batch_of(0, number)).backward()
            optimizer.step()
        return w

    again = [(0, 3), (0, 3), (0, 4), (0, 5)]
    w = stepped([[(0, 0), (0, 1), (0, 2)]])
    gradient = sum(torch.autograd.grad(loss_of(w, batch_of(*each)), w)[0] for each in again) / 3
    w = nn.Parameter(w.detach() - 0.5 * gradient)
    last = sum(torch.autograd.grad(loss_of(w, batch_of(0, number)), w)[0] for number in (6, 7, 8)) / 3

    assert (train() - (w - 0.5 * last)).abs().max() < 1e-12


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


@pytest.mark.parametrize("error", [True, False])
def test_what_outlives_the_function_does_nothing_any_more(error):
    w, kept = weight(), []

    @parwrap.accumulate(4)
    def train():
        optimizer = torch.optim.SGD([w], lr=0.5)
        kept.append(iter(parwrap_loader(range(10))))
        for number in kept[0]:
            optimizer.zero_grad()
            loss_of(w, batch_of(0, int(number))).backward()
            optimizer.step()
            if number == 1:
                break
        if error:
            raise KeyError("on purpose")

    with pytest.raises(KeyError) if error else contextlib.nullcontext():
        train()
    kept.clear()

    assert (w - stepped([] if error else [[(0, 0), (0, 1)]])).abs().max() < 1e-12


def test_a_batch_that_cannot_be_read_fails_where_it_is_drawn():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index == 2:
                raise KeyError("broken")
            return batch_of(0, index)

    drawn = []

    @parwrap.accumulate(4)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for x in DataLoader(Broken(), batch_size=None):
            optimizer.zero_grad()
            loss_of(w, x).backward()
            optimizer.step()
            drawn.append(x)

    with pytest.raises(KeyError, match="broken"):
        train()
    assert 2 == len(drawn)


def by_hand():
    w = weight()
    for number in range(5):
        loss_of(w, batch_of(0, number)).backward()
        w.data -= w.grad
        w.grad = None


def with_closure():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(w, batch_of(0, 0))
        loss.backward()
        return loss

    optimizer.step(closure)


def with_gradients_of_its_own():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    (w.grad,) = torch.autograd.grad(loss_of(w, batch_of(0, 0)), w)
    optimizer.step()


def seldom():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for number in parwrap_loader(range(8)):
        loss_of(w, batch_of(0, int(number))).backward()
        if number == 6:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (by_hand, r"accumulate\(2\) is for a loop that calls optimizer.step\(\) after each backward, and none was called in 1 batch: the"),
        (seldom, r"accumulate\(2\) is for a loop that calls optimizer.step\(\) after each backward, and none was called in 2 batches: the"),
        (with_closure, r"optimizer.step\(closure\) at .*test_accumulate.py:\d+ cannot be accumulated: the closure computes the gradients"),
        (with_gradients_of_its_own, r"SGD.step\(\) at .*test_accumulate.py:\d+ uses gradients that no backward\(\) has left, and"),
    ],
)
def test_loops_that_cannot_be_accumulated(function, text):
    with pytest.raises(UsageError, match=text):
        accumulated_in(2, function)()


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
        f"accumulate(steps={steps!r}): steps is the number of batches of one optimizer step, a whole number from 1, or 'auto' for a loop "
        "that accumulates by hand."
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
