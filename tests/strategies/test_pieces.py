import copy

import pytest
import torch
from torch.nn import functional as F

import parwrap
from parwrap.strategies.data_parallel.sharded_outputs import Pieces

torch.manual_seed(0)
LOGITS = torch.randn(7, 3)
LABELS = torch.tensor([0, 1, 2, -100, 1, -100, 0])
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
CHANCES = LOGITS.softmax(1)

LOSSES = {
    "cross_entropy": (F.cross_entropy, LABELS, {}),
    "weighted": (F.cross_entropy, LABELS, {"weight": WEIGHT, "label_smoothing": 0.1}),
    "other ignored": (F.cross_entropy, LABELS.clamp(0), {"ignore_index": 1}),
    "chances": (F.cross_entropy, CHANCES, {"weight": WEIGHT}),
    "nll_loss": (lambda x, y, **options: F.nll_loss(x.log_softmax(1), y, **options), LABELS, {"weight": WEIGHT}),
    "mse_loss": (F.mse_loss, CHANCES, {}),
    "l1_loss": (F.l1_loss, CHANCES, {}),
    "huber_loss": (F.huber_loss, CHANCES, {"delta": 0.5}),
    "smooth_l1_loss": (F.smooth_l1_loss, CHANCES, {"beta": 0.5}),
    "binary": (F.binary_cross_entropy_with_logits, CHANCES, {}),
    "binary weighted": (F.binary_cross_entropy_with_logits, CHANCES, {"pos_weight": WEIGHT}),
}
IN_PIECES = {*LOSSES} - {"binary weighted", "nll_loss"}


