"""Reports between ranks next to gradients in half precision must not be rounded like these."""

import pytest
import torch
from torch import nn

import parwrap
from parwrap.strategies.ddp.gradient_averager import divide

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.ranks(16, timeout=300)
def test_a_rank_that_is_missing_among_sixteen_does_not_make_gradients_smaller():
    grads = []

    @parwrap.distributed
    def train():
        model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(4 if parwrap.rank() else 3):
            optimizer.zero_grad()
            model(torch.ones(4, 2, dtype=torch.bfloat16)).mean().backward()
            grads.append(model.weight.grad.flatten().tolist())
            optimizer.step()

    train()

    assert [[1.0, 1.0]] * (4 if parwrap.rank() else 3) == grads[: 4 if parwrap.rank() else 3]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("missing", [1, 15])
def test_a_gpu_divides_by_what_was_told_as_the_host_does(dtype, missing):
    weight = torch.tensor((16 - missing) / 16, dtype=torch.promote_types(dtype, torch.float32))
    grads = [torch.randn(5, 3, generator=torch.Generator().manual_seed(number)).to(dtype) for number in range(2)]
    grads += [torch.randn(4).double(), torch.sparse_coo_tensor([[1]], torch.ones(1, dtype=dtype), (3,), check_invariants=False)]
    expected = [grad.to_dense().double() / weight.item() for grad in grads]

    divide(grads, weight)

    for one, other in zip(expected, grads, strict=True):
        within = 2 * max(torch.finfo(each).eps for each in (other.dtype, weight.dtype))
        torch.testing.assert_close(one, other.to_dense().double(), rtol=within, atol=0)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_where_all_are_there_a_gpu_changes_no_bit(dtype):
    grads = [torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)]
    before = grads[0].clone()

    divide(grads, torch.tensor(1 + 1e-6))

    assert torch.equal(before, grads[0])
