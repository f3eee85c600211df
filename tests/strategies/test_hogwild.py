"""Each claim against what is computed by hand: which rank writes where, who waits for whom, and what is private in the end."""

import os
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.group import Group, current
from parwrap.options import Options
from parwrap.strategies.hogwild.hogwild import Hogwild
from parwrap.system.shared_memory import shared_memory
from parwrap.world.world import World


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.ranks(3)
def test_each_rank_writes_only_the_rows_that_its_sparse_gradients_have():
    with parwrap.distributed(strategy="hogwild"):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(100):
            # of three rows, two are written by this rank alone and one by nobody
            step(optimizer, model(torch.tensor([parwrap.rank(), 3 + parwrap.rank()])[: 1 + (parwrap.rank() < 2)]).sum())
    parwrap.barrier()

    expected = before - torch.tensor([100.0, 100.0, 100.0, 100.0, 100.0, 0.0])[:, None]
    assert torch.allclose(expected, model.weight, atol=1e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimizers_with_a_state_have_each_rank_s_own(make):
    def trained(rows):
        torch.manual_seed(0)
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(5):
            step(optimizer, (model(rows) ** 2).sum())
        return model.weight.detach()

    halves = [trained(torch.tensor([0, 1]))[:2], trained(torch.tensor([2, 3]))[2:]]
    with parwrap.distributed(strategy="hogwild"):
        together = trained(torch.tensor([0, 1]) + 2 * parwrap.rank())
        parwrap.barrier()

        assert torch.allclose(torch.cat(halves), together)


@pytest.mark.ranks(2)
def test_what_one_rank_steps_the_other_reads_at_once():
    with parwrap.distributed(strategy="hogwild"):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        nn.init.constant_(model.weight, 8.0)
        model.weight.sum().backward()  # where all ranks share
        for turn in (0, 1, 0):
            parwrap.barrier()
            before = model.weight.item()
            parwrap.barrier()
            if parwrap.rank() == turn:
                optimizer.step()
            parwrap.barrier()
            assert before - 1 == model.weight.item()


class ReadsYieldsWrites(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            stepped = p - p.grad
            os.sched_yield()
            p.copy_(stepped)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lock", [True, False])
def test_no_update_is_lost_under_the_lock_and_some_are_without(lock):
    with parwrap.distributed(strategy="hogwild", lock=lock):
        weight = nn.Parameter(torch.zeros(50_000))
        optimizer = ReadsYieldsWrites([weight])
        for _ in range(300):
            step(optimizer, weight.sum())
    parwrap.barrier()

    assert lock == ([-600.0] == weight.unique().tolist())


@pytest.mark.ranks(2)
def test_the_lock_is_let_go_of_by_steps_in_steps_and_after_one_that_has_failed():
    class Twice(torch.optim.SGD):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr)
            self.inner = torch.optim.SGD(parameters, lr)

        def step(self, closure=None):
            super().step(closure)
            self.inner.step()

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError

    with parwrap.distributed(strategy="hogwild", lock=True):
        parameters = [nn.Parameter(torch.zeros(1))]
        twice, fails = Twice(parameters, 1.0), Fails(parameters, 1.0)
        for _ in range(3):
            parameters[0].sum().backward()
            with pytest.raises(ArithmeticError):
                fails.step()
            parameters[0].grad = torch.ones(1)
            twice.step()
            parwrap.barrier()  # which nobody would reach, were it held

        assert -12.0 == parameters[0].item()


@pytest.mark.ranks(3)
def test_ranks_that_take_different_numbers_of_steps_end_together_with_all_of_them():
    with parwrap.distributed(strategy="hogwild", lock=True):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(1 + 20 * parwrap.rank()):
            step(optimizer, weight.sum())

    assert -63.0 == weight.item()


def patience(seconds):
    group = current()
    group.timeout = group.coordinator.timeout = timedelta(seconds=seconds)
    return group


@pytest.mark.ranks(2)
def test_a_rank_that_trains_on_for_longer_than_the_timeout_is_waited_for():
    patience(0.3)
    with parwrap.distributed(strategy="hogwild"):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        until = time.monotonic() + parwrap.rank()
        step(optimizer, weight.sum())
        while time.monotonic() < until:
            step(optimizer, weight.sum())
    assert weight.item() < -10


@pytest.mark.ranks(2)
def test_a_rank_that_neither_trains_nor_comes_is_waited_for_no_longer():
    group = patience(0.2)
    with parwrap.distributed(strategy="hogwild"):
        model = nn.Linear(1, 1)
        step(torch.optim.SGD(model.parameters(), lr=0.1), model(torch.ones(1)).sum())
        if parwrap.rank() == 0:
            with pytest.raises(
                RankMismatchError, match=r"rank 0 timed out after waiting 0.2 s for the other ranks to reach the same point \(evaluation"
            ):
                model.eval()
            group.store.set("raised", b"")
        group.store.wait(["raised"], timedelta(seconds=30))


@pytest.mark.ranks(2)
def test_ranks_evaluate_one_model_that_nobody_trains_meanwhile():
    with parwrap.distributed(strategy="hogwild"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        for _ in range(5):
            model.train()
            for _ in range(1 + 3 * parwrap.rank()):
                step(optimizer, model(torch.randn(8, 4)).pow(2).mean())
            model.eval()
            seen.append([model(torch.ones(2, 4)).sum().item() for _ in range(3 + 100 * parwrap.rank())])

    assert [1] * 5 == [len(set(each)) for each in seen]
    mine, others = parwrap.gather([each[0] for each in seen])
    assert mine == others
    assert 5 == len(set(mine))


@pytest.mark.ranks(2)
def test_every_rank_has_parameters_of_its_own_again_with_tied_ones_tied():
    with parwrap.distributed(strategy="hogwild"):
        torch.manual_seed(0)
        flat = torch.zeros(10)
        views = [nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[4:])]
        untrained = nn.Parameter(torch.zeros(0))
        optimizer = torch.optim.SGD([*views, untrained], lr=1.0)
        (views[0].sum() + 0 * views[1].sum()).backward()
        if parwrap.rank() == 0:
            optimizer.step()
    views[0].data += parwrap.rank()
    parwrap.barrier()

    expected = torch.tensor([-1.0] * 6 + [0.0] * 4) + torch.tensor([1.0] * 6 + [0.0] * 4) * parwrap.rank()
    assert expected[:6].tolist() == views[0].flatten().tolist()
    assert expected[4:].tolist() == views[1].tolist()


@pytest.mark.ranks(2)
def test_what_an_optimizer_gets_later_and_a_model_that_was_cast_are_shared_too():
    with parwrap.distributed(strategy="hogwild", lock=True):
        model, late = nn.Linear(2, 1, bias=False), nn.Parameter(torch.zeros(1))
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step(optimizer, model.weight.sum())
        parwrap.barrier()
        model.double()
        optimizer.add_param_group({"params": [late]})
        step(optimizer, model.weight.sum() + late.sum())
    parwrap.barrier()

    assert [[-4.0, -4.0]] == model.weight.tolist()
    assert torch.float64 == model.weight.dtype
    assert -2.0 == late.item()


@pytest.mark.ranks(2)
def test_each_rank_accumulates_and_means_over_its_own_batches():
    with parwrap.distributed(strategy="hogwild", lock=True), parwrap.accumulate(2):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1):
            step(optimizer, parwrap.mean_over_ranks(weight.sum() * x.sum(), 1))

    # rank 0 has 0, 2, 4, 6 and rank 1 has 1, 3, 5, 7: two means of two each
    assert -(1 + 5 + 2 + 6) == weight.item()


