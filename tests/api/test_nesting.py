"""One decorator inside itself: the same as a single one, or an error that names both."""

import builtins

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError
from parwrap.group.group import alone

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)]
SAMPLES = torch.randn(48, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def train(batch_size, model=None, epochs=2, dtype=torch.float64):
    """A plain loop."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for (x,) in DataLoader(TensorDataset(SAMPLES.to(dtype)), batch_size=batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x).to(dtype), x[:, :1]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def calling(function):
    """Another function, which only calls ``function``."""

    def outer(*args, **kwargs):
        return function(*args, **kwargs)

    return outer


@pytest.mark.parametrize("size", SIZES)
def test_windows_inside_windows_of_as_many_batches_are_one(size):
    with alone():
        expected = train(16)
    inner = parwrap.accumulate(4)(train)
    actual = parwrap.distributed(batch="global")(parwrap.accumulate(steps=4)(calling(inner)))(4)

    assert (actual - expected).abs().max() < 1e-12


@pytest.mark.parametrize("size", SIZES)
def test_windows_of_the_outer_go_on_over_calls_of_the_inner(size):
    weight = nn.Parameter(torch.zeros(1))

    @parwrap.accumulate(2)
    def train_one(optimizer, x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.item()

    with parwrap.distributed(), parwrap.accumulate(2):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        assert [0.0, -2.0, -2.0, -7.0] == [train_one(optimizer, x) for x in (1.0, 3.0, 4.0, 6.0)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("outer", "inner"), [(4, 2), (2, 4), (1, 2)])
def test_windows_inside_windows_of_other_steps_are_refused(size, outer, inner):
    text = (
        f"parwrap.accumulate({inner}) cannot be opened inside parwrap.accumulate({outer}), because a batch belongs to only one window. "
        "Use the same steps for both, or remove one of them. The option --accumulate counts as one of them too."
    )
    with parwrap.distributed(batch="global"), parwrap.accumulate(outer):
        for _ in range(2):
            with pytest.raises(UsageError) as refusal:
                parwrap.accumulate(inner)(train)(4)
            assert text == str(refusal.value)

    with parwrap.accumulate(inner):
        parwrap.accumulate(inner)(train)(4)


FP32 = {"level": "O0"}


@pytest.mark.parametrize(
    ("outer", "inner", "same"),
    [
        ({"dtype": "bf16"}, {"dtype": torch.bfloat16}, {"dtype": "bf16"}),
        ({"level": "O1"}, {"dtype": "fp16"}, {"level": "O1"}),
        ({"level": "O2"}, {"level": "O2"}, {"level": "O2"}),
        ({"level": "O2"}, {}, {"level": "O2"}),
        ({"dtype": "fp16"}, {}, {"dtype": "fp16"}),
        (FP32, {}, FP32),
        ({}, {"dtype": "bf16"}, {"dtype": "bf16"}),
        (FP32, {"dtype": "bf16"}, {"dtype": "bf16"}),
        ({"dtype": "bf16"}, FP32, FP32),
        ({"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "fp16"}),
    ],
    ids=str,
)
def test_precision_inside_precision(outer, inner, same):
    expected = parwrap.amp(**same)(train)(8, dtype=torch.float32)
    actual = parwrap.amp(**outer)(calling(parwrap.amp(**inner)(train)))(8, dtype=torch.float32)

    assert torch.equal(actual, expected)
    assert torch.equal(expected, train(8, dtype=torch.float32)) == (same == FP32)


@pytest.mark.ranks(2)
def test_precision_inside_precision_on_ranks():
    expected = parwrap.distributed(parwrap.amp(dtype="fp16")(train))(8, dtype=torch.float32)
    inner = parwrap.distributed(parwrap.amp(train))
    actual = parwrap.distributed(parwrap.amp(dtype="fp16")(calling(inner)))(8, dtype=torch.float32)

    assert torch.equal(actual, expected)


def test_autocast_is_on_again_after_a_step_that_raises_inside_of_two():
    def fails(*_):
        raise KeyError("on purpose")

    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    with parwrap.amp(dtype="fp16"), parwrap.amp(dtype="bf16"):
        linear(x).sum().backward()
        optimizer.step()
        handle = optimizer.register_step_pre_hook(fails)
        with pytest.raises(KeyError):
            optimizer.step()
        handle.remove()
        linear(x).sum().backward()

        assert torch.bfloat16 == linear(x).dtype


def mean_of_ranks():
    """Which ranks share the batch of a layer, as the mean of their numbers."""
    norm = nn.BatchNorm1d(1, momentum=1.0)
    norm(torch.full((2, 1), float(parwrap.rank())))
    return norm.running_mean.item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("outer", "inner", "means"),
    [
        ({}, {}, [0.5, 0.5]),
        ({"group_size": 1}, {}, [0.0, 1.0]),
        ({"group_size": 1}, {"group_size": 1}, [0.0, 1.0]),
        ({"group_size": 1}, {"group_size": 2}, [0.5, 0.5]),
        ({}, {"group_size": 1}, [0.0, 1.0]),
    ],
    ids=str,
)
def test_the_innermost_that_says_who_shares_decides(outer, inner, means):
    with parwrap.distributed(), parwrap.sync_bn(**outer):
        before = parwrap.gather(mean_of_ranks())
        assert means == parwrap.gather(parwrap.sync_bn(**inner)(mean_of_ranks)())
        assert before == parwrap.gather(mean_of_ranks())


@pytest.mark.parametrize("size", SIZES)
def test_statistics_that_are_shared_twice_are_those_of_the_whole_batch(size):
    def layers():
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()

    torch.manual_seed(0)
    with alone():
        expected = train(16, layers())
    torch.manual_seed(0)
    with parwrap.distributed(batch="global"), parwrap.sync_bn():
        actual = parwrap.sync_bn(train)(16, layers())

    assert (actual - expected).abs().max() < 1e-10


@pytest.mark.parametrize("size", SIZES)
def test_a_seed_inside_that_is_the_same_does_not_draw_the_same_numbers_again(size):
    @parwrap.distributed(seed=1)
    def drawn():
        return torch.rand(1).item()

    with parwrap.distributed(seed=1):
        numbers = [drawn(), drawn()]
    torch.manual_seed(1)

    assert numbers == torch.rand(2).tolist()
    assert drawn() == drawn()


@pytest.mark.parametrize("size", SIZES)
def test_a_function_that_calls_itself(size):
    with alone():
        expected = train(16)

    @parwrap.distributed(batch="global", seed=1)
    @parwrap.amp(level="O0")
    @parwrap.sync_bn
    @parwrap.accumulate(4)
    def deep(depth):
        return deep(depth - 1) if depth else train(4)

    assert (deep(2) - expected).abs().max() < 1e-12


def ids():
    """Of what the decorators change; a wrapper says that it is equal to what it wraps."""
    return id(torch.autograd.backward), id(nn.functional.batch_norm), id(builtins.print), torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("decorator", [parwrap.distributed, parwrap.amp(dtype="bf16"), parwrap.sync_bn, parwrap.accumulate(2)])
def test_after_an_error_inside_of_two_all_is_put_back_and_open_to_the_next(decorator):
    @decorator
    def fails():
        assert ids() != before
        raise KeyError("on purpose")

    before = ids()
    for _ in range(2):
        with pytest.raises(KeyError):
            decorator(calling(fails))()
        assert before == ids()
