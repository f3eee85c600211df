"""A script's use of a sharded model: it sees whole numbers, and its writes are kept."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parwrap
from parwrap.errors import UsageError


@pytest.mark.ranks(2)
def test_a_script_sees_whole_numbers_wherever_it_looks(tmp_path):
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
        seen += [weight.grad.tolist(), [p.grad.norm().item() for p in model.parameters()]]
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

    alone = build()
    expected = looked_at(alone)
    with parwrap.distributed(strategy="fsdp"):
        model = build()
        held = model[0].weight
        torch.optim.SGD(model.parameters(), lr=0.1)
        seen = looked_at(model)

        with torch.no_grad():
            nn.init.normal_(model[0].weight)
            model[0].bias.uniform_().add_(torch.rand_like(model[0].bias))
        drawn = [*model[0].weight.flatten().tolist(), *model[0].bias.tolist()]

        assert len(drawn) == len(set(drawn))
        assert held.grad.tolist() == model[0].weight.grad.tolist() == 3 * [3 * [1.0]]
        assert repr(held) == repr(model[0].weight)
    for one, other in zip(expected, seen, strict=True):
        if isinstance(one, (str, type, bool)):
            assert one == other
        else:
            assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6)
    assert held is model[0].weight


@pytest.mark.ranks(2)
def test_what_is_written_to_a_copy_of_rows_is_refused_and_not_lost():
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    with parwrap.distributed(strategy="fsdp"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight, expected = model.weight.data, plain.weight.data
        for write in (
            lambda: weight[0].zero_(),
            lambda: weight[1].data.zero_(),
            lambda: weight.view(-1)[3:9].zero_(),
            lambda: [row.mul_(2) for row in weight],
            lambda: [part.mul_(2) for part in weight.chunk(2)],
        ):
            with pytest.raises(UsageError, match=r"would be lost, because its target is a copy\. Assign to an index of the tensor itself"):
                write()
        for tensor in (weight, expected):
            tensor[0] = 7.0
            tensor[:, 1].fill_(3.0)
            tensor.t().add_(1.0)
        assert optimizer
    assert torch.equal(expected, model.weight.data)