@pytest.mark.ranks(2)
def test_models_that_were_built_differently_become_rank_0_s_with_a_warning():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, float(parwrap.rank()))
    with parwrap.distributed(strategy="hogwild"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(2)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(2)).sum().backward()

    del optimizer
    assert [[0.0, 0.0]] == model.weight.tolist()
    texts = [str(each.message) for each in caught if "parwrap" in str(each.message)]
    assert texts == (
        [
            "parwrap: 1 of 2 parameters have different values on different ranks; rank 0's are used. Set the seed before you build the "
            "model, or build it inside the decorated function."
        ]
        if parwrap.rank() == 0
        else []
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sizes", "dtypes", "devices", "error", "text"),
    [
        (
            (1, 2),
            ("float32", "float32"),
            ("cpu", "cpu"),
            RankMismatchError,
            r"r 0 of optimizer 0 differs: rank 0 has one of shape \(1, 1\)",
        ),
        ((1, 1), ("float32", "float64"), ("cpu", "cpu"), RankMismatchError, r"rank 1 has one of shape \(1, 1\) and torch.float64. Build, "),
        ((1, 1), ("float32", "float32"), ("meta", "meta"), UsageError, "it is on meta, but only CPU memory is shared: keep the "),
    ],
)
def test_what_cannot_be_shared_is_named(sizes, dtypes, devices, error, text):
    rank = parwrap.rank()
    with parwrap.distributed(strategy="hogwild"):
        model = nn.Linear(sizes[rank], 1, device=devices[rank], dtype=getattr(torch, dtypes[rank]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(error, match=text):
            model.weight.sum().backward()
    del optimizer


@pytest.mark.ranks(2)
def test_a_backward_without_an_optimizer_is_refused():
    with parwrap.distributed(strategy="hogwild"):
        loss = nn.Linear(1, 1)(torch.ones(1)).sum()
        with pytest.raises(
            UsageError, match=r"shares the parameters of optimizers, but there is none at the backward pass at .*test_hogwild.py"
        ):
            loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:parwrap. BatchNorm")
def test_batch_norm_has_no_batch_to_share_and_is_not_advised_to():
    refused = pytest.raises(UsageError, match=r"sync_bn needs a shared batch: .* every rank trains on separate batches")
    with parwrap.distributed(strategy="hogwild"):
        with refused, parwrap.sync_bn():
            pass
        model = nn.BatchNorm1d(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2):
            step(optimizer, model(x).sum())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"batch": "global"},
            "batch='global' says how ranks share a step, but with strategy='hogwild' each rank steps on its own: remove one",
        ),
        ({"lr": "linear"}, "lr='linear' says how ranks share a step"),
        ({"loss": "sum"}, "loss='sum' says how ranks share a step"),
        ({"uneven": "join"}, "uneven='join' weights ranks by their samples in a shared step, .* choose 'pad' or 'drop'."),
        ({"bucket_cap_mb": 5}, "bucket_cap_mb=5 has no effect with strategy='hogwild'"),
        ({"strategy": "ddp", "lock": True}, "lock=True has no effect with strategy='ddp': remove it, or choose .* 'hogwild'"),
        ({"lock": 1}, "lock=1 is neither True nor False"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "hogwild", **options})


@pytest.mark.parametrize(
    ("world", "device", "text"),
    [
        (World(0, 4, 0, 2), "cpu", "shares the memory of one node, but the 4 ranks are on several nodes: start them on one"),
        (World(0, 2, 0, 2), "cuda:0", "shares CPU memory, but this rank trains on cuda:0: set CUDA_VISIBLE_DEVICES to an empty value"),
    ],
)
def test_nodes_and_gpus_are_refused_before_training(world, device, text):
    group = Group(world, "gloo", torch.device(device), store=None, timeout=timedelta(1), coordinator=None)
    with pytest.raises(UsageError, match=text):
        Hogwild.joining(group, Options(strategy="hogwild"))


@pytest.mark.ranks(2)
def test_memory_is_shared_without_a_file_that_could_be_left():
    before = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    memory = shared_memory(dist.PrefixStore("test", current().store), parwrap.rank(), [1, 0], 8)
    memory[parwrap.rank()] = 5 + parwrap.rank()
    parwrap.barrier()

    assert [5, 6] == list(memory[:2])
    assert before == (os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else [])
