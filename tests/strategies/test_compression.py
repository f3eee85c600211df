"""Compressed gradients against hand-written DDP with torch's own hooks, and what must not be compressed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import parwrap
from parwrap.checks.same_step import NUMBERS
from parwrap.errors import RankMismatchError, UsageError
from parwrap.options import Options
from parwrap.strategies.compression import EPSILON, START

STEPS = 6
HOOKS = {
    "bf16": lambda state, bucket: default_hooks.bf16_compress_hook(None, bucket),
    "fp16": lambda state, bucket: default_hooks.fp16_compress_hook(None, bucket),
    "powersgd": powerSGD_hook.powerSGD_hook,
}
DATA = TensorDataset(*(torch.randn(STEPS * 12, width, generator=torch.Generator().manual_seed(5)) for width in (16, 2)))


def train(wrap, loader, seen=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
    forward = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        if seen is not None:
            seen.append(loss.item())
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(seen=None):
    return train(lambda model: model, DataLoader(DATA, batch_size=4), seen)


def by_hand(compress):
    def wrap(model):
        ddp = DistributedDataParallel(model)
        state = powerSGD_hook.PowerSGDState(None, Options.powersgd_rank, start_powerSGD_iter=START, orthogonalization_epsilon=EPSILON)
        ddp.register_comm_hook(state, HOOKS[compress])
        return ddp

    return train(wrap, DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, shuffle=False)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", HOOKS)
def test_weights_are_bit_for_bit_those_of_ddp_by_hand_with_torchs_hook(compress):
    expected = by_hand(compress)
    actual = parwrap.distributed(compress=compress)(plain)()

    assert torch.equal(expected, actual)
    assert not torch.equal(expected, parwrap.distributed(plain)())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("compress", ["bf16", "powersgd"])
def test_on_three_ranks_they_are_so_up_to_the_order_of_sums_of_halves(compress):
    torch.testing.assert_close(parwrap.distributed(compress=compress)(plain)(), by_hand(compress), atol=1e-3, rtol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", ["fp16", "powersgd"])
def test_the_loss_is_the_mean_over_ranks_in_full_precision(compress):
    mine, means = [], []
    parwrap.distributed(compress=compress)(plain)(means)
    train(lambda model: model, DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, shuffle=False)), mine)
    (first, _), (other, _) = parwrap.gather(mine[:2])

    assert pytest.approx((first + other) / 2, rel=1e-6) == means[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("compress", "part"), [("bf16", 0.5), ("fp16", 0.5), ("powersgd", 0.7)])
def test_a_step_sends_half_the_bytes_or_fewer(compress, part):
    sent, original = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    with parwrap.distributed(compress=compress), pytest.MonkeyPatch.context() as patch:
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
        torch.optim.SGD(model.parameters(), lr=0.1)
        patch.setattr(dist, "all_reduce", counted)
        for _ in range(START + 2):
            sent.clear()
            model(torch.randn(4, 16) + parwrap.rank()).square().mean().backward()

    signal = 4 * (len(list(model.parameters())) + NUMBERS)
    gradients = 4 * sum(p.numel() for p in model.parameters())

    assert 0.5 * part < sum(sent) / (gradients + signal) < part + signal / gradients


@pytest.mark.ranks(3)
@pytest.mark.parametrize("compress", ["bf16", "powersgd"])
def test_ranks_count_by_their_samples_as_exactly_as_without(compress):
    """7 samples for 3 ranks and a batch of 4: weights are thirds, which no half precision holds."""

    def mean():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for (x,) in DataLoader(TensorDataset(torch.full((7, 1), 4.0)), batch_size=4):
            optimizer.zero_grad()
            (weight * x).mean().backward()
            optimizer.step()
        return weight.item()

    assert pytest.approx(-8.0, rel=1e-3) == parwrap.distributed(compress=compress, batch="global")(mean)()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", HOOKS)
def test_what_nobody_uses_keeps_none(compress):
    with parwrap.distributed(compress=compress):
        used, unused = nn.Parameter(torch.zeros(24, 24)), nn.Parameter(torch.zeros(24, 24))
        optimizer = torch.optim.SGD([used, unused], lr=1.0)
        for step in range(START + 2):
            optimizer.zero_grad()
            loss = (used * (parwrap.rank() + 1)).sum()
            (loss + 0 * unused.sum() if step == 0 else loss).backward()

            assert (step == 0) == (unused.grad is not None)
            assert pytest.approx(1.5, rel=1e-2) == used.grad.mean().item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", ["bf16", "powersgd"])
def test_sparse_gradients_and_half_precision_weights_are_sent_too(compress):
    with parwrap.distributed(compress=compress):
        embedding, half = nn.Embedding(6, 2, sparse=True), nn.Linear(2, 2).to(torch.bfloat16)
        optimizer = torch.optim.SGD([*embedding.parameters(), *half.parameters()], lr=0.5)
        for _ in range(START + 2):
            optimizer.zero_grad()
            half(embedding(torch.tensor([parwrap.rank(), 3])).to(torch.bfloat16)).sum().backward()
            assert embedding.weight.grad.is_sparse
            optimizer.step()

    both = parwrap.gather(torch.cat([embedding.weight.flatten(), *(p.float().flatten() for p in half.parameters())]))

    assert torch.equal(*both)
    assert both[0].isfinite().all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", ["bf16", "fp16", "powersgd"])
def test_complex_gradients_are_averaged(compress):
    with parwrap.distributed(compress=compress):
        weight = nn.Parameter(torch.ones(24, 24, dtype=torch.complex64))
        torch.optim.SGD([weight], lr=0.0)
        for step in range(START + 4):
            weight.grad = None
            (weight * (complex(1, step) if parwrap.rank() else complex(3, 0)) * torch.arange(1.0, 25.0)).real.sum().backward()

            expected = complex(2, -step / 2) * torch.arange(1.0, 25.0).expand(24, 24)  # torch's gradient is the conjugate
            torch.testing.assert_close(weight.grad, expected, rtol=1e-2, atol=0)


@pytest.mark.ranks(2)
def test_powersgd_goes_on_after_a_step_without_gradients_and_after_an_overflow():
    with parwrap.distributed(compress="powersgd"):
        weight = nn.Parameter(torch.zeros(24, 24))
        torch.optim.SGD([weight], lr=0.0)
        seen = []
        for step in range(9):
            factor = {4: 0.0, 6: float("inf")}.get(step, 1.0)
            weight.grad = None
            (weight * factor * torch.arange(1.0, 25.0)).sum().backward()
            seen.append(weight.grad.mean().item())

    assert [12.5, 0.0, 12.5] == pytest.approx(seen[3:6], abs=1e-3)
    assert not torch.tensor(seen[6]).isfinite()
    assert [12.5, 12.5] == pytest.approx(seen[7:], abs=1e-3)


@pytest.mark.ranks(2)
def test_another_set_of_parameters_begins_anew():
    """Another loss reaches another optimizer's parameter: its buckets are sent as they are, until PowerSGD begins in them too."""
    with parwrap.distributed(compress="powersgd"):
        first, second = nn.Parameter(torch.zeros(24, 24)), nn.Parameter(torch.zeros(24, 24))
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in (first, second)]
        ranks = []
        for step in range(2 * START + 4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (first * torch.eye(24)).sum()
            if step < START + 2:
                loss.backward()
            else:
                (loss + (second * torch.eye(24)).sum()).backward()
            ranks.append(int(torch.linalg.matrix_rank(first.grad)))

    assert [4, 24, 4] == [ranks[START + 1], ranks[START + 2], ranks[-1]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compress", HOOKS)
def test_the_checks_still_see_ranks_that_come_apart(compress):
    def run():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.arange(32.0).reshape(16, 2) + parwrap.rank()), batch_size=4):
            model(x).sum().backward()
            optimizer.step()

    with pytest.raises(RankMismatchError, match=r"the ranks have read different \w+ .*in the pass at .*test_compression.py:\d+"):
        parwrap.distributed(compress=compress)(run)()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"compress": "int8"},
            "compress='int8' is not a valid value. Choose one of: None: gradients are sent in full precision; 'bf16': they",
        ),
        ({"compress": "powersgd", "powersgd_rank": 0}, "powersgd_rank=0 is not a positive integer"),
        (
            {"compress": "powersgd", "powersgd_rank": 2},
            "powersgd_rank=2 is refused, because torch's .* doubles gradients that are matrices of rank 1. Use 1, or",
        ),
        ({"compress": "bf16", "powersgd_rank": 8}, "powersgd_rank=8 has no effect with compress='bf16': remove it, or use"),
        ({"strategy": "none", "batch": "global"}, "batch='global' has no effect with strategy='none': .* that has this option: 'ddp'"),
        ({"strategy": "none", "compress": "bf16"}, "compress='bf16' has no effect with strategy='none': .* that has this option: 'ddp'"),
        (
            {"strategy": "local_sgd", "compress": "bf16"},
            "compress='bf16' applies only to averaged gradients, which strategy='local_sgd' has only during its warm-up: remove it, or",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**options)
