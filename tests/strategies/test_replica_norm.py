"""The layer's own function, against torch's on the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from parwrap.intercept.norm import Norm
from parwrap.strategies.data_parallel.replica_norm import shared_over_replicas
from parwrap.strategies.data_parallel.replica_threads import current_replica, run_together


def normalized(parts, weight, bias, momentum=0.1):
    """The outputs for ``parts`` and the running statistics of the first replica."""
    running = [(torch.zeros_like(weight), torch.ones_like(weight)) for _ in parts]

    def run(part, means):
        return lambda: shared_over_replicas(Norm(F.batch_norm, part, *means, weight, bias, True, momentum, 1e-5), current_replica())

    outputs = run_together([part.device for part in parts], [run(*each) for each in zip(parts, running, strict=True)])
    assert all(torch.equal(*pair) for each in running for pair in zip(each, running[0], strict=True))
    return torch.cat(outputs), running[0]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(lambda sizes: sum(sizes) > 1),
    rest=st.sampled_from([(), (3,), (2, 2)]),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_outputs_gradients_and_running_statistics_are_those_of_the_whole(sizes, rest, offset):
    torch.manual_seed(0)
    x = (offset + torch.randn(sum(sizes), 2, *rest, dtype=torch.float64)).requires_grad_()
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    running = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    expected = F.batch_norm(x, *running, weight, bias, training=True)
    actual, means = normalized(x.split(sizes), weight, bias)
    direction = torch.randn_like(expected)
    given = x, weight, bias

    assert torch.allclose(expected, actual, atol=1e-8)
    assert all(torch.allclose(*pair, atol=1e-10) for pair in zip(running, means, strict=True))
    one, other = (torch.autograd.grad((out * direction).sum(), given, create_graph=True) for out in (expected, actual))
    assert all(torch.allclose(*pair, atol=1e-7) for pair in zip(one, other, strict=True))


def test_it_can_be_differentiated_twice():
    torch.manual_seed(0)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradgradcheck(lambda x, weight: normalized(x.split([3, 2]), weight, weight * 0)[0], (x, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_normalized_in_float32_and_stay_halves(dtype):
    x = torch.randn(6, 2).to(dtype)
    expected = F.batch_norm(x.float(), None, None, training=True)
    outputs, _ = normalized(x.split([4, 2]), torch.ones(2), torch.zeros(2))

    assert dtype == outputs.dtype
    assert torch.allclose(expected, outputs.float(), atol=2e-2)
