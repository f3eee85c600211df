"""Losses of outputs that stay on their devices, against those of the whole tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from divided import TWO
from parwrap.strategies.pieces import Pieces

NUMBERS = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda x, y, **options: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **options),
    "with logits": lambda x, y, **options: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **options),
}
LABELS = {
    "cross_entropy": F.cross_entropy,
    "class weights": lambda x, y, **options: F.cross_entropy(x, y, weight=torch.tensor([1.0, 2.0, 3.0]), **options),
    "ignored labels": lambda x, y, **options: F.cross_entropy(x, torch.where(y == 1, -1, y), ignore_index=-1, **options),
    "smoothed": lambda x, y, **options: F.cross_entropy(x, y, label_smoothing=0.1, **options),
    "probabilities": lambda x, y, **options: F.cross_entropy(x, F.one_hot(y, 3).float(), **options),
    "nll_loss": lambda x, y, **options: F.nll_loss(x.log_softmax(1), y, **options),
}


def loss_and_gradient(loss_of, x, y, cut):
    x = x.clone().requires_grad_()
    loss = loss_of(Pieces(x.split([3, 2, 2])) if cut else x, y).square().sum()
    loss.backward()
    return loss, x.grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [*NUMBERS, *LABELS])
def test_losses_and_gradients_are_those_of_the_whole(name, reduction):
    torch.manual_seed(0)
    x, y = torch.randn(7, 3), torch.randn(7, 3) if name in NUMBERS else torch.randint(3, (7,))

    def loss_of(x, y):
        return {**NUMBERS, **LABELS}[name](x, y, reduction=reduction)

    expected, actual = (loss_and_gradient(loss_of, x, y, cut) for cut in (False, True))

    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, actual, strict=True))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_torchs_loss_modules_leave_the_pieces_apart(loss):
    out = Pieces([torch.randn(2, 3), torch.randn(1, 3)])
    loss(out, torch.randint(3, (3,)) if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(3, 3))

    assert out.is_in_pieces


def test_any_other_operation_joins_them_once():
    out = Pieces([torch.zeros(2, 3), torch.ones(1, 3)])

    assert ((3, 3), 3, torch.float32, True) == (out.shape, len(out), out.dtype, out.is_in_pieces)
    assert 1 == out[2, 0]
    assert not out.is_in_pieces
    assert torch.equal(torch.cat([out, out])[:3], out.whole())


def test_a_change_in_place_counts_in_losses():
    out = Pieces([torch.zeros(2, 1), torch.zeros(1, 1)])
    out.add_(1)

    assert 1 == F.mse_loss(out, torch.zeros(3, 1))


def test_sums_in_half_precision_do_not_overflow_where_the_mean_does_not():
    out, labels = torch.tensor([[-100.0, 100.0, -100.0]]).half().repeat(2000, 1), torch.zeros(2000, dtype=torch.long)
    loss = F.cross_entropy(Pieces(out.split(1000)), labels)

    assert (torch.float16, 200.0) == (loss.dtype, loss.item())


@pytest.mark.parametrize("watch", [torch.Tensor.retain_grad, lambda out: torch.autograd.grad(out.sum(), out)], ids=["retain_grad", "grad"])
def test_gradients_of_outputs_whose_loss_was_computed_on_the_pieces_are_refused(watch):
    with parwrap.data_parallel(TWO, gather=False):
        out = nn.Linear(2, 1)(torch.ones(4, 2))
        F.mse_loss(out, torch.ones(4, 1))
        with pytest.raises(parwrap.UsageError, match=r"test_pieces.py:\d+ calls .*grad on the outputs of a model, which get no gradient"):
            watch(out)


def test_gradients_of_outputs_are_there_if_they_are_gathered_first():
    with parwrap.data_parallel(TWO, gather=False):
        out = 1 * nn.Linear(2, 1)(torch.ones(4, 2))
        (grad,) = torch.autograd.grad(F.mse_loss(out, torch.zeros(4, 1)), out)

    assert torch.allclose(out / 2, grad)


class Masked(nn.Module):
    """A mean over the labels that count, of the script's own."""

    def forward(self, logits, labels):
        counts = (labels >= 0).float()
        return (F.cross_entropy(logits, labels.clamp(0), reduction="none") * counts).sum() / counts.sum()


def compiled_in_place():
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    criterion.compile(backend="eager")
    return criterion


CRITERIA = {
    "own": Masked,
    "torch's": lambda: nn.CrossEntropyLoss(ignore_index=-1),
    "torch's, compiled": lambda: torch.compile(nn.CrossEntropyLoss(ignore_index=-1), backend="eager"),
    "own, compiled": lambda: torch.compile(Masked(), backend="eager"),
    "compiled in place": compiled_in_place,
}


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in pieces"])
@pytest.mark.parametrize("make", CRITERIA.values(), ids=CRITERIA)
def test_criteria_without_parameters_see_the_whole_batch(make, gather):
    model, x, labels = nn.Linear(4, 3), torch.randn(7, 4), torch.tensor([0, 1, 2, -1, -1, 0, -1])
    other = copy.deepcopy(model)
    make()(model(x), labels).backward()
    with parwrap.data_parallel(TWO, gather=gather):
        make()(other(x), labels).backward()

    assert torch.allclose(model.weight.grad, other.weight.grad, atol=1e-6)
