"""Ranks that leave the training loop before the others, and the state that they get from these."""

import warnings
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parwrap
from parwrap.coordination import status_board
from parwrap.coordination.sync_points import Coordinator
from parwrap.group.group import current


@pytest.mark.ranks(2)
def test_a_regular_run_has_no_collectives_and_waits_beside_its_backwards():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    counted = []
    with pytest.MonkeyPatch.context() as patched, parwrap.distributed():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            if step == 3:
                for owner, name in [
                    (Coordinator, "wait"),
                    (dist, "all_reduce"),
                    (dist, "broadcast"),
                    (dist, "all_gather_object"),
                    (dist, "barrier"),
                ]:
                    patched.setattr(owner, name, lambda *args, name=name, **options: counted.append(name))
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        patched.undo()

    assert [] == counted


@pytest.mark.ranks(3)
def test_a_rank_that_ends_early_answers_and_takes_the_weights_of_the_others():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    steps = {0: 2, 1: 5, 2: 4}[parwrap.rank()]

    @parwrap.distributed
    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(steps):
            optimizer.zero_grad()
            (-(parwrap.rank() + 1.0) * model.weight).sum().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train()

    # two steps of all, two of ranks 1 and 2, one of rank 1 alone: each the mean of those that contribute
    assert model.weight.item() == pytest.approx(2 * 2.0 + 2 * 2.5 + 2.0)
    if parwrap.rank() == 0:
        assert 1 == len([each for each in said if "rank 0 is at the end of its script or function" in str(each.message)])


@pytest.mark.ranks(3)
def test_a_rank_that_has_ended_answers_what_the_others_do_for_the_first_time():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    nn.init.zeros_(model[0].weight)

    @parwrap.distributed
    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        (-1.0 * model[0].weight).sum().backward()
        optimizer.step()
        if parwrap.rank() == 0:
            return
        optimizer.zero_grad()
        (-2.0 * parwrap.rank() * model[0].weight).sum().backward()
        optimizer.step()
        model[1].running_mean.fill_(parwrap.rank())
        model.eval()
        scheduler.step(parwrap.rank())
        scheduler.step(4 - parwrap.rank())
        assert optimizer.param_groups[0]["lr"] == 0.5  # by the means 1.5 and 2.5; on rank 2 alone it would have stayed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train()

    assert [1 + 3, 1] == [model[0].weight.item(), model[1].running_mean.item()]


@pytest.mark.ranks(2)
def test_optimizer_scheduler_buffers_and_kept_gradients_are_taken_over():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    @parwrap.distributed
    def train():
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2 if parwrap.rank() else 4):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().sum().backward()
            optimizer.step()
            scheduler.step()
        model.eval()  # a sync point: who comes first answers the other's backwards
        return optimizer.state_dict(), scheduler.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer, scheduler = train()
    mine = {"weights": model.state_dict(), "moments": optimizer["state"], "lr": optimizer["param_groups"][0]["lr"]}
    mine |= {"scheduler": scheduler["last_epoch"], "gradients": [p.grad for p in model.parameters()]}
    first, second = parwrap.gather(mine)

    assert str(first) == str(second)
    assert (4, 0.1 / 16) == (first["scheduler"], first["lr"])


@pytest.mark.ranks(2, timeout=40)
def test_ranks_on_different_nodes_part_ways_too():
    group = current()
    apart = replace(group.world, local_rank=0, local_size=1, node_rank=group.world.rank)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with status_board.opened(apart, dist.PrefixStore("apart", group.store)) as entries:
        group.coordinator = Coordinator(entries, timedelta(seconds=30))
        with parwrap.distributed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(2 + 2 * parwrap.rank()):
                optimizer.zero_grad()
                (-(parwrap.rank() + 1.0) * model.weight).sum().backward()
                optimizer.step()

        assert model.weight.item() == pytest.approx(2 * 1.5 + 2 * 2.0)
        group.coordinator.wait("the end of the test")


@pytest.mark.ranks(3)
def test_steps_that_only_one_rank_takes_are_named_at_the_end_and_undone():
    model = nn.Linear(2, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with parwrap.distributed():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                if step != 3 or parwrap.rank() == 1:
                    optimizer.step()

    assert 1 == len([each for each in said if "2 parameters have different values on different ranks at the end" in str(each.message)])
    assert 1 == len({str(each) for each in parwrap.gather(model.state_dict())})


@pytest.mark.ranks(2, timeout=30)
def test_a_gradient_outside_of_the_known_set_is_averaged_while_a_rank_answers():
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.ones_(first.weight)
    nn.init.zeros_(second.weight)
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5)
        for step in range(8 if parwrap.rank() == 0 else 4):
            optimizer.zero_grad()
            loss = 0 * first.weight.sum()
            if step == 6:
                loss = loss - second.weight.sum()
            loss.backward()
            optimizer.step()

    assert [0.5] == [round(second.weight.item(), 6)]


@pytest.mark.ranks(2)
def test_a_rank_that_has_left_answers_for_a_layer_that_was_frozen_then():
    @parwrap.distributed(timeout=20)
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].requires_grad_(False)
        for step in range(2 if parwrap.rank() else 5):
            if step == 3:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return model

    before = torch.nn.Linear(3, 3)
    torch.manual_seed(0)
    before.reset_parameters()
    weights = parwrap.gather(train()[0].weight)

    assert torch.equal(*weights)
    assert not torch.equal(weights[0], before.weight)
