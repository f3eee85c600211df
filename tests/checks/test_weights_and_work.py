"""Weights that go apart are an error that names the parameter and the step; ranks that compute the same are told so once."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import LockstepError, RankMismatchError


def data(samples=32):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 4, generator=generator))


def train(change, steps=8):
    """Train; ``change(step, model, optimizer, x)`` runs before each step and may train in its own way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    batches = DataLoader(data(), batch_size=2, shuffle=True)
    for step, (x,) in enumerate(batches, 1):
        optimizer.zero_grad()
        if not change(step, model, optimizer, x):
            model(x).square().mean().backward()
        optimizer.step()
        if step == steps:
            break
    return model


def functional_gradients(step, model, optimizer, x):
    for p, grad in zip(model.parameters(), torch.autograd.grad(model(x).square().mean(), list(model.parameters())), strict=True):
        p.grad = grad
    return True


def noise_on_weights(step, model, optimizer, x):
    with torch.no_grad():
        model[1].weight.add_(0.01 * torch.randn_like(model[1].weight))


def a_gradient_made_by_hand(step, model, optimizer, x):
    model(x).square().mean().backward()
    model[1].bias.grad += x.mean()
    return True


def a_learning_rate_of_this_batch(step, model, optimizer, x):
    optimizer.param_groups[0]["lr"] = 0.01 * float(x.norm())


def weights_from_numpy(step, model, optimizer, x):
    if step == 5:
        model[0].bias.data.copy_(torch.from_numpy(np.random.rand(4)))


WAYS = {
    functional_gradients: "0.weight (shape (4, 4)) differs between rank 0 and rank 1 after step 1 ",
    noise_on_weights: "1.weight (shape (1, 4)) differs between rank 0 and rank 1 after step 2 ",
    a_gradient_made_by_hand: "1.bias (shape (1,)) differs between rank 0 and rank 1 after step 1 ",
    a_learning_rate_of_this_batch: "the options of the optimizers differ between rank 0 and rank 1 after step 1 (test_weights_and_work.py:",
    weights_from_numpy: "0.bias (shape (4,)) differs between rank 0 and rank 1 after step 8 ",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_weights_that_go_apart_are_an_error_that_names_them(change):
    with pytest.raises(parwrap.RankMismatchError, match=re.escape(WAYS[change])) as caught:
        parwrap.distributed(lambda: train(change))()

    assert "(test_weights_and_work.py:" in str(caught.value)
    assert re.search(r"parwrap\.(reduce_|total\()", str(caught.value))


def updates_without_a_step(model, x):
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p -= 0.01 * grad


def moves_towards_a_copy(model, x):
    """Reptile: the copy that adapts to a batch is this rank's, the model is everybody's."""
    adapted = copy.deepcopy(model)
    inner = torch.optim.SGD(adapted.parameters(), lr=0.1)
    adapted(x).square().mean().backward()
    inner.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), adapted.parameters(), strict=True):
            p += 0.5 * (q - p)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("relative", "are_unlike", "is_error"), [(1e-6, False, True), (1e-6, True, False), (1e-3, True, True)])
def test_processors_that_round_in_other_ways_take_rank_zeros_weights(monkeypatch, relative, are_unlike, is_error):
    """A processor of another kind is emulated by another name and by weights that differ a little."""
    if are_unlike:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: f"processor {parwrap.rank()}")

    def differs(step, model, optimizer, x):
        if step == 2 and parwrap.rank():
            with torch.no_grad():
                model[1].weight *= 1 + relative

    said = "weights differ by rounding between ranks, because their processors round differently \\(processor 0, processor 1\\)"
    if is_error:
        with (
            pytest.raises(parwrap.RankMismatchError, match=r"1\.weight .* differs between rank 0 and rank 1 after step 2"),
            parwrap.distributed(),
        ):
            train(differs)
    else:
        with parwrap.distributed():
            with pytest.warns(UserWarning, match=said) as warned:
                model = train(differs)
            everyones = parwrap.gather([p.tolist() for p in model.parameters()])

        assert everyones[0] == everyones[1]
        assert 1 == len(warned)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("update", [updates_without_a_step, moves_towards_a_copy])
def test_weights_that_change_without_a_step_are_compared_too(update):
    @parwrap.distributed
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1))
        for (x,) in parwrap.shard(DataLoader(data(), batch_size=4, shuffle=True)):
            update(model, x)
        return model

    with pytest.raises(
        parwrap.RankMismatchError, match=r"weight of a Linear \(shape \(1, 4\)\) differs between rank 0 and rank 1 after 4 b"
    ):
        run()


@pytest.mark.ranks(2)
def test_weights_that_stay_alike_are_no_error():
    def averages_by_hand(step, model, optimizer, x):
        functional_gradients(step, model, optimizer, x)
        for p in model.parameters():
            p.grad = parwrap.reduce_mean(p.grad)
        return True

    model = parwrap.distributed(lambda: train(averages_by_hand))()

    assert 1 == len({tuple(each.flatten().tolist()) for each in parwrap.gather(model[0].weight)})


