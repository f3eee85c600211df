"""Gradients of compiled models arrive while the backward runs, as under DDP's own forward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap

pytestmark = pytest.mark.ranks(2, fresh=True)  # torch changes classes for good when it compiles

WIDTH, DEPTH = 384, 3  # a layer has more than a first bucket of 1 MB
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


class Events(list):
    """For each piece of the compiled backward that has run, the parameters whose gradients have arrived after it."""

    graphs = 0

    def backend(self):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def forward(graph, inputs):
            self.graphs += 1
            return make_boxed_func(graph)

        def backward(graph, inputs):
            def run(*args):
                self.append(set())
                return graph(*args)

            return make_boxed_func(run)

        return aot_autograd(fw_compiler=forward, bw_compiler=backward, inference_compiler=forward)


def compiled_whole(model, backend):
    return torch.compile(model, backend=backend)


def compiled_by_layers(model, backend):
    for layer in model:
        layer.compile(backend=backend)
    return model


def compiled_without_breaks(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


class Layer(nn.Module):
    """A class of the script: ``nn.Sequential`` has no forward that torch compiles by itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x).tanh()).tanh()


class Again(nn.Sequential):
    """Computes its middle again in the backward."""

    def forward(self, x):
        first, *middle, last = self
        return last(checkpoint(nn.Sequential(*middle), first(x), use_reentrant=False))


def train(wrap, events, compiled=compiled_whole, kind=nn.Sequential):
    torch.manual_seed(0)
    model = kind(*(Layer() for _ in range(DEPTH)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events[-1].add(name))
    run, losses = wrap(compiled(model, events.backend())), []
    for (x,) in DataLoader(TensorDataset(X), 2):
        events[:] = [set()]  # before the first piece
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [p.detach() for p in model.parameters()], [each for each in events if each], events.graphs


def averaged(compiled, kind=nn.Sequential, **options):
    torch._dynamo.reset()
    return parwrap.distributed(**options)(train)(lambda model: model, Events(), compiled, kind)


def by_hand(compiled, kind=nn.Sequential, **options):
    """On one and the same batch: here, the moments of gradients count."""
    torch._dynamo.reset()
    return train(lambda model: DistributedDataParallel(model, **options), Events(), compiled, kind)


@pytest.mark.parametrize("kind", [nn.Sequential, Again])
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_by_layers, compiled_without_breaks])
def test_gradients_arrive_as_under_ddp_by_hand(compiled, kind):
    _, expected, pieces = by_hand(compiled, kind)
    weights, events, graphs = averaged(compiled, kind)
    assert (events, graphs) == (expected, pieces)
    if kind is nn.Sequential:
        assert len(events) > 1
        assert 0 < len(events[0]) < 2 * DEPTH  # less than half of the gradients, four a layer
    torch._dynamo.reset()
    plain, *_ = parwrap.distributed(train)(lambda model: model, Events(), lambda model, backend: model, kind)
    torch.testing.assert_close(weights, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "pieces"), [({"strategy": "zero1"}, 2), ({"strategy": "local_sgd", "every": 2}, 1), ({"bucket_cap_mb": 0.5}, 3)]
)
def test_graphs_are_split_where_a_strategy_averages_in_buckets(options, pieces):
    _, events, _ = averaged(compiled_whole, **options)
    assert len(events) == pieces


def test_no_graph_without_a_backward_is_split():
    events = Events()

    @parwrap.distributed
    def evaluate():
        model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
        run = torch.compile(model, backend=events.backend())
        with torch.no_grad():
            run(X)
        with torch.inference_mode():
            run(X + 1)

    evaluate()
    assert events.graphs <= 2


def test_a_graph_of_one_rank_alone_is_whole():
    events = Events()

    @parwrap.distributed
    def look():
        model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
        run = torch.compile(model, backend=events.backend())
        with contextlib.suppress(parwrap.UsageError):
            parwrap.rank_zero_only(run)(X)

    look()
    assert events.graphs <= 1


def test_the_switch_of_torch_leaves_graphs_whole():
    with torch._dynamo.config.patch(optimize_ddp=False):
        _, events, _ = averaged(compiled_whole)
    assert len(events) == 1


def test_ddp_is_as_it_was_after_the_scope():
    def named():
        from torch._dynamo.backends.distributed import DDPOptimizer

        return vars(DistributedDataParallel)["_get_active_ddp_module"], DDPOptimizer.compile_fn, DistributedDataParallel._active_ddp_module

    before = named()
    averaged(compiled_whole)
    assert all(one is other for one, other in zip(before, named(), strict=True))


def test_a_model_that_was_compiled_before_the_scope_opens_is_split_too():
    events = Events([set()])
    model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    run = torch.compile(model, backend=events.backend())

    @parwrap.distributed
    def train():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run(X).sum().backward()
        optimizer.step()

    train()
    assert len(events) == 1 + 2
