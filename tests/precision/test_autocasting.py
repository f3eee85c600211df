"""Where autocast is on, where it is off, and that a script may have its own."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parwrap

BF16 = torch.bfloat16


class Spy(torch.autograd.Function):
    seen: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        Spy.seen.append(torch.is_autocast_enabled("cpu"))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Spy.seen.append(torch.is_autocast_enabled("cpu"))
        return grad


class SpyingSGD(torch.optim.SGD):
    def step(self, closure=None):
        before = torch.is_autocast_enabled("cpu")
        loss = super().step(closure)
        Spy.seen += [before, torch.is_autocast_enabled("cpu")]
        return loss


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_is_off_in_backward_and_in_step_and_on_in_closures(dtype, closures):
    parameter = nn.Parameter(torch.ones(1))
    torch.optim.SGD([parameter])  # so that torch's hooks are around the base class's step too
    optimizer = SpyingSGD([parameter], lr=0.1)

    def closure():
        Spy.apply(parameter).sum().backward()
        return 0.0

    for _ in range(2):
        Spy.seen.clear()
        with parwrap.amp(dtype=dtype, init_scale=2.0):
            optimizer.step(closure) if closures else (closure(), optimizer.step())

            assert torch.is_autocast_enabled("cpu")
        assert [True, False, False, False] == Spy.seen  # forward, backward, and twice in the step
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_is_on_again_after_a_step_that_raises():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("on purpose")

    parameter = nn.Parameter(torch.ones(1))
    failing, optimizer = Failing([parameter]), torch.optim.SGD([parameter])
    with parwrap.amp(dtype="bf16"):
        with pytest.raises(KeyError):
            failing.step()
        parameter.sum().backward()

        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)

        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(KeyError):
            failing.step()
        for _ in DataLoader([0]):
            assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("place", ["closure", "backward"])
def test_autocast_stays_off_once_it_stands_aside_wherever_that_was(place):
    class Casting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.autocast("cpu", dtype=BF16):
                return grad

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        with torch.autocast("cpu", dtype=BF16):
            loss = model(x).sum()
        loss.backward()
        return loss

    with parwrap.amp(dtype="bf16"):
        optimizer.step(closure) if place == "closure" else Casting.apply(model(x)).sum().backward()

        assert model(x).dtype is torch.float32


class Transformed(torch.utils.data.Dataset):
    """A sample is computed by what autocast would cast."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(1, 3) @ torch.full((3, 3), 1 / 3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("scopes", [[], [parwrap.distributed()]], ids=["alone", "distributed"])
def test_samples_are_made_without_autocast(scopes, workers):
    with ExitStack() as opened:
        for scope in (parwrap.amp(dtype="bf16"), *scopes):
            opened.enter_context(scope)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dtypes = []
        for x in DataLoader(Transformed(), batch_size=2, num_workers=workers):
            output = model(x)
            dtypes.append((x.dtype, output.dtype))
            output.sum().backward()
            optimizer.step()

    assert [(torch.float32, BF16)] * 2 == dtypes


def test_samples_are_made_as_by_hand_where_the_script_has_its_own_autocast():
    with parwrap.amp(dtype="bf16"), torch.autocast("cpu", dtype=BF16):
        assert [BF16] * 2 == [x.dtype for x in DataLoader(Transformed(), batch_size=2)]


def test_weights_that_are_changed_in_any_way_are_seen_by_the_next_forward():
    """torch's cache of cast weights would hold those of the first forward."""
    linear = nn.Linear(1, 1, bias=False)
    with parwrap.amp(dtype="bf16"):
        for value in (1.0, 2.0, 3.0):
            linear.weight.data.fill_(value)

            assert value == linear(torch.ones(1, 1)).item()


def test_a_block_in_float32_inside():
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    with parwrap.amp(dtype="fp16", init_scale=8.0):
        with parwrap.amp(level="O0"):
            assert (torch.float32, 8.0) == (linear(x).dtype, parwrap.amp_state().scale)
            linear(x).sum().backward()
        with parwrap.amp(dtype="bf16"):
            assert (BF16, 8.0) == (linear(x).dtype, parwrap.amp_state().scale)

        assert torch.float16 == linear(x).dtype
    assert [1.0, 1.0] == linear.weight.grad[0].tolist()


def test_an_autocast_that_torch_enters_by_itself_is_none_of_the_scripts_own(capfd):
    with parwrap.amp(dtype="bf16"):
        model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()

        assert model(x).dtype is BF16
    assert "" == capfd.readouterr().err
