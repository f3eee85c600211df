import weakref
from collections import defaultdict, deque

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from parwrap.strategies.data_parallel.replicas import SMALL, replicas

CPU = torch.device("cpu")


class Holder(nn.Module):
    """Names for its layers and tensors beside the registered ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.second.weight = self.first.bias
        self.missing, self.frozen = None, nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_parameter("none", None)
        self.layers, self.by_name = [self.first, self.second], {"first": self.first.weight}
        self.mask, self.call = torch.ones(2), self.apply_all

    def apply_all(self, x):
        return self.second(self.first(x)) * self.mask

    def forward(self, x):
        return self.call(x)


def test_the_first_is_the_module_and_others_are_of_the_same_make():
    module = Holder()
    first, second = replicas(module, [CPU] * 2)

    assert first is module
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in second.named_parameters()]
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in second.named_buffers()]
    assert all(torch.equal(*pair) for pair in zip(module.state_dict().values(), second.state_dict().values(), strict=True))
    assert not {id(t) for t in module.state_dict(keep_vars=True).values()} & {id(t) for t in second.state_dict(keep_vars=True).values()}
    assert second.missing is second.none is None


def test_other_names_of_what_is_inside_are_the_copys_own():
    _, copy = replicas(Holder(), [CPU] * 2)

    assert copy.layers == [copy.first, copy.second]
    assert copy.by_name["first"] is copy.first.weight
    assert copy.second.weight is copy.first.bias
    assert copy.call.__self__ == copy


def test_gradients_flow_back_and_what_nobody_uses_gets_none():
    module = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "unused": nn.Linear(2, 1)})
    x = torch.randn(3, 2)
    for replica in replicas(module, [CPU] * 3)[1:]:
        replica["used"](x).sum().backward()

    assert torch.allclose(2 * x.sum(0, keepdim=True), module["used"].weight.grad)
    assert all(p.grad is None for p in module["unused"].parameters())


def test_small_and_large_tensors_of_several_dtypes():
    module = nn.Module()
    for number, (size, dtype) in enumerate([(1, torch.float32), (SMALL + 1, torch.float32), (3, torch.float64), (0, torch.complex64)]):
        module.register_parameter(f"p{number}", nn.Parameter(torch.randn(size, dtype=dtype)))
    module.register_buffer("count", torch.tensor(3))
    _, copy = replicas(module, [CPU] * 2)
    sum(p.abs().square().sum() for p in copy.parameters()).backward()

    assert 3 == copy.count.item()
    assert all(torch.allclose(2 * p, p.grad) for p in module.parameters())


def test_without_gradients_copies_have_none():
    with torch.no_grad():
        _, copy = replicas(nn.Linear(2, 2), [CPU] * 2)

    assert not any(p.requires_grad for p in copy.parameters())


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(2, 3, 2, batch_first=True),
        nn.ParameterList([torch.ones(2), torch.zeros(2)]),
        parametrizations.weight_norm(nn.Linear(2, 2)),
        parametrizations.spectral_norm(nn.Linear(2, 2)).eval(),
        nn.MultiheadAttention(2, 1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_layers_with_ways_of_their_own(module):
    def run(module):
        if isinstance(module, nn.ParameterList):
            return sum(p.sum() for p in module)
        x = torch.linspace(0, 1, 12).view(2, 3, 2)
        out = module(*[x] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    def gradients(replica):
        module.zero_grad()
        run(replica).backward()
        return [p.grad.clone() for p in module.parameters()]

    first, second = replicas(module, [CPU] * 2)

    assert all(torch.allclose(*pair) for pair in zip(gradients(first), gradients(second), strict=True))


def test_what_a_forward_changes_in_a_copy_is_not_the_modules():
    module = Holder()
    _, copy = replicas(module, [CPU] * 2)
    copy(torch.randn(4, 2))

    assert 0 == module.second.num_batches_tracked.item()
    assert 1 == copy.second.num_batches_tracked.item()


def test_what_is_changed_in_place_in_a_copy_is_not_what_another_layer_has_saved():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            out = self.frozen(self.first(x))
            self.steps += 1
            return out

    def gradient(replica):
        module.zero_grad()
        replica(torch.ones(3, 2)).sum().backward()
        return module.first.weight.grad.clone()

    module = Counts()
    first, second = replicas(module, [CPU] * 2)

    assert torch.allclose(gradient(first), gradient(second))
    assert second.steps is not module.steps


def test_a_copys_parameters_may_be_changed_in_place():
    module = nn.Embedding(4, 2, max_norm=0.1)
    _, copy = replicas(module, [CPU] * 2)
    copy(torch.arange(4)).sum().backward()

    assert (copy.weight.detach().norm(dim=1) < 0.11).all()
    assert torch.equal(torch.ones(4, 2), module.weight.grad)


def test_lists_and_other_containers_are_the_copys_own():
    module = nn.Linear(2, 2)
    module.list, module.queue, module.by_name, module.seen = [module.weight], deque([1]), defaultdict(list, weight=module.weight), {1}
    _, copy = replicas(module, [CPU] * 2)
    copy.queue.append(2)
    copy.seen.add(2)
    copy.list.append(2)

    assert copy.list[0] is copy.by_name["weight"] is copy.weight
    assert (1, deque([1]), {1}) == (len(module.list), module.queue, module.seen)


def test_a_copy_goes_when_its_last_name_does():
    module = Holder()
    gone = weakref.ref(replicas(module, [CPU] * 2)[1])

    assert gone() is None