@pytest.mark.ranks(2)
def test_a_step_without_an_averaged_backward_is_found_at_the_end_at_the_latest():
    def late(step, model, optimizer, x):
        return step == 6 and functional_gradients(step, model, optimizer, x)

    with pytest.raises(parwrap.RankMismatchError, match="differs between rank 0 and rank 1 after step"):
        parwrap.distributed(lambda: train(late, steps=6))()


@pytest.mark.ranks(2)
def test_ranks_that_compute_the_same_are_told_so_once(capfd):
    @parwrap.distributed
    def run():
        torch.manual_seed(0)
        model, x = nn.Linear(4, 1), torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    line = f"test_weights_and_work.py:{run.__wrapped__.__code__.co_firstlineno + 7}"
    run()
    said = capfd.readouterr().err.splitlines()
    expected = [
        f"parwrap: all ranks compute the same losses at {line}: each does the whole work, which is right but no faster than one process. "
        'No DataLoader of torch is read there, and ranks draw alike. draws="per_rank" (--draws per-rank) gives each rank random batches '
        "of its own, if the loop draws its batches by hand and takes the same steps whatever it draws"
    ]

    assert (expected if parwrap.rank() == 0 else []) == said


@pytest.mark.ranks(2)
def test_a_loss_over_gathered_features_is_equal_on_all_ranks_and_no_same_work(capfd):
    @parwrap.distributed
    def run():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for (x,) in DataLoader(data(), batch_size=2):
            optimizer.zero_grad()
            parwrap.gather_with_grad(model(x)).square().mean().backward()
            optimizer.step()

    run()

    assert "same losses" not in capfd.readouterr().err


@pytest.mark.ranks(2)
def test_weights_that_differ_at_the_first_backward_are_rank_zeros():
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(1.0 + parwrap.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @parwrap.distributed
    def run():
        (x,) = next(iter(DataLoader(data(), batch_size=2, shuffle=True)))
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="the weights of the ranks differ at their first backward, so rank 0's are used on all"):
        run()

    assert [1.0] * 4 == model.weight.flatten().tolist()


@pytest.mark.ranks(2)
def test_integer_parameters_that_differ_at_the_first_step_are_rank_zeros():
    model = nn.Linear(4, 1)
    model.steps = nn.Parameter(torch.tensor([3 + parwrap.rank()]), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @parwrap.distributed(strategy="local_sgd")
    def run():
        (x,) = next(iter(DataLoader(data(), batch_size=2, shuffle=True)))
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="the weights of the ranks differ at their first step, so rank 0's are used on all"):
        run()

    assert [3] == model.steps.tolist()


@pytest.mark.ranks(2)
def test_weights_that_change_after_the_last_step_are_found_at_the_end():
    @parwrap.distributed
    def run():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for (x,) in DataLoader(data(), batch_size=8, shuffle=True):
            model(x).mean().backward()
            optimizer.step()
        with torch.no_grad():
            model.bias += x.mean()
        return model

    with pytest.raises(parwrap.RankMismatchError, match=r"bias of a Linear \(shape \(1,\)\) differs between rank 0 and rank 1 after "):
        run()


@pytest.mark.ranks(2)
def test_a_step_inside_a_backward_is_refused():
    @parwrap.distributed
    def run():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.weight.register_post_accumulate_grad_hook(lambda weight: optimizer.step())
        for (x,) in DataLoader(data(), batch_size=8, shuffle=True):
            model(x).mean().backward()

    # the slower rank may see first that the other has raised
    text = r"test_weights_and_work.py:\d+ steps inside a backward, before its gradients are averaged|rank \d has raised an error"
    with pytest.raises(parwrap.ParwrapError, match=text):
        run()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [5, 6])
def test_weights_are_compared_before_an_evaluation(steps):
    """They changed after a step that is not compared."""
    evaluated = []

    @parwrap.distributed
    def run():
        def last(step, model, optimizer, x):
            return step == steps and functional_gradients(step, model, optimizer, x)

        model = train(last, steps).eval()
        with torch.no_grad():
            for (x,) in DataLoader(data(4), batch_size=2):
                evaluated.append(model(x))

    with pytest.raises(parwrap.RankMismatchError, match=rf"differs between rank 0 and rank 1 after step {steps}"):
        run()

    assert [] == evaluated


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_weights_that_differ_by_rounding_at_the_first_backward_are_rank_zeros_silently():
    """As by an orthogonal initialization on another processor."""
    start = nn.init.orthogonal_(torch.empty(8, 8), generator=torch.Generator().manual_seed(0))
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.copy_(start if parwrap.rank() == 0 else start * (1 + 1e-6))
    apart = parwrap.gather(model.weight.detach().clone())

    @parwrap.distributed
    def run():
        torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(1, 8)).sum().backward()

    run()

    assert not torch.equal(*apart)
    assert torch.equal(start, model.weight)


