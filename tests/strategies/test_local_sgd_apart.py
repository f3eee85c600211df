"""Ranks under ``local_sgd`` that evaluate, save, leave or train other parameters between two averages."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from local_sgd_in_one_process import (
    FEATURES,
    DiLoCo,
    adam,
    batch,
    build,
    flat,
    in_one_process,
    local,
    mean,
    same_on_all_ranks,
    train,
    train_step,
)


def evaluated(step_of_eval, evaluate):
    def each(model):
        nonlocal step_of_eval
        step_of_eval -= 1
        if step_of_eval == 0:
            evaluate(model)
            seen.append(flat(model))

    seen = []
    return each, seen


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference"])
@pytest.mark.ranks(2)
def test_ranks_evaluate_the_same_weights_and_count_anew_from_there(how):
    def evaluate(model):
        if how == "eval":
            model.eval()
            model.train()
            return
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            for (x,) in DataLoader(TensorDataset(torch.ones(2, FEATURES)), batch_size=1):
                model(x)

    each, seen = evaluated(5, evaluate)
    actual = flat(local(every=3, outer="nesterov")(train)(9, each=each))

    torch.testing.assert_close(seen[0], in_one_process(2, 3, DiLoCo(), parts=[(5,)]), atol=1e-6, rtol=0)
    torch.testing.assert_close(actual, in_one_process(2, 3, DiLoCo(), parts=[(5,), (4,)]), atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_buffers_are_rank_zeros_when_a_root_is_set_to_eval():
    with local(every=2):
        model = nn.Sequential(nn.Linear(FEATURES, 2), nn.BatchNorm1d(2))
        optimizer = adam(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, parwrap.rank())[0]).square().sum().backward()
            optimizer.step()
        before = parwrap.gather(model[1].running_mean)
        model.eval()

        assert not torch.equal(*before)
        assert torch.equal(before[0], model[1].running_mean)
        assert same_on_all_ranks(flat(model))


@pytest.mark.ranks(2)
def test_saving_never_communicates_and_says_whose_weights_they_are(tmp_path):
    with local(every=4):
        model = train(3)
        # only rank 0 comes here, as in what is run on no other
        told = pytest.warns(
            UserWarning, match=r"torch.save at .*test_local_sgd_apart.py:\d+ is called 3 step\(s\) after the ranks last averaged"
        )
        with told if parwrap.rank() == 0 else nullcontext():
            if parwrap.rank() == 0:
                torch.save(model.state_dict(), tmp_path / "own.pt")
        model.eval()
        with warnings.catch_warnings(action="error"):
            torch.save(model.state_dict(), tmp_path / "averaged.pt")

    if parwrap.rank() == 0:
        assert torch.equal(model[0].weight, torch.load(tmp_path / "averaged.pt")["0.weight"])
        assert not torch.equal(model[0].weight, torch.load(tmp_path / "own.pt")["0.weight"])


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.ranks(3)
def test_a_rank_that_leaves_early_counts_as_long_as_it_was_there(outer):
    told = (
        pytest.warns(UserWarning, match="rank 2 is at the end .*, and other ranks have trained in the meantime")
        if parwrap.rank() == 0
        else nullcontext()
    )
    with told, local(every=2, outer=outer):
        model = train(4 if parwrap.rank() == 2 else 9)

    expected = in_one_process(3, 2, DiLoCo() if outer else mean, parts=[(9,)], leaves={2: 4})
    torch.testing.assert_close(flat(model), expected, atol=1e-6, rtol=0)
    assert same_on_all_ranks(flat(model))


@pytest.mark.ranks(2)
def test_ranks_that_leave_epochs_by_a_loss_of_their_own_go_on_together():
    with warnings.catch_warnings(action="ignore"), local(every=2, warmup=3, outer="nesterov"):
        model = build()
        optimizer = adam(model.parameters())
        for epoch in range(3):
            for step in range(4 + (epoch + parwrap.rank()) % 2 * 5):
                train_step(model, optimizer, *batch(step, parwrap.rank()))
            model.eval()
            assert same_on_all_ranks(flat(model))
            model.train()
            states = parwrap.gather([state["step"].item() for state in optimizer.state.values()])
            assert states[0] == states[1]

    assert same_on_all_ranks(flat(model))


@pytest.mark.ranks(3)
def test_what_is_frozen_keeps_every_bit_and_what_is_trained_later_is_averaged():
    with local(every=2):
        model = build()
        frozen = model[0].weight.requires_grad_(False)
        optimizer = adam(model.parameters())
        for step in range(7):
            frozen.requires_grad_(step > 4)
            train_step(model, optimizer, *batch(step, parwrap.rank()))
            if step == 4:
                assert torch.equal(build()[0].weight, frozen)

    assert not torch.equal(build()[0].weight, frozen)
    assert same_on_all_ranks(flat(model))


@pytest.mark.ranks(2)
def test_parameters_that_an_optimizer_gets_later_and_sparse_gradients():
    with local(every=2, outer="nesterov"):
        embedding, head = nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": head.parameters()})
            optimizer.zero_grad()
            head(embedding(torch.tensor([parwrap.rank(), 3]))).sum().backward()
            optimizer.step()

    assert same_on_all_ranks(torch.cat([flat(embedding), flat(head)]))


@pytest.mark.ranks(2)
def test_a_rank_whose_gradients_overflow_has_missed_nothing_where_ranks_evaluate():
    """The 3rd of 5 batches overflows on rank 1, which averages with the 5th, so that rank 0 alone has a step of its own there."""
    with warnings.catch_warnings(action="error"), local(every=4):
        model = build()
        optimizer = adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(15):
            x, y = batch(step, parwrap.rank())
            if (step, parwrap.rank()) == (2, 1):
                x = x * float("inf")
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % 5 == 4:
                model.eval()
                assert same_on_all_ranks(flat(model))
                model.train()

    assert [15, 14] == parwrap.gather(int(optimizer.state[model[0].weight]["step"]))


@pytest.mark.ranks(2)
def test_weights_built_differently_become_rank_zeros_with_a_warning():
    weight = nn.Parameter(torch.full((2,), 1.0 + parwrap.rank()))
    with local(every=4):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.sum().backward()
        with pytest.warns(UserWarning, match="1 of 1 parameters have different values on different ranks; rank 0's are used"):
            optimizer.step()
        assert [0.0, 0.0] == weight.tolist()
        assert optimizer


@pytest.mark.ranks(2)
def test_data_that_no_optimizer_owns_may_change():
    with warnings.catch_warnings(action="error"), local(every=2):
        model = build()
        optimizer = adam(model.parameters())
        for x, _ in DataLoader(TensorDataset(*batch(0, 0)), batch_size=1):
            x.requires_grad_(True)
            for _ in range(3):
                model(x).sum().backward()
                with torch.no_grad():
                    x += 0.1 * x.grad
            optimizer.step()


@pytest.mark.ranks(2)
def test_one_rank_may_train_alone():
    with local(every=2):
        probed = build()
        probe = adam(probed.parameters())
        parwrap.rank_zero_only(train_step)(probed, probe, *batch(0, 0))
        model = train(3)

    torch.testing.assert_close(flat(model), in_one_process(2, 2, parts=[(3,)]), atol=1e-6, rtol=0)
