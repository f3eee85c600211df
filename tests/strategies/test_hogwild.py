"""Hogwild against what is computed by hand: which rank writes where, who waits for whom, and what is private in the end."""

from __future__ import annotations

import os
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from parwrap.options import Options
from parwrap.ranks.group import Group
from parwrap.ranks.world import World
from parwrap.strategies.hogwild import Hogwild


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zero():
    return nn.Parameter(torch.zeros(1))


# steps


@pytest.mark.ranks(3)
def test_each_rank_writes_only_the_rows_of_its_sparse_gradients():
    with parwrap.distributed(strategy="hogwild"):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(100):
            # of three rows, two are written by this rank alone and one by nobody
            step(optimizer, model(torch.tensor([parwrap.rank(), 3 + parwrap.rank()])[: 1 + (parwrap.rank() < 2)]).sum())

    expected = before - torch.tensor([100.0, 100.0, 100.0, 100.0, 100.0, 0.0])[:, None]
    assert torch.allclose(expected, model.weight, atol=1e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_each_rank_has_the_optimizer_s_state_of_its_own_steps(make):
    def trained(rows):
        torch.manual_seed(0)
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(5):
            step(optimizer, (model(rows) ** 2).sum())
        return model

    halves = [trained(torch.tensor([0, 1])).weight[:2], trained(torch.tensor([2, 3])).weight[2:]]
    together = parwrap.distributed(strategy="hogwild")(lambda: trained(torch.tensor([0, 1]) + 2 * parwrap.rank()))()

    assert torch.allclose(torch.cat(halves), together.weight)


@pytest.mark.ranks(2)
def test_a_rank_reads_at_once_what_another_has_stepped():
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
def test_the_sum_of_all_steps_is_exact_with_the_lock():
    with parwrap.distributed(strategy="hogwild", lock=True):
        weight = nn.Parameter(torch.zeros(50_000))
        optimizer = ReadsYieldsWrites([weight])
        for _ in range(300):
            step(optimizer, weight.sum())

    assert [-600.0] == weight.unique().tolist()


class ReadsMeetsWrites(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            stepped = p - p.grad
            dist.barrier()  # with a lock, the other rank would not get here
            p.copy_(stepped)
            dist.barrier()


@pytest.mark.ranks(2)
def test_ranks_step_at_the_same_time_without_the_lock():
    with parwrap.distributed(strategy="hogwild"):
        weight = nn.Parameter(torch.zeros(5))
        optimizer = ReadsMeetsWrites([weight])
        for _ in range(10):
            step(optimizer, weight.sum())

    assert [-10.0] == weight.unique().tolist()  # of two steps at a time, one is lost


class Twice(torch.optim.SGD):
    """Another optimizer steps inside its own step, which calls that of its base too."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.inner = torch.optim.SGD(parameters, lr)

    def step(self, closure=None):
        super().step(closure)
        self.inner.step()


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError


@pytest.mark.ranks(2)
def test_steps_inside_steps_lock_once_and_a_step_that_fails_keeps_no_lock_where_ranks_meet():
    with parwrap.distributed(strategy="hogwild", lock=True):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        twice, fails = Twice(list(model.parameters()), 1.0), Fails(model.parameters(), 1.0)
        for _ in range(3):
            model.weight.sum().backward()
            twice.step()
            twice.zero_grad()
            with pytest.raises(ArithmeticError):
                fails.step()
            model.eval()  # which the other rank would not reach, were the lock held
            model.train()

    assert -12.0 == model.weight.item()


@pytest.mark.ranks(2)
def test_closures_train_under_the_lock():
    @parwrap.distributed(strategy="hogwild", lock=True)
    def train():
        weight = zero()
        optimizer = torch.optim.SGD([weight], lr=1.0)

        def closure():
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            return loss

        for _ in DataLoader(TensorDataset(torch.arange(10)), batch_size=1):
            optimizer.step(closure)
        return weight

    assert -10.0 == train().item()


class Assigns(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - p.grad


@pytest.mark.ranks(2)
def test_a_step_that_gives_a_parameter_another_tensor_reaches_all_ranks():
    with parwrap.distributed(strategy="hogwild", lock=True):
        weight = zero()
        optimizer = Assigns([weight])
        for _ in range(10):
            step(optimizer, weight.sum())

    assert -20.0 == weight.item()


@pytest.mark.ranks(2)
def test_each_rank_accumulates_over_its_own_batches():
    with parwrap.distributed(strategy="hogwild", lock=True), parwrap.accumulate(2):
        weight = zero()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=1):
            step(optimizer, weight.sum() * x.sum())

    # rank 0 has 0, 2, 4, 6 and rank 1 has 1, 3, 5, 7: two means of two each
    assert -(1 + 5 + 2 + 6) == weight.item()


def test_one_rank_trains_as_plain_code_does():
    def train():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        for (x,) in DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2, shuffle=True):
            step(optimizer, model(x).square().mean())
        return model.weight

    assert torch.equal(train(), parwrap.distributed(strategy="hogwild")(train)())


@pytest.mark.ranks(2)
def test_it_learns_a_sparse_linear_model_as_well_as_one_process():
    """Rows of 4 of 200 features: ranks rarely touch the same weights, the case of the paper."""
    draws = torch.Generator().manual_seed(0)
    truth = torch.randn(200, generator=draws)
    rows = torch.randint(200, (600, 4), generator=draws)
    data = TensorDataset(rows, truth[rows].sum(1))

    def train():
        torch.manual_seed(0)
        model = nn.EmbeddingBag(200, 1, mode="sum", sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(12):
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                step(optimizer, (model(x).squeeze(1) - y).square().sum() / 2)
        with torch.no_grad():
            return (model(rows).squeeze(1) - data.tensors[1]).square().mean().item()

    alone, together = train(), parwrap.distributed(strategy="hogwild")(train)()

    assert alone < 0.02
    assert together < 0.02


# where ranks meet


@pytest.mark.ranks(3)
def test_ranks_that_take_different_numbers_of_steps_end_together_with_all_of_them():
    with parwrap.distributed(strategy="hogwild", lock=True):
        weight = zero()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(1 + 20 * parwrap.rank()):
            step(optimizer, weight.sum())

    assert -63.0 == weight.item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["eval", "a whole pass"])
def test_all_ranks_evaluate_the_same_weights_and_buffers_and_no_rank_trains_meanwhile(by):
    held_out = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    with parwrap.distributed(strategy="hogwild"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        for _ in range(3):
            model.train()
            for _ in range(1 + 3 * parwrap.rank()):
                step(optimizer, model(torch.randn(8, 4)).pow(2).mean())
            model.eval()
            if by == "eval":
                seen.append([model[0](torch.ones(2, 4)).sum().item() for _ in range(3 + 100 * parwrap.rank())])
            else:
                with torch.no_grad():
                    seen.append([sum(model(x).sum().item() for (x,) in held_out)])
                    time.sleep(0.02 * parwrap.rank())
                    seen[-1].append(sum(model(x).sum().item() for (x,) in held_out))
        mine, others = parwrap.gather([each[0] for each in seen])

    assert [1] * 3 == [len(set(each)) for each in seen]
    assert mine == others
    assert 3 == len(set(mine))


# what is shared


@pytest.mark.ranks(2)
def test_in_the_end_every_rank_has_parameters_of_its_own_with_tied_ones_tied():
    with parwrap.distributed(strategy="hogwild"):
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
def test_groups_and_tensors_that_come_later_are_shared_too():
    with parwrap.distributed(strategy="hogwild", lock=True):
        model, late = nn.Linear(2, 1, bias=False), zero()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step(optimizer, model.weight.sum())
        parwrap.barrier()
        model.double()
        optimizer.add_param_group({"params": [late]})
        step(optimizer, model.weight.sum() + late.sum())
        parwrap.barrier()
        model.weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(model.weight.detach().clone())
        parwrap.barrier()
        step(optimizer, model.weight.sum())

    assert ([[-6.0, -6.0]], torch.float64, -2.0) == (model.weight.tolist(), model.weight.dtype, late.item())


@pytest.mark.ranks(2)
def test_models_that_were_built_differently_become_rank_0_s_with_a_warning():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, float(parwrap.rank()))
    with parwrap.distributed(strategy="hogwild"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            model(torch.ones(2)).sum().backward()

    del optimizer
    assert [[0.0, 0.0]] == model.weight.tolist()
    assert 1 == sum("the weights of the ranks differ at their first backward" in str(each.message) for each in caught)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sizes", "dtypes", "devices", "error", "text"),
    [
        ((1, 2), ("float32", "float32"), ("cpu", "cpu"), RankMismatchError, r"parameter 0 .* differs: rank 0 has one of shape \(1, 1\)"),
        ((1, 1), ("float32", "float64"), ("cpu", "cpu"), RankMismatchError, r"rank 1 has one of shape \(1, 1\) and torch.float64. Build, "),
        ((1, 1), ("float32", "float32"), ("meta", "meta"), UsageError, r"trained at test_hogwild.py:\d+, because it is on meta, but only"),
    ],
)
def test_what_cannot_be_shared_is_named(sizes, dtypes, devices, error, text):
    rank = parwrap.rank()

    @parwrap.distributed(strategy="hogwild")
    def train():
        model = nn.Linear(sizes[rank], 1, device=devices[rank], dtype=getattr(torch, dtypes[rank]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.weight.sum().backward()
        return optimizer

    with pytest.raises(error, match=text):
        train()


@pytest.mark.ranks(2)
def test_data_that_ranks_have_split_apart_are_an_error_at_the_first_backward():
    @parwrap.distributed(strategy="hogwild")
    def train():
        weight = zero()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for (x,) in DataLoader(TensorDataset(torch.arange(8.0) + parwrap.rank()), batch_size=1):
            step(optimizer, weight.sum() * x.sum())

    with pytest.raises(RankMismatchError, match=r"different numbers at the same places of the dataset in the pass at test_hogwild.py:\d+"):
        train()


# refused


@pytest.mark.ranks(2)
def test_a_backward_without_an_optimizer_is_refused():
    with pytest.raises(UsageError, match=r"test_hogwild.py:\d+ runs a backward before any optimizer is built"):
        parwrap.distributed(strategy="hogwild")(lambda: zero().sum().backward())()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": "global"}, "batch='global' says how ranks share a step, but with strategy='hogwild' each rank steps by itself: remove"),
        ({"lr": "linear"}, "lr='linear' says how ranks share a step"),
        ({"loss": "sum"}, "loss='sum' says how ranks share a step"),
        ({"uneven": "join"}, "uneven='join' says how ranks share a step"),
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
        (World(0, 2, 0, 2), "cuda:0", "shares the memory of the CPU, but this rank trains on cuda:0: set CUDA_VISIBLE_DEVICES to an empty"),
    ],
)
def test_several_nodes_and_gpus_are_refused_before_training(world, device, text):
    loop = SimpleNamespace(modules=SimpleNamespace(first=[]), options=Options, group=Group(world, "gloo", torch.device(device)))
    with pytest.raises(UsageError, match=text):
        Hogwild(loop)


@pytest.mark.ranks(2)
def test_the_loss_and_gradients_are_this_ranks():
    with parwrap.distributed(strategy="hogwild"):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = (weight * (parwrap.rank() + 1)).sum()
            loss.backward()
            seen.append((loss.item(), weight.grad.item()))

    assert [(parwrap.rank() + 1.0, parwrap.rank() + 1.0)] * 2 == seen


@pytest.mark.ranks(2)
def test_steps_in_a_pass_that_every_worker_reads_whole_are_named():
    model = nn.Linear(1, 1)
    with parwrap.distributed(strategy="hogwild"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.ones(8, 1), batch_size=2)
        for x in loader:
            step(optimizer, model(x).square().mean())

        def second_loop():
            for x in loader:
                step(optimizer, model(x).square().mean())

        with pytest.warns(
            UserWarning, match=r"every worker reads everything in the pass at test_hogwild.py:\d+.* parwrap.shard\(loader\)"
        ) as said:
            second_loop()

    assert 1 == len(said)
