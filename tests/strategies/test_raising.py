"""An exception on one rank, in a backward or a forward, that the script catches: ranks skip the same step, and nobody waits."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap

TIMEOUT = timedelta(seconds=20)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.where:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return g, None


class Net(nn.Module):
    def __init__(self, width=8, layers=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), *(nn.Linear(width, width) for _ in range(layers - 2)), nn.Linear(width, 1)])

    def forward(self, x, raises_at=None):
        for place, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.tanh(x) if layer is not self.layers[-1] else x
            x = Raises.apply(x, place == raises_at)
        return x


def trained(raises, skips, width=8, epochs=2, samples=48, at=1):
    """Weights after some epochs; ``raises(step)`` on this rank in the backward, and ``skips(step)`` is for the reference."""
    torch.manual_seed(0)
    x = torch.randn(samples, 4)
    y = x.sum(1, keepdim=True)
    model = Net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = 0
    for _ in range(epochs):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True):
            step += 1
            if skips(step):
                continue
            optimizer.zero_grad()
            loss = (model(a, at if raises(step) else None) - b).pow(2).mean()
            try:
                loss.backward()
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                optimizer.zero_grad()
                continue
            optimizer.step()
            schedule.step()
    return torch.cat([*(p.detach().flatten() for p in model.parameters()), torch.tensor(schedule.get_last_lr())])


def assert_skipped_alike(fails, which, width=8, at=1, **options):
    """Ranks for which ``fails(rank)`` raise in the steps of ``which``; the reference is one process that leaves these out."""
    expected = trained(lambda step: False, lambda step: step in which, width)
    begun = time.monotonic()
    with parwrap.distributed(batch="global", seed=0, timeout=TIMEOUT, **options):
        torch.manual_seed(0)
        actual = trained(lambda step: step in which and fails(parwrap.rank()), lambda step: False, width, at=at)
        everybodys = parwrap.gather(actual)
    torch.testing.assert_close(expected, actual, rtol=1e-3, atol=1e-5)
    assert all(torch.equal(everybodys[0], each) for each in everybodys)
    assert time.monotonic() - begun < TIMEOUT.total_seconds() / 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("which", [(1,), (4,), (3, 4, 7)])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_an_exception_in_one_ranks_backward_skips_the_step_on_all(at, which, strategy):
    with pytest.warns(UserWarning, match=r"the backward at .*test_raising.py:\d+ raised OutOfMemoryError: CUDA out .* All ranks raise"):
        assert_skipped_alike(lambda rank: rank == 1, which, at=at, strategy=strategy)


@pytest.mark.ranks(2)
def test_buckets_that_were_sent_before_the_exception_do_no_harm():
    with pytest.warns(UserWarning, match="All ranks raise"):
        assert_skipped_alike(lambda rank: rank == 0, (1, 4, 5), width=800, at=0)


@pytest.mark.ranks(3)
def test_exceptions_on_several_ranks_at_once_skip_the_step_on_all():
    with pytest.warns(UserWarning, match="All ranks raise"):
        assert_skipped_alike(lambda rank: rank != 1, (2, 5))


@pytest.mark.ranks(2)
def test_exceptions_on_all_ranks_are_their_own(nothing_is_warned_of):
    assert_skipped_alike(lambda rank: True, (2, 5))


def test_two_models_that_train_in_two_threads_are_refused(parwrap_run, script):
    path = script("""
import threading
import torch
from torch import nn

def train(width):
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()

threads = [threading.Thread(target=train, args=(width,)) for width in (3, 5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""")
    begun = time.monotonic()
    status, _, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert 1 == status
    assert "two threads train at the same time" in stderr
    assert time.monotonic() - begun < 60


@pytest.mark.ranks(2)
def test_threads_that_train_one_after_the_other_may(nothing_is_warned_of):
    def step(model):
        model(torch.ones(2, 4)).sum().backward()

    with parwrap.distributed(seed=0, timeout=TIMEOUT):
        model = nn.Linear(4, 1)
        step(model)
        for _ in range(2):
            thread = threading.Thread(target=step, args=(model,))
            thread.start()
            thread.join()
            step(model)
    assert 5 * 2 == model.weight.grad[0, 0].item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_an_exception_in_one_ranks_forward_leaves_the_others_waiting_for_nothing(strategy):
    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            try:
                if step == 2 and parwrap.rank() == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                model(torch.randn(8, 4)).pow(2).mean().backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()
        return model

    begun = time.monotonic()
    with parwrap.distributed(seed=0, timeout=TIMEOUT, strategy=strategy):
        model = train()
    with parwrap.distributed():
        weights = parwrap.gather(model.weight.tolist())
    assert weights[0] == weights[1]
    assert time.monotonic() - begun < TIMEOUT.total_seconds() / 2


@pytest.mark.ranks(2)
def test_an_exception_in_a_hook_of_a_parameter_or_a_double_backward_is_raised_alike():
    def train():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        caught = []
        for step in range(8):
            optimizer.zero_grad()
            hooks = []
            if step in (0, 3, 5) and parwrap.rank() == 1:
                hooks.append(model[0].bias.register_hook(lambda grad: 1 / 0))
            try:
                model(torch.randn(8, 4)).pow(2).mean().backward(create_graph=step == 5)
            except ZeroDivisionError as error:
                caught.append((step, str(error)))
                continue
            finally:
                for hook in hooks:
                    hook.remove()
            optimizer.step()
        return caught, [p.tolist() for p in model.parameters()]

    with parwrap.distributed(seed=0, timeout=TIMEOUT):
        told = parwrap.gather(train())
    assert told[0] == told[1]
    assert [0, 3, 5] == [step for step, _ in told[0][0]]


FIRST = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import parwrap

def raises(gradient):
    raise RuntimeError("out of memory")

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hook = model.weight.register_hook(raises) if parwrap.rank() == 1 else None
skipped = 0
for (x,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2):
    try:
        model(x).sum().backward()
    except RuntimeError:
        skipped += 1
        if hook is not None:
            hook.remove()
        continue
    optimizer.step()
print(skipped, force=True)
"""


def test_the_first_thing_that_autograd_does_in_a_process_may_raise(parwrap_run, script):
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", "--timeout", "20", script(FIRST))

    assert (0, "1\n1\n") == (code, stdout), stderr