def orders_drawn_once(x, rng):
    """Batches in an order that is drawn at the first one, before any backward."""
    order = rng.permutation(len(x))
    while True:
        for at in range(0, len(x), 4):
            yield x[order[at : at + 4]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "seed", "said"),
    [
        ({}, None, 'ranks draw alike. draws="per_rank"'),
        (
            {"draws": "per_rank"},
            None,
            "what is drawn before the first backward is alike. Draw an order of batches after it",
        ),
        ({"draws": "per_rank"}, "parwrap.rank()", ""),
    ],
    ids=["as it is", "a remedy that does not help", "the remedy that the line names"],
)
def test_ranks_are_told_that_they_compute_the_same_until_a_remedy_works(capfd, options, seed, said):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    @parwrap.distributed(**options)
    def run():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = orders_drawn_once(x, np.random.default_rng(seed and parwrap.rank()))
        for _ in range(5):
            optimizer.zero_grad()
            model(next(batches)).square().mean().backward()
            optimizer.step()

    run()

    text = capfd.readouterr().err
    assert ("same losses" in text) == (bool(said) and parwrap.rank() == 0)
    assert said in text or parwrap.rank()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no optimizer yet", "no optimizer has been built. parwrap.shard(loader) gives"),
        ("by hand", "no optimizer has been built. parwrap.shard(loader) gives"),
        ("in eval mode", r"the model is in eval mode since test_weights_and_work.py:\d+. parwrap.shard(loader) gives"),
        ("replicated", r"replicate(loader) lets every rank read everything in the pass at test_weights_and_work.py:\d+: remove it"),
        ("a list of batches", r"come from the loader read at test_weights_and_work.py:\d+, parwrap.shard(loader) gives"),
    ],
)
def test_ranks_that_compute_the_same_are_told_why(capfd, how, said):
    @parwrap.distributed
    def run():
        loader, model, optimizer = DataLoader(data(12), batch_size=2), nn.Linear(4, 1), None
        batches = list(loader) if how == "a list of batches" else parwrap.replicate(loader) if how == "replicated" else loader
        if how not in ("no optimizer yet", "by hand"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if how == "in eval mode":
            model.eval()
        for (x,) in batches:
            if how == "by hand":
                model.zero_grad()
                model(x).square().mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.01 * p.grad
                continue
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    run()

    text = capfd.readouterr().err
    assert re.search(said.replace("(loader)", r"\(loader\)"), text) or parwrap.rank(), text


@pytest.mark.ranks(2)
def test_functions_and_other_objects_among_options_of_an_optimizer_are_not_compared():
    @parwrap.distributed
    def run():
        model = nn.Linear(1, 1)
        keep = [object() for _ in range(parwrap.rank())]
        options = {"transforms": [abs, lambda x: x, object()], "by_name": {"one": lambda x: x}}
        optimizer = torch.optim.SGD([{"params": model.parameters(), **options}], lr=0.1)
        for _ in range(4):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return len(keep)

    assert parwrap.rank() == run()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("owned", [True, False])
def test_a_parameter_that_one_rank_freezes_is_named(owned):
    def train():
        frozen, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*(frozen.parameters() if owned else []), *other.parameters()], lr=0.1)
        for step in range(4):
            if parwrap.rank() == 1 and step == 2:
                frozen.weight.requires_grad_(False)
            (frozen(torch.ones(1, 1)) + other(torch.ones(1, 1))).sum().backward()
            optimizer.step()

    text = r"weight of a Linear \(shape \(1, 1\)\) is frozen \(requires_grad=False\) on rank 1, but not on rank 0, after step \d"
    with pytest.raises(RankMismatchError, match=text):
        parwrap.distributed(train)()


@pytest.mark.ranks(2)
def test_an_evaluation_of_one_rank_is_not_taken_for_the_next_pass_of_the_other():
    def train():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            for x in DataLoader(torch.ones(4, 1), batch_size=1):
                model(x).sum().backward()
                optimizer.step()
            if parwrap.rank() == 1 and epoch == 1:
                with torch.no_grad():
                    list(DataLoader(torch.ones(4, 1)))

    with pytest.raises((LockstepError, RankMismatchError), match=r"come apart|has drawn more random numbers or read one pass more"):
        parwrap.distributed(train)()


class Scales(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = kind(12, 2, max_norm=0.1)

    def forward(self, tokens):
        return self.embedding(tokens)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("equal_at_first", [False, True])
def test_rows_that_a_forward_scales_in_place_are_an_error_that_names_max_norm(kind, equal_at_first):
    def train():
        model = Scales(kind)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for epoch in range(2):
            for (x,) in DataLoader(TensorDataset(torch.arange(24).reshape(12, 2) % 12), 1):
                tokens = torch.arange(12).reshape(6, 2) if equal_at_first and not epoch and model.embedding.weight.grad is None else x
                optimizer.zero_grad()
                (10 * model(tokens).square().sum()).backward()
                optimizer.step()

    with pytest.raises(RankMismatchError, match=r"max_norm=0\.1.*embedding\.weight\.renorm_\(2, 0, 0\.1\)"):
        parwrap.distributed(train)()
