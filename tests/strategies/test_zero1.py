"""Sharded optimizers: the weights and states of DDP, with a part of the memory."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import parwrap
from parwrap.strategies.zero1.state_partition import dealt_out
from sharded_steps import DATA, Renamed, alike, model_of, train

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "subclass": lambda parameters: Renamed(parameters, 0.01),
    "groups": lambda parameters: torch.optim.AdamW([{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(parameters)]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_state_and_options_are_those_of_ddp_bit_for_bit(name):
    trained = {}
    for strategy in ("ddp", "zero1"):
        with parwrap.distributed(strategy=strategy, seed=3):
            model, optimizer = train(OPTIMIZERS[name], clip=0.5)
            trained[strategy] = model, copy.deepcopy(optimizer.state_dict())
    (by_ddp, state), (by_zero1, sharded) = trained["ddp"], trained["zero1"]

    assert alike(by_ddp, by_zero1)
    assert state["param_groups"] == sharded["param_groups"]
    assert state["state"].keys() == sharded["state"].keys()
    for place, expected in state["state"].items():
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(sharded["state"][place][key]))


@pytest.mark.ranks(2)
def test_weights_are_those_of_torchs_own_zero_redundancy_optimizer():
    with parwrap.distributed(strategy="zero1", seed=3):
        ours, _ = train(OPTIMIZERS["adam"], epochs=1, schedule=False)
    reference = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(reference.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    sampler = DistributedSampler(DATA, seed=0)
    for x, y in DataLoader(DATA, batch_size=2, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        optimizer.step()

    for p, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.ranks(2)
def test_each_rank_holds_the_state_of_its_shard_while_it_trains_and_of_all_when_the_function_has_returned():
    with parwrap.distributed(strategy="zero1"):
        model, optimizer = train(OPTIMIZERS["adam"], epochs=1)
        here = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        total = sum(p.numel() for p in model.parameters())
        assert [total] == [sum(parwrap.gather(here))]
        assert here < 0.6 * total
        dead = weakref.ref(train(OPTIMIZERS["adam"], epochs=1, schedule=False)[1])
        assert dead() is not None
        train(OPTIMIZERS["adam"], epochs=1, schedule=False)
        gc.collect()
        assert dead() is None
    assert total == sum(state["exp_avg"].numel() for state in optimizer.state.values())


@pytest.mark.ranks(2)
def test_a_checkpoint_of_ddp_is_gone_on_from_and_the_other_way_round():
    def continued(strategies):
        model, state = model_of(), None
        for strategy in strategies:
            with parwrap.distributed(strategy=strategy, seed=5):

                def resumed(parameters, state=state):
                    optimizer = torch.optim.Adam(parameters, lr=0.01)
                    if state:
                        optimizer.load_state_dict(state)
                    return optimizer

                model, optimizer = train(resumed, epochs=1, model=model, schedule=False)
                state = copy.deepcopy(optimizer.state_dict())
        return model

    expected = continued(["ddp", "ddp"])

    assert alike(expected, continued(["zero1", "ddp"]))
    assert alike(expected, continued(["ddp", "zero1"]))


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_hands_its_shard_on_to_those_who_train_on():
    """Ranks whose gradient is the same: that one leaves changes nothing but who holds the state."""

    def steps(ranks_that_leave, strategy):
        with parwrap.distributed(strategy=strategy):
            model = model_of()[:3]
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(6):
                if parwrap.rank() in ranks_that_leave.get(step, ()):
                    break
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
            del optimizer
        return model

    expected = steps({}, "ddp")
    for leaving in ({2: [1]}, {1: [0], 3: [2]}):
        assert alike(expected, steps(leaving, "zero1"))


@pytest.mark.ranks(2)
def test_a_closure_and_accumulation_and_amp_and_several_optimizers_are_as_with_ddp():
    def by_closure():
        model = model_of()[:3]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, _ in DataLoader(DATA, batch_size=2):

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        return model

    def adversarial():
        models = model_of()[:3], model_of(1)[:3]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
        for x, _ in DataLoader(DATA, batch_size=4):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                (models[0](x) - models[1](x)).square().sum().backward(inputs=list(model.parameters()))
                optimizer.step()
        return nn.ModuleList(models)

    def plain():
        return train(OPTIMIZERS["adam"])[0]

    ways = [by_closure, adversarial, plain, parwrap.accumulate(3)(plain), parwrap.amp(dtype="bf16")(plain)]
    ways += [parwrap.amp(level="O2", init_scale=2.0**40)(plain)]
    for way in ways:
        by_ddp, by_zero1 = (parwrap.distributed(strategy=strategy, seed=2)(way)() for strategy in ("ddp", "zero1"))
        assert alike(by_ddp, by_zero1), way


@pytest.mark.ranks(2)
def test_a_window_of_batches_is_one_step(monkeypatch):
    sent = []
    broadcast = dist.broadcast
    monkeypatch.setattr(dist, "broadcast", lambda *args: (sent.append(args), broadcast(*args)))
    parwrap.distributed(strategy="zero1")(parwrap.accumulate(3)(train))(OPTIMIZERS["adam"], epochs=1)
    owners, windows = 2, 2

    assert owners * windows == len(sent)


@pytest.mark.ranks(2)
def test_an_optimizer_that_was_built_before_is_held_in_shards_and_whole_again_afterwards():
    def continued(strategy):
        model, optimizer = train(OPTIMIZERS["adam"], epochs=1, schedule=False)
        with parwrap.distributed(strategy=strategy, seed=1):
            train(lambda parameters: optimizer, epochs=1, model=model, schedule=False)
        nn.functional.mse_loss(model(DATA.tensors[0]), DATA.tensors[1]).backward()
        optimizer.step()
        return model

    assert alike(continued("ddp"), continued("zero1"))


@pytest.mark.parametrize(("sizes", "ranks"), [([], 2), ([5], 3), ([3, 1, 4, 1, 5, 9, 2, 6], 3), ([10, 10], 2)])
def test_parameters_are_dealt_out_as_torch_does(sizes, ranks):
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    theirs = object.__new__(ZeroRedundancyOptimizer)
    theirs.world_size, theirs.param_groups, theirs._partition_parameters_cache = ranks, [{"params": parameters}], []
    rank_of = {id(p): rank for rank, groups in enumerate(theirs._partition_parameters()) for p in groups[0]["params"]}

    assert [rank_of[id(p)] for p in parameters] == dealt_out(sizes, [0] * ranks)


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_with_an_open_window_of_batches_and_one_that_saves_meanwhile_end_as_with_ddp():
    def steps(strategy):
        with parwrap.distributed(strategy=strategy), parwrap.accumulate(2):
            model = model_of()[:3]
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(9):
                if step == 3 + 2 * parwrap.rank():
                    break
                optimizer.zero_grad()
                model(torch.ones(2, 4) * step).square().sum().backward()
                optimizer.step()
                if parwrap.rank() == 2 and step == 6:
                    optimizer.state_dict()
        return model

    assert alike(steps("ddp"), steps("zero1"))


@pytest.mark.ranks(2)
def test_weights_that_differ_in_the_end_are_rank_zeros_with_a_warning():
    def different():
        model = model_of()[:3]
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.add_(parwrap.rank())
        return model, optimizer

    with pytest.warns(UserWarning, match="Rank 0's values are used"):
        model, optimizer = parwrap.distributed(strategy="zero1")(different)()
    weights = parwrap.gather(model[0].weight)

    assert torch.equal(*weights)
    assert 4 == len(optimizer.state)


@pytest.mark.ranks(2)
def test_hooks_of_the_script_after_a_step_see_the_weights_of_all_ranks():
    averaged = {}
    for strategy in ("ddp", "zero1"):
        with parwrap.distributed(strategy=strategy, seed=3):
            torch.manual_seed(0)
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            average = [p.detach().clone() for p in model.parameters()]

            def follow(*_, model=model, average=average):
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(p.detach(), 0.5)

            optimizer.register_step_post_hook(follow)
            for x, y in DataLoader(DATA, batch_size=2):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        averaged[strategy] = average
        assert 1 == len(optimizer._optimizer_step_post_hooks)

    assert all(torch.equal(one, other) for one, other in zip(averaged["ddp"], averaged["zero1"], strict=True))
