"""A script's use of a sharded model: it sees whole numbers, and its writes are kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parwrap
from parwrap.errors import RankMismatchError, UsageError

pytestmark = pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")


def looked_at(model):
    weight, x = model[0].weight, torch.arange(6.0).view(2, 3)
    out = model(x)
    penalty = 0.01 * sum(p.square().sum() for p in model.parameters())
    (out.square().mean() + penalty).backward()
    seen = [repr(weight), f"{weight.norm():.4f}", str(model), type(model).__name__, weight.sum().item() > weight.max().item()]
    seen += [weight.detach().numpy().tolist(), weight.data.tolist(), [weight[0], *weight][0].tolist(), len(weight), weight.shape]
    seen += [sum(p.numel() for p in model.parameters()), isinstance(weight, nn.Parameter), float(weight.grad.abs().max())]
    seen += [torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), model.forward(x).tolist(), model[0](x).tolist()]
    seen += [nn.utils.parameters_to_vector(model.parameters()).tolist(), F.linear(x, weight).tolist(), copy.deepcopy(weight).tolist()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    seen += [type(norm), float(norm), float(nn.utils.clip_grad_norm_(model.parameters(), 9, norm_type=torch.inf))]
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    seen += [weight.grad.tolist(), [p.grad.norm().item() for p in model.parameters()], float(nn.utils.get_total_norm([weight.grad]))]
    with torch.no_grad():
        weight.data = weight.data * 2
        weight[0, 0] = 5
        model[0].bias.copy_(torch.tensor([1.0, 2, 3]))
        model[2].weight += torch.ones(1, 3)
        weight.mul_(torch.full((3, 3), 0.5)).clamp_(max=1.5)
    weight.grad = torch.ones(3, 3)
    return [*seen, weight.tolist(), weight.grad.tolist(), model(x).tolist()]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.mark.ranks(2)
def test_a_script_sees_whole_numbers_wherever_it_looks():
    expected = looked_at(build())
    with parwrap.distributed(strategy="fsdp"):
        model = build()
        held = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = looked_at(model)

        with torch.no_grad():
            nn.init.normal_(model[0].weight)
            model[0].bias.uniform_().add_(torch.rand_like(model[0].bias))
        drawn = [*model[0].weight.flatten().tolist(), *model[0].bias.tolist()]

        assert len(drawn) == len(set(drawn))
        assert held is model[0].weight is optimizer.param_groups[0]["params"][0]
        assert 3 * [3 * [1.0]] == held.grad.tolist()
    for one, other in zip(expected, seen, strict=True):
        if isinstance(one, (str, type, bool)):
            assert one == other
        else:
            torch.testing.assert_close(torch.tensor(other), torch.tensor(one), atol=1e-6, rtol=1e-6)


WRITES = {
    "row": lambda weight: weight[0].zero_(),
    "its data": lambda weight: weight[1].data.zero_(),
    "slice of a view": lambda weight: weight.view(-1)[3:9].zero_(),
    "rows": lambda weight: [row.mul_(2) for row in weight],
    "chunks": lambda weight: [part.mul_(2) for part in weight.chunk(2)],
    "transposed": lambda weight: weight.t().add_(1.0),
}


@pytest.mark.ranks(2)
def test_what_is_written_to_a_slice_or_view_is_refused_and_not_lost():
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    with parwrap.distributed(strategy="fsdp"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4))
        weight = model.weight.data
        for write in WRITES.values():
            with pytest.raises(UsageError, match=r"test_fsdp_tensors.py:\d+ .*would be lost, because its target is a copy\. Assign to an"):
                write(weight)
        for tensor in (weight, plain.weight.data):
            tensor[0] = 7.0
            tensor[:, 1] = 3.0
        assert optimizer
    assert torch.equal(plain.weight.data, model.weight.data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gradients", "noise"])
def test_values_that_differ_between_ranks_are_refused(kind):
    @parwrap.distributed(strategy="fsdp")
    def train():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        if kind == "gradients":
            model.weight.grad = torch.full((2, 2), float(parwrap.rank()))
        else:
            model.weight.data.add_(torch.full((2, 2), float(parwrap.rank())))
        optimizer.step()

    with pytest.raises(RankMismatchError, match=r"test_fsdp_tensors.py:\d+ gives a sharded tensor of shape \(2, 2\) values that differ"):
        train()


@pytest.mark.ranks(2)
def test_gradients_of_a_backward_may_be_replaced_and_used_twice():
    @parwrap.distributed(strategy="fsdp")
    def train():
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2) + parwrap.rank()).sum().backward()
            for p in model.parameters():
                p.grad = p.grad / 2
            optimizer.step()
            optimizer.step()
        return model.state_dict()["bias"].tolist()

    torch.manual_seed(0)

    assert pytest.approx((nn.Linear(2, 2).bias - 0.3).tolist()) == train()
