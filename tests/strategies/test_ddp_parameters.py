"""Which parameters a backward of the DDP strategy averages, and which gradients stay ``None``."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap


def gradients(backward, parameters):
    """What one training step leaves in ``.grad``; each rank has its own inputs."""
    for p in parameters:
        p.grad = None
    backward(torch.full((3,), float(parwrap.rank() + 1)))
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


@pytest.mark.ranks(2)
def test_a_parameter_that_no_rank_uses_keeps_none():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        torch.optim.SGD([used, unused], lr=0.1)
        for _ in range(4):
            assert [[1.5] * 3, None] == gradients(lambda x: (used * x).sum().backward(), [used, unused])


@pytest.mark.ranks(2)
def test_branches_that_differ_by_rank_average_with_zeros():
    """Rank 0 uses the first, rank 1 the second, nobody the third: as hand-written DDP with find_unused_parameters averages."""
    first, second, _ = parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(5):
            mine = first if parwrap.rank() == 0 else second

            assert [[0.5] * 3, [1.0] * 3, None] == gradients(lambda x, mine=mine: (mine * x).sum().backward(), parameters), step
        assert optimizer


@pytest.mark.ranks(2)
def test_branches_that_differ_by_step_keep_what_no_rank_used_in_that_step_none():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(9):
            chosen = step % 3
            expected = [[1.5] * 3 if index == chosen else None for index in range(3)]

            assert expected == gradients(lambda x, chosen=chosen: (parameters[chosen] * x).sum().backward(), parameters), step
        assert optimizer


@pytest.mark.ranks(2)
def test_parameters_frozen_and_unfrozen_later():
    frozen, other = parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(12):
            frozen.requires_grad_(step // 3 % 2 == 0)
            expected = [[1.5] * 3 if frozen.requires_grad else None, [1.5] * 3]

            assert expected == gradients(lambda x: ((frozen + other) * x).sum().backward(), parameters), step
        assert optimizer


@pytest.mark.ranks(2)
def test_two_optimizers_behind_one_helper_each_get_their_own():
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def step(loss):
        loss.backward()

    with parwrap.distributed():
        optimizers = [torch.optim.SGD([one], lr=0.1), torch.optim.SGD([two], lr=0.1)]
        for _ in range(4):
            assert [[1.5] * 3, None] == gradients(lambda x: step((one * x).sum()), [one, two])
            assert [None, [1.5] * 3] == gradients(lambda x: step((two * x).sum()), [one, two])
        assert optimizers


@pytest.mark.ranks(2)
def test_reentrant_checkpoints_are_averaged_though_the_graph_hides_their_parameters():
    from torch.utils.checkpoint import checkpoint

    inner, outer = parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(4):

            def backward(x):
                hidden = checkpoint(lambda h: h * inner, x.requires_grad_(), use_reentrant=True)
                (hidden * outer).sum().backward()

            assert [[1.5] * 3, [1.5] * 3] == gradients(backward, parameters), step
        assert optimizer


@pytest.mark.ranks(2)
def test_backward_with_inputs_leaves_other_gradients_untouched():
    wanted, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        for _ in range(3):
            assert [[1.5] * 3, None] == gradients(lambda x: ((wanted + other) * x).sum().backward(inputs=[wanted]), [wanted, other])


@pytest.mark.ranks(2)
def test_bare_tensors_made_alike_are_parameters_and_inputs_are_not():
    weight = torch.ones(3, requires_grad=True)
    with parwrap.distributed():
        for _ in range(4):
            x = torch.full((3,), float(parwrap.rank() + 1), requires_grad=True)
            weight.grad = None
            (weight * x).sum().backward()

            assert [1.5] * 3 == weight.grad.tolist()
            assert weight.tolist() == x.grad.tolist()


@pytest.mark.ranks(2)
def test_parameters_known_to_another_site_are_averaged_where_they_are_reached_later():
    """As an encoder that is trained on its own first, then held fixed by a detach, then trained again."""
    encoder, head = parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    with parwrap.distributed():
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters]
        for _ in range(3):
            assert [[1.5] * 3, None] == gradients(lambda x: (encoder * x).sum().backward(), parameters)
        for step in range(8):
            through = encoder if step > 3 else encoder.detach()
            expected = [[1.5] * 3 if step > 3 else None, [1.5] * 3]

            assert expected == gradients(lambda x, through=through: (through * head * x).sum().backward(), parameters), step
        assert optimizers


@pytest.mark.ranks(2)
def test_a_new_model_at_the_same_place_needs_no_optimizer():
    with parwrap.distributed():
        for _ in range(3):
            weight = nn.Parameter(torch.ones(3))
            for _ in range(4):
                assert [[1.5] * 3] == gradients(lambda x, weight=weight: (weight * x).sum().backward(), [weight])


@pytest.mark.ranks(2)
def test_a_parameter_exchanged_in_its_optimizer():
    weight = nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0]["params"][0] = weight = nn.Parameter(torch.ones(5))
            weight.grad = None
            (weight * (parwrap.rank() + 1.0)).sum().backward()

            assert [1.5] * len(weight) == weight.grad.tolist(), step


@pytest.mark.ranks(2)
def test_optimizers_that_are_garbage_on_one_rank_only_confuse_nobody():
    with parwrap.distributed():
        kept = []
        for _ in range(4):
            weight = nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            if parwrap.rank() == 0:
                kept.append(optimizer)
            for _ in range(3):
                assert [[1.5] * 3] == gradients(lambda x, weight=weight: (weight * x).sum().backward(), [weight])


@pytest.mark.ranks(2)
def test_what_nobody_uses_is_none_on_every_rank_though_one_has_looked_at_its_graph_before():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    used = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1) if parwrap.rank() == 0 else (0, 1, 2), (0, 1), (0,), (0, 1, 2)]
    with parwrap.distributed():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for chosen in used:
            left = gradients(lambda x, chosen=chosen: sum(parameters[index] for index in chosen).mul(x).sum().backward(), parameters)

            assert 1 == len({str(each) for each in parwrap.gather(left)})
        assert optimizer


@pytest.mark.ranks(2)
def test_weights_that_are_made_anew_for_each_step_are_averaged():
    weights = [torch.ones(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    with parwrap.distributed():
        for _ in range(5):
            sum((weight * (parwrap.rank() + 1.0)).sum() for weight in weights).backward()
            weights = [(weight - 0.1 * weight.grad).detach().requires_grad_() for weight in weights]

    assert [0.25] * 3 + [-0.75] * 2 == pytest.approx(torch.cat(weights).tolist())


@pytest.mark.ranks(2)
def test_inputs_that_are_made_anew_for_each_step_are_not():
    model = nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    with parwrap.distributed():
        for _ in range(4):
            x = torch.full((1, 2), parwrap.rank() + 1.0, requires_grad=True)
            (model(x) * (parwrap.rank() + 1)).sum().backward()

            assert [[parwrap.rank() + 1.0] * 2] == x.grad.tolist()


@pytest.mark.ranks(2)
def test_a_gradient_of_zeros_on_one_rank_is_one_on_all():
    used, rare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with parwrap.distributed():
        optimizer = torch.optim.AdamW([used, rare], lr=0.1)
        for step in range(8):
            optimizer.zero_grad()
            everything = step < 2 or (step == 5 and parwrap.rank() == 1)
            (used.sum() + (0 * rare.sum() if everything else 0)).backward()

            assert (step < 2 or step == 5) == (rare.grad is not None), step
            optimizer.step()

    assert 1 == len({str(each) for each in parwrap.gather(rare.detach())})


@pytest.mark.ranks(2)
def test_parameters_put_into_a_group_by_hand_are_averaged():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with parwrap.distributed():
        optimizer = torch.optim.SGD([one], lr=0.1)
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0]["params"].append(other)
            optimizer.zero_grad()
            ((one + (other if step >= 3 else 0)) * (parwrap.rank() + 1.0)).sum().backward()

            assert step < 3 or [1.5, 1.5] == other.grad.tolist(), step
            optimizer.step()


def grown_in_its_loop():
    """The weights of a model that gets a layer in its loop, and the first weight of that layer as built and before the first step."""
    x = torch.linspace(-1, 1, 16).view(-1, 1)
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(DataLoader(TensorDataset(x), batch_size=2)):
        if step == 2:
            model.append(nn.Linear(1, 1))
            built = model[1].weight.item()
            optimizer.add_param_group({"params": model[1].parameters()})
        optimizer.zero_grad()
        model(*batch).sum().backward()
        if step == 2:
            used = model[1].weight.item()
        optimizer.step()
    return [p.tolist() for p in model.parameters()], built, used


@pytest.mark.ranks(2)
def test_a_layer_that_is_built_in_the_loop_has_rank_0s_values():
    with parwrap.distributed():
        with pytest.warns(UserWarning, match="rank 0's are used. They were built in a loop over a DataLoader") as warned:
            weights, built, used = grown_in_its_loop()

        assert 1 == len(warned)
        assert parwrap.broadcast(built) == used
        assert 1 == len({str(each) for each in parwrap.gather([weights])})