def in_pieces(tensor):
    return Pieces(tensor.split([3, 2, 2]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_the_whole_and_most_need_not_put_it_together(name, reduction):
    loss_of, target, options = LOSSES[name]
    whole, parts = (LOGITS.clone().requires_grad_() for _ in range(2))
    expected = loss_of(whole, target, reduction=reduction, **options)
    pieces = in_pieces(parts)
    actual = loss_of(pieces, target, reduction=reduction, **options)
    expected.sum().backward()
    actual.sum().backward()

    assert (name in IN_PIECES) == pieces.is_in_pieces
    assert expected.shape == actual.shape
    assert torch.allclose(expected, actual + 0, atol=1e-6)
    assert torch.allclose(whole.grad, parts.grad, atol=1e-6)


def test_a_target_in_pieces_is_taken_as_it_is():
    pieces, target = in_pieces(LOGITS), in_pieces(CHANCES)

    assert torch.allclose(F.mse_loss(LOGITS, CHANCES), F.mse_loss(pieces, target))
    assert pieces.is_in_pieces
    assert target.is_in_pieces


def test_nothing_that_counts_gives_nan_as_for_the_whole():
    assert F.cross_entropy(in_pieces(LOGITS), torch.full((7,), -100)).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_do_not_overflow(dtype):
    logits = (LOGITS * 1000).to(dtype).repeat(100, 1)
    expected = F.cross_entropy(logits.float(), LABELS.clamp(0).repeat(100))
    actual = F.cross_entropy(Pieces(logits.split(350)), LABELS.clamp(0).repeat(100))

    assert dtype == actual.dtype
    assert torch.allclose(expected, actual.float(), rtol=2e-2)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: F.mse_loss(x, CHANCES[:1].expand(7, 3)[:, :1]),
        lambda x: F.mse_loss(x, CHANCES, size_average=False),
        lambda x: F.mse_loss(CHANCES, x),
        lambda x: F.mse_loss(x, CHANCES, weight=CHANCES),
        lambda x: F.kl_div(x, CHANCES, reduction="batchmean"),
        lambda x: F.cosine_embedding_loss(x, CHANCES, torch.ones(7)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_losses_are_computed_on_the_whole(loss_of):
    pieces = in_pieces(LOGITS)

    assert torch.equal(loss_of(LOGITS), loss_of(pieces))
    assert not pieces.is_in_pieces


def test_its_facts_are_known_without_putting_it_together():
    pieces = in_pieces(LOGITS.clone().requires_grad_())

    assert (LOGITS.shape, 2, 7, 7, 21) == (pieces.shape, pieces.dim(), len(pieces), pieces.size(0), pieces.numel())
    assert (torch.float32, LOGITS.device, True) == (pieces.dtype, pieces.device, pieces.requires_grad)
    assert isinstance(pieces, torch.Tensor)
    assert pieces.is_in_pieces


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.argmax(1) == LABELS,
        lambda x: LABELS[:, None] == x,
        lambda x: x[2],
        lambda x: torch.cat([x, x * 2]),
        lambda x: torch.stack([*x]),
        lambda x: torch.tensor(x.tolist()),
        lambda x: torch.from_numpy(x.detach().numpy()),
        lambda x: x.add_(1),
        lambda x: x.T,
    ],
)
def test_to_all_else_it_is_the_whole(look):
    assert torch.equal(look(LOGITS.clone()), look(in_pieces(LOGITS.clone())))


def test_a_change_of_the_whole_is_seen_by_losses():
    logits, pieces = LOGITS.clone(), in_pieces(LOGITS)
    for x in (logits, pieces):
        x.mul_(2)

    assert torch.equal(F.mse_loss(logits, CHANCES), F.mse_loss(pieces, CHANCES))


@pytest.mark.parametrize("watch", [torch.Tensor.retain_grad, lambda x: x.register_hook(print)])
def test_gradients_that_went_to_the_pieces_are_not_missed_silently(watch):
    pieces = in_pieces(LOGITS.clone().requires_grad_() * 1)
    F.mse_loss(pieces, CHANCES)
    with pytest.raises(parwrap.UsageError, match=r"on the outputs of a model comes after their loss was computed on the pieces that"):
        watch(pieces)


def test_a_copy_and_what_is_saved_is_a_plain_tensor(tmp_path):
    torch.save(in_pieces(LOGITS), tmp_path / "outputs.pt")

    assert torch.equal(LOGITS, torch.load(tmp_path / "outputs.pt"))
    assert torch.equal(LOGITS, copy.deepcopy(in_pieces(LOGITS)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_look_without_gradients_does_not_take_them_from_the_loss(mode):
    leaf = LOGITS.clone().requires_grad_()
    pieces = in_pieces(leaf * 1)
    with mode():
        assert torch.equal(LOGITS.argmax(1), pieces.argmax(1))
    F.mse_loss(pieces, CHANCES).backward()

    assert torch.allclose(2 * (LOGITS - CHANCES) / 21, leaf.grad)


@torch.inference_mode()
def test_in_inference_mode_too():
    assert torch.equal(LOGITS.argmax(1), in_pieces(LOGITS * 1).argmax(1))


def test_gradients_of_the_whole_can_be_kept():
    leaf = LOGITS.clone().requires_grad_()
    pieces = in_pieces(leaf * 1)
    pieces.retain_grad()
    F.mse_loss(pieces, CHANCES).backward()

    assert torch.allclose(leaf.grad, pieces.grad)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def hooked(x):
    loss = torch.nn.MSELoss()
    loss.register_full_backward_hook(lambda module, given, made: None)
    return loss(x, CHANCES)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: F.mse_loss(Reverse.apply(x), CHANCES),
        lambda x: F.mse_loss(x, CHANCES) + F.mse_loss(Reverse.apply(x), CHANCES),
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.exp().mean(), x, use_reentrant=True),
        hooked,
    ],
    ids=["function", "function and loss", "reentrant checkpoint", "backward hook"],
)
def test_gradients_reach_it_from_autograd_functions(loss_of):
    whole, parts = (LOGITS.clone().requires_grad_() for _ in range(2))
    loss_of(whole * 1).backward()
    loss_of(in_pieces(parts * 1)).backward()

    assert torch.allclose(whole.grad, parts.grad, atol=1e-6)


def test_gradients_go_through_it_where_it_was_made_inside_of_a_checkpoint():
    leaf = LOGITS.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x: in_pieces(x * 2), leaf, use_reentrant=True)
    F.mse_loss(out, CHANCES).backward()

    assert torch.allclose(4 * (2 * LOGITS - CHANCES) / 21, leaf.grad)


def test_gradients_of_the_loss_for_it_are_asked_for_in_time():
    pieces = in_pieces(LOGITS.clone().requires_grad_() * 1)
    loss = F.mse_loss(pieces, CHANCES)
    with pytest.raises(
        parwrap.UsageError,
        match=r"grad on the outputs of a model comes after their loss was computed .* for example with outputs = 1 \* out",
    ):
        torch.autograd.grad(loss, pieces)

    outputs = 1 * in_pieces(LOGITS.clone().requires_grad_() * 1)
    assert torch.allclose(2 * (LOGITS - CHANCES) / 21, torch.autograd.grad(F.mse_loss(outputs, CHANCES), outputs)[0])
