"""Batch norms whose batch is spread over ranks, against torch's own in one process that has the whole."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import parwrap

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def close(expected, actual, within=None):
    """Whether the numbers are the same, by the largest of them."""
    if expected is None or actual is None:
        return expected is actual
    expected, actual = expected.detach().double(), actual.detach().double()
    within = within or CLOSE[torch.float64]
    return expected.shape == actual.shape and bool(((expected - actual).abs() <= within * (1 + expected.abs())).all())


def on_all(true):
    """Ranks that fail must do so together, or the others would wait for them."""
    return parwrap.all_ranks(bool(true))


def part_of(x, split):
    """This rank's part of a batch that is cut where ``split`` says."""
    return x.split(split)[parwrap.rank()]


def condition(x):
    """How much larger than a rounding error its effect may be: a channel with hardly any spread is normalized by a difference."""
    channels = x.transpose(0, 1).flatten(1).double()
    return 1 + float(((1 + channels.abs().amax(1)) / channels.std(1, correction=0).clamp(min=3e-3)).max())


def check(model, x, split, dtype=None, steps=2, backward=True):
    """Run ``model`` on the parts and on the whole, and compare all that comes of it."""
    alone, together = model, copy.deepcopy(model)
    within = CLOSE[dtype or x.dtype] * (1 if dtype else condition(x))
    for step in range(steps):
        whole = (x * (step + 1)).requires_grad_()
        part = part_of(x * (step + 1), split).detach().requires_grad_()
        expected = alone(whole)
        with parwrap.sync_bn():
            actual = together(part)
            if backward:
                upstream = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype, device=expected.device).view_as(expected)
                actual.backward(part_of(upstream, split))
        if backward:
            expected.backward(upstream)

        assert on_all(actual.dtype == expected.dtype and close(part_of(expected, split), actual, within)), "outputs"
        assert on_all(not backward or close(part_of(whole.grad, split), part.grad, within)), "gradients of inputs"
    for name, p in alone.named_parameters():
        gradient = dict(together.named_parameters())[name].grad

        assert on_all(not backward or close(p.grad, parwrap.reduce_sum(gradient), 10 * within)), f"gradient of {name}"
    for name, buffer in alone.named_buffers():
        assert on_all(close(buffer, dict(together.named_buffers())[name], within)), name
    return actual


@st.composite
def cases(draw, ranks):
    """A layer with its options, and a batch of some shape with its parts, of which some may be empty."""
    split = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(lambda parts: sum(parts) > 1))
    channels, dims = draw(st.integers(1, 5)), draw(st.sampled_from(list(LAYERS)))
    shape = [sum(split), channels, *(draw(st.integers(1, 4)) for _ in range(dims - 2))]
    layer = LAYERS[dims](
        channels,
        momentum=draw(st.sampled_from([None, 0.1, 0.7])),
        affine=draw(st.booleans()),
        track_running_stats=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([1, 5])) + draw(st.sampled_from([0, 2]))
    for p in layer.parameters():
        nn.init.normal_(p, generator=generator)
    dtype = next(layer.parameters(), x).dtype
    x = x.to(torch.float64 if layer.running_mean is None and not layer.affine else dtype if layer.affine else layer.running_mean.dtype)
    if dims == 4 and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    return layer, x, split


same_on_all_ranks = settings(max_examples=30, derandomize=True, database=None, deadline=None, print_blob=False)


@pytest.mark.ranks(2, timeout=120)
@same_on_all_ranks
@given(cases(ranks=2))
def test_two_ranks_are_equal_to_one_process_that_has_the_whole_batch(case):
    check(*case)


@pytest.mark.ranks(3, timeout=120)
@same_on_all_ranks
@given(cases(ranks=3))
def test_three_ranks_are_equal_to_one_process_that_has_the_whole_batch(case):
    check(*case)


X = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_with_full_precision_weights_as_under_autocast(dtype):
    check(nn.BatchNorm2d(3), X.to(dtype), [4, 2])


@pytest.mark.ranks(2)
def test_a_half_precision_layer():
    check(nn.BatchNorm2d(3).bfloat16(), X.bfloat16(), [4, 2])


