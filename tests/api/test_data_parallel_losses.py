"""Losses of outputs in pieces, and losses that a model returns itself, against one device."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from on_devices import TWO


class Masked(nn.Module):
    """A mean over the labels that count, which only later batches tell from one over the samples."""

    rows: list = []  # noqa: RUF012 - not the module's own

    def forward(self, logits, labels):
        self.rows.append(len(labels))
        counts = (labels >= 0).float()
        return (F.cross_entropy(logits, labels.clamp(0), reduction="none") * counts).sum() / counts.sum()


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, logits, labels):
        return F.cross_entropy(logits @ logits.T * self.temperature, torch.arange(len(logits)))


class SumLoss(Contrastive):
    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels.clamp(0), reduction="sum") * self.temperature


def trained(criterion, steps=6, **options):
    """The losses of a few steps, of which later ones have labels that do not count, the gradients of the last, and what was said."""
    torch.manual_seed(0)
    model, found = nn.Linear(4, 3), []
    parameters = [*model.parameters(), *criterion.parameters()]
    with parwrap.data_parallel(**options), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            for p in parameters:
                p.grad = None
            labels = torch.randint(3, (7,))
            labels[: step // 2] = -1
            loss = criterion(model(torch.randn(7, 4)), labels)
            loss.backward()
            found.append(loss.detach())
    return [*found, *(p.grad for p in parameters)], [str(each.message) for each in said]


def compiled_in_place():
    criterion = nn.CrossEntropyLoss(ignore_index=-1, weight=torch.tensor([1.0, 2.0, 3.0]))
    criterion.compile(backend="eager")
    return criterion


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        Masked,
        lambda: nn.CrossEntropyLoss(ignore_index=-1),
        lambda: torch.compile(nn.CrossEntropyLoss(ignore_index=-1, weight=torch.tensor([1.0, 2.0, 3.0])), backend="eager"),
        lambda: torch.compile(Masked(), backend="eager"),
        compiled_in_place,
    ],
    ids=["own", "torch's", "torch's, compiled", "own, compiled", "compiled in place"],
)
def test_losses_without_parameters_are_those_of_one_device_in_every_batch(make, gather):
    (expected, _), (actual, said) = trained(make(), device_ids=["cpu"]), trained(criterion := make(), device_ids=TWO, gather=gather)

    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, actual, strict=True))
    assert [] == said
    assert criterion(torch.zeros(2, 3), torch.tensor([0, 1])).isfinite()  # as it was


def test_a_loss_of_the_users_own_is_computed_on_the_whole():
    Masked.rows.clear()
    trained(Masked(), device_ids=TWO, gather=False)

    assert [7] * 6 == Masked.rows


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("kind", [Contrastive, SumLoss])
def test_a_loss_with_parameters_is_computed_on_the_whole_and_said_once(kind, gather):
    (expected, _), (actual, said) = (trained(kind(), device_ids=devices, gather=gather) for devices in (["cpu"], TWO))

    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(expected, actual, strict=True))
    assert 1 == len(said)
    assert said[0].startswith(f"parwrap: {kind.__name__} runs on the whole batch, only on cpu: parwrap.data_parallel does not divide it: ")
    assert "it returns a number for the whole batch, such as a loss or a count. If it is a loss that is always the mean" in said[0]


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do.

    Args:
        reduction: of the loss.
        counts: return how many labels are right, too.
    """

    rows: list = []  # noqa: RUF012 - not the module's own

    def __init__(self, reduction="mean", counts=False):
        super().__init__()
        self.layer, self.reduction, self.counts = nn.Linear(4, 3), reduction, counts

    def forward(self, x, labels):
        self.rows.append(len(x))
        logits = self.layer(x)
        loss = F.cross_entropy(logits, labels, reduction=self.reduction, ignore_index=-1)
        return {"loss": loss, "logits": logits, **({"right": (logits.argmax(1) == labels).sum()} if self.counts else {})}


def losses(model, padding=0, **options):
    torch.manual_seed(0)
    model, found = copy.deepcopy(model), []
    with parwrap.data_parallel(**options), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            labels = torch.randint(3, (7,))
            labels[: padding * step] = -1
            out = model(torch.randn(7, 4), labels=labels)
            found += [each.detach() for name, each in out.items() if name != "logits"]
    out["loss"].backward()
    return [*found, *(p.grad for p in model.parameters())], [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("model", "loss", "reason"),
    [
        (
            WithLoss(),
            None,
            "it returns a number for the whole batch, such as a loss or a count. If it is a loss that is always the mean or the sum ",
        ),
        (
            WithLoss("sum"),
            "mean",
            "a number that it returns for the whole batch is not the mean over the samples, although loss='mean' says so",
        ),
        (
            WithLoss(counts=True),
            "mean",
            "a number that it returns for the whole batch is not the mean over the samples, although loss='mean'",
        ),
        (WithLoss(), "mean", None),
        (WithLoss("sum"), "sum", None),
    ],
)
def test_a_model_that_returns_a_loss_is_divided_if_somebody_says_what_it_is(model, loss, reason):
    expected, _ = losses(model, device_ids=["cpu"])
    actual, said = losses(model, device_ids=TWO, loss=loss)

    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, actual, strict=True))
    assert (reason is not None) == len(said) == ([7] == WithLoss.rows[-1:])
    assert reason is None or reason in said[0]


def test_what_was_said_of_a_loss_is_looked_at_again():
    expected, _ = losses(WithLoss(), padding=2, device_ids=["cpu"])
    actual, said = losses(WithLoss(), padding=2, device_ids=TWO, loss="mean")

    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, actual, strict=True))
    assert 1 == len(said)
    assert "a number that it returns for the whole batch is not the mean over the samples, although loss='mean' says so" in said[0]
