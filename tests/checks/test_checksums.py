"""Checksums of weights: what they find, what they cost, and that they depend on nothing but the values."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parwrap.checks import same_weights
from parwrap.checks.same_weights import checksums

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, generator=GENERATOR)


KINDS = {
    "float": drawn(70, 3),
    "half": drawn(501).bfloat16(),
    "byte": torch.arange(77, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "double": drawn(5, 1, 13).double(),
    "complex": torch.complex(drawn(40).double(), drawn(40).double()),
    "scalar": torch.tensor(3.0),
    "nothing": torch.empty(0, 4),
    "transposed": drawn(40, 50).t(),
    "channels last": drawn(8, 4, 3, 3).to(memory_format=torch.channels_last),
    "slice at an odd place": drawn(100)[1:60],
}


@pytest.mark.parametrize("bytes_at_a_time", [same_weights.PIECE, 2048])
def test_a_checksum_depends_on_the_values_and_the_number_alone(monkeypatch, bytes_at_a_time):
    monkeypatch.setattr(same_weights, "PIECE", bytes_at_a_time)
    together = checksums(KINDS.values())
    for number, each in enumerate(KINDS.values()):
        assert torch.equal(together[number : number + 1], checksums([each.clone()], [number]))
    assert len(set(together.tolist())) == len(KINDS)


def test_how_a_tensor_lies_in_memory_does_not_matter():
    for name in ("transposed", "channels last", "slice at an odd place"):
        assert torch.equal(checksums([KINDS[name]]), checksums([KINDS[name].contiguous()]))


def differ(x, change):
    changed = x.clone()
    change(changed)
    return not torch.equal(checksums([x]), checksums([changed]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_changes_that_might_cancel_are_found(dtype):
    x = drawn(400).to(dtype)
    whole = torch.arange(400).to(dtype)
    for pair in itertools.product((0, 1, 41), (2, 7, 43, 85, 127, 128, 129, 256, 399)):
        at = torch.tensor(pair)
        assert differ(x, lambda y, at=at: y.index_copy_(0, at, -y[at]))
        assert differ(x, lambda y, at=at: y.index_copy_(0, at, y[at.flip(0)]))
        assert differ(whole, lambda y, at=at: y.index_add_(0, at, torch.tensor([1, -1]).to(dtype)))
    assert differ(x, lambda y: y.neg_())
    assert differ(x, lambda y: y.copy_(y.flip(0)))
    assert differ(x, lambda y: y.copy_(y.roll(128)))
    assert differ(x, lambda y: y.zero_())


class Operators(TorchDispatchMode):
    """Counts the operators that compute something: views launch no kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_number_of_operators_does_not_grow_with_the_parameters():
    counts = []
    for parameters in (10, 700):
        model = [torch.nn.Parameter(torch.ones(20)) for _ in range(parameters)]
        with Operators() as operators:
            checksums(model)
        counts.append(operators.count)
    assert counts[0] == counts[1]


def test_the_sums_of_a_large_parameter_need_little_memory():
    program = (
        "import resource, torch; from parwrap.checks.same_weights import checksums\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "large = torch.ones(60_000_000, dtype=torch.bfloat16); checksums([large[:9]]); before = peak()\n"
        "checksums([large]); print(peak() - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert int(found.stdout) < 64