@pytest.mark.ranks(2)
def test_under_autocast():
    class Net(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    check(Net(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), X, [3, 3], dtype=torch.bfloat16, backward=False)


@pytest.mark.ranks(2)
def test_the_memory_format_of_the_input_is_kept():
    x = X.contiguous(memory_format=torch.channels_last)
    out = check(nn.BatchNorm2d(3), x, [4, 2])

    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
def test_values_far_from_zero_do_not_cancel():
    check(nn.BatchNorm2d(3).double(), X.double() * 1e-3 + 100, [5, 1], backward=False, dtype=torch.float32)


@pytest.mark.ranks(2)
def test_one_layer_used_twice_in_a_step():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3, dtype=torch.float64)

        def forward(self, x):
            return self.norm(torch.tanh(self.norm(x)) + x)

    check(Twice(), X.double(), [4, 2])


@pytest.mark.ranks(2)
def test_lazy_layers_subclasses_and_functional_calls():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    class Functional(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, None, None, training=True)

    lazy = nn.LazyBatchNorm2d(dtype=torch.float64)
    lazy(X.double())
    check(nn.Sequential(Own(3, dtype=torch.float64), lazy, Functional()), X.double(), [1, 5])


@pytest.mark.ranks(2)
def test_a_forward_without_gradients_updates_running_statistics():
    class Without(nn.BatchNorm2d):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    check(Without(3, dtype=torch.float64), X.double(), [2, 4], backward=False)
    with torch.inference_mode():
        check(nn.BatchNorm2d(3, dtype=torch.float64), X.double(), [2, 4], steps=1, backward=False)


@pytest.mark.ranks(2, fresh=True)  # checkpoints note the device type for the life of the process
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_share_in_what_is_computed_again_too(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3)).double()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    check(Checkpointed(), X.double(), [4, 2])


@pytest.mark.ranks(2)
def test_gradients_of_gradients():
    """As in a gradient penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    together = copy.deepcopy(model)
    x = torch.randn(6, 4, dtype=torch.float64)

    def penalized(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.square().sum() + model(x).square().sum()).backward()

    penalized(model, x)
    with parwrap.sync_bn():
        penalized(together, part_of(x, [4, 2]))

    for mine, whole in zip(together.parameters(), model.parameters(), strict=True):
        assert on_all(close(whole.grad, parwrap.reduce_sum(mine.grad), 1e-10))


@pytest.mark.ranks(2)
def test_an_input_without_gradient_and_frozen_weights():
    norm = nn.BatchNorm2d(3, dtype=torch.float64)
    norm.bias.requires_grad_(False)
    with parwrap.sync_bn():
        norm(part_of(X.double(), [4, 2])).square().sum().backward()
    alone = nn.BatchNorm2d(3, dtype=torch.float64)
    alone(X.double()).square().sum().backward()

    assert norm.bias.grad is None
    assert on_all(close(alone.weight.grad, parwrap.reduce_sum(norm.weight.grad)))


@pytest.mark.ranks(2)
def test_a_single_value_is_too_few_on_all_ranks_and_one_on_each_is_enough():
    norm = nn.BatchNorm1d(2)
    with parwrap.sync_bn():
        normalized = norm(torch.tensor([[0.0, 5.0]]) if parwrap.rank() else torch.tensor([[2.0, 1.0]]))
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            norm(torch.zeros(1 - parwrap.rank(), 2))

    assert on_all([[-1, 1], [1, -1]][1 - parwrap.rank()] == normalized.round()[0].tolist())


@pytest.mark.ranks(2)
def test_a_batch_that_is_empty_on_all_ranks_changes_nothing():
    norm = nn.BatchNorm1d(2)
    with parwrap.sync_bn():
        x = torch.zeros(0, 2, requires_grad=True)
        norm(x).sum().backward()

    assert [0, 0] == norm.running_mean.tolist()
    assert [0, 0] == norm.weight.grad.tolist()
    assert (0, 2) == x.grad.shape


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_ordinary_batch_is_the_same_to_the_last_digits(dtype):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)).to(dtype)
    check(model, X.to(dtype), [3, 2, 1], dtype=dtype)
