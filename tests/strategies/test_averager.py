"""One set of parameters, averaged by torch's DDP: what its buckets hold, and which sets there are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parwrap
from parwrap.errors import UsageError
from parwrap.loop import losses
from parwrap.ranks.group import current
from parwrap.strategies import ddp_sites
from parwrap.strategies.ddp_averager import GradientAverager, _send


@pytest.mark.ranks(2)
def test_parameters_on_different_kinds_of_devices_are_an_error():
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"))]
    text = (
        r"the backward at test_averager.py:\d+ leaves gradients on cpu and meta, but torch's DistributedDataParallel averages gradients on "
        r"one kind of device only. Move the whole model to one device: model.to\('cuda'\)."
    )
    with pytest.raises(UsageError, match=text):
        GradientAverager(current(), 1, parameters, frozenset(), lambda: None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_a_model_in_half_precision_is_averaged_in_full_precision(dtype):
    with parwrap.distributed():
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        torch.optim.SGD([weight], lr=0.0)
        loss = (weight.float() * (1000.25 + parwrap.rank())).sum()
        loss.backward()

    assert 1000.75 == loss.item()


@pytest.mark.ranks(2)
def test_a_sparse_gradient_of_one_rank_is_averaged_and_one_of_none_stays_none():
    with parwrap.distributed():
        tables = nn.ModuleList(nn.Embedding(3, 1, sparse=True) for _ in range(3))
        optimizer = torch.optim.SGD(tables.parameters(), lr=0.0)
        grads = []
        for used in ([0, 1], [parwrap.rank()], [0]):
            optimizer.zero_grad()
            sum(tables[each](torch.tensor([1 + parwrap.rank()])).sum() for each in used).backward()
            grads.append([None if each.weight.grad is None else each.weight.grad.to_dense().flatten().tolist() for each in tables])

    assert [[[0, 0.5, 0.5]] * 2 + [None], [[0, 0.5, 0], [0, 0, 0.5], None], [[0, 0.5, 0.5], None, None]] == grads


@pytest.mark.ranks(3)
def test_dense_gradients_beside_sparse_ones_are_rounded_as_by_ddp():
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(parwrap.rank()))
    models = [DistributedDataParallel(copy.deepcopy(model)) for _ in range(2)]
    models[1].register_comm_hook(None, _send)
    for each in models:
        each(x).square().mean().backward()
    expected, actual = ([p.grad for p in each.parameters()] for each in models)

    assert all(map(torch.equal, expected, actual))


def buckets(monkeypatch, run):
    """The sizes in bytes of the buckets of each set, as DDP is told of them, and the sets of all backwards."""
    options, sets = [], []
    init, average = DistributedDataParallel.__init__, GradientAverager.run

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        options.append((self.bucket_bytes_cap_default, self.bucket_bytes_cap, self.gradient_as_bucket_view))

    monkeypatch.setattr(DistributedDataParallel, "__init__", noted)
    monkeypatch.setattr(GradientAverager, "run", lambda self, *args: (sets.append(self.parameters), average(self, *args))[1])
    run()
    return options, sets


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (True, 25 * 2**20, False)),
        ({"bucket_cap_mb": 0.5}, (False, 2**19, False)),
        ({"gradient_as_bucket_view": True}, (True, 25 * 2**20, True)),
    ],
)
def test_buckets_are_ddps_unless_the_script_says_so(monkeypatch, options, expected):
    """Without a size DDP makes the first bucket small, to begin early."""

    def run():
        model = nn.Linear(2, 2)
        torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()

    seen, _ = buckets(monkeypatch, parwrap.distributed(**options)(run))

    assert [expected] == seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("last", ["first", "second"])
def test_a_parameter_belongs_to_the_optimizer_that_was_built_last(monkeypatch, last):
    shared, beside = nn.Parameter(torch.ones(1)), {name: nn.Parameter(torch.ones(1)) for name in ("first", "second")}

    def run():
        held = [torch.optim.SGD([shared, beside[name]], lr=0.1) for name in sorted(beside, key=lambda name: name == last)]
        shared.sum().backward()
        return held

    _, sets = buckets(monkeypatch, parwrap.distributed(run))

    assert [{id(shared), id(beside[last])}] == [set(map(id, each)) for each in sets]


@pytest.mark.ranks(2)
def test_a_backward_averages_what_its_optimizers_own_and_the_parameters_that_none_owns(monkeypatch):
    owned, beside, other, free = (nn.Parameter(torch.ones(1)) for _ in range(4))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def run():
        held = torch.optim.SGD([owned, beside, frozen], lr=0.1), torch.optim.SGD([other], lr=0.1)
        (owned + free).sum().backward()
        return held

    _, sets = buckets(monkeypatch, parwrap.distributed(run))

    assert [{id(owned), id(beside), id(free)}] == [set(map(id, each)) for each in sets]


@pytest.mark.ranks(2)
def test_parameters_that_are_never_used_keep_none_without_a_walk_over_the_graph(monkeypatch):
    walks = []
    nodes = losses._nodes
    monkeypatch.setattr(losses, "_nodes", lambda *args, **kwargs: walks.append(1) or nodes(*args, **kwargs))
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(180))  # torch names the first hundred parameters that are left out
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with parwrap.distributed():
        for step in range(4):
            optimizer.zero_grad()
            before = len(walks)
            model[parwrap.rank() * 2](torch.ones(1, 2)).sum().backward()
            assert len(walks) == before or step == 0
            assert [0, 2] == [number for number, each in enumerate(model) if each.weight.grad is not None]
            assert model[0].weight.grad.tolist() == model[2].weight.grad.tolist() == [[0.5, 0.5]] * 2
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("view", [False, True])
def test_buckets_need_the_memory_of_the_gradients_unless_these_are_views(monkeypatch, view):
    """docs/gpus.rst has these numbers."""
    held, signals = {}, []

    def noting(signal):
        signals.append(signal)

        def hook(state, bucket):
            storage = bucket.buffer().untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return _send(state, bucket)

        return hook

    monkeypatch.setattr(ddp_sites, "compressing", lambda options: noting)

    @parwrap.distributed(gradient_as_bucket_view=view)
    def gradients():
        model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8)))  # more than a first bucket
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):  # after the first, buckets are made anew
            held.clear()
            optimizer.zero_grad()
            model(torch.ones(1, 300)).sum().backward()
        return [p.grad for p in model.parameters()]

    grads = gradients()
    beside = {*held} - {grad.untyped_storage().data_ptr() for grad in grads}
    assert sum(held.values()) == sum(grad.nbytes for grad in grads) + signals[0].nbytes
    assert sum(held[each] for each in beside) == (0 if view else sum(held.values()))
