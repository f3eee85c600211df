"""Local SGD against DDP, and against ranks that are played one after the other in a single process."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from local_sgd_in_one_process import FEATURES, DiLoCo, batch, build, flat, in_one_process, local, same_on_all_ranks, train, train_step
from parwrap.errors import UsageError
from warm_command import run as run_command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
def test_weights_are_those_of_ranks_played_in_one_process(every, size):
    actual = flat(local(every=every)(train)(7))

    torch.testing.assert_close(actual, in_one_process(size, every), atol=1e-6, rtol=0)
    assert same_on_all_ranks(actual)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
def test_with_an_outer_optimizer_they_are_those_of_dilocos_formula(size):
    actual = flat(local(every=3, outer="nesterov")(train)(7))
    plainly = flat(local(every=3, outer="nesterov", outer_lr=1.0, outer_momentum=0.0)(train)(7))

    torch.testing.assert_close(actual, in_one_process(size, 3, DiLoCo()), atol=1e-6, rtol=0)
    torch.testing.assert_close(plainly, in_one_process(size, 3), atol=1e-6, rtol=0)
    assert same_on_all_ranks(actual)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.ranks(2)
def test_an_average_after_every_step_of_sgd_is_ddp(momentum):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    expected = flat(parwrap.distributed(train)(6, sgd))

    torch.testing.assert_close(flat(local(every=1)(train)(6, sgd)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"uneven": "join"}, {"batch": "global"}, {"batch": "global", "loss": "sum"}], ids=str)
@pytest.mark.ranks(3)
def test_ranks_count_by_their_samples(options):
    """16 samples in batches of 5: the last batches leave ranks with fewer than others, or none."""
    data = TensorDataset(*(torch.cat(each) for each in zip(*(batch(step, 0) for step in range(4)), strict=True)))
    loss_of = nn.MSELoss(reduction=options.get("loss", "mean"))

    def over_a_loader():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=5):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
        return flat(model)

    expected = parwrap.distributed(**options)(over_a_loader)()

    torch.testing.assert_close(local(every=1, **options)(over_a_loader)(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"uneven": "join"}, {"batch": "global"}], ids=str)
@pytest.mark.ranks(2)
def test_with_momentum_an_average_after_every_step_is_ddp_where_ranks_have_equally_many_samples(options):
    def over_a_loader():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            for x, y in DataLoader(TensorDataset(*(torch.cat(each) for each in zip(batch(0, 0), batch(1, 0), strict=True))), batch_size=2):
                train_step(model, optimizer, x, y)
        return flat(model)

    expected = parwrap.distributed(**options)(over_a_loader)()

    torch.testing.assert_close(local(every=1, **options)(over_a_loader)(), expected, atol=1e-5, rtol=0)


@pytest.mark.ranks(2)
def test_the_warm_up_is_ddp_bit_for_bit_and_then_ranks_go_on_by_themselves():
    synchronous, seen = [], []
    parwrap.distributed(train)(4, each=lambda model: synchronous.append(flat(model)))
    final = local(every=4, warmup=4, bucket_cap_mb=1)(train)(7, each=lambda model: seen.append(flat(model)))

    assert all(map(torch.equal, synchronous, seen[:4]))
    assert not same_on_all_ranks(seen[4])
    assert same_on_all_ranks(flat(final))


@pytest.mark.ranks(2)
def test_averages_cost_two_collectives_and_steps_between_them_none():
    sent, original = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent[-1] += 1
        return original(tensor, *args, **kwargs)

    with local(every=3), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        sent.append(0)
        train(7, each=lambda model: sent.append(0))

    assert [0, 0, 2, 0, 0, 2, 0] == sent[:7]


@pytest.mark.ranks(2)
def test_half_precision_weights_are_averaged_in_single_precision():
    weight = nn.Parameter(torch.tensor([60000.0, 1.0], dtype=torch.float16))
    with local(every=1):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight[1] * parwrap.rank()).backward()
        optimizer.step()

    assert [60000.0, 0.5] == weight.tolist()


@pytest.mark.ranks(2)
def test_batch_norm_may_be_shared_as_in_ddp():
    def normalized():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            train_step(model, optimizer, *batch(step, parwrap.rank()))
        return flat(model.eval())

    with parwrap.distributed(), parwrap.sync_bn():
        expected = normalized()
    with local(every=1), parwrap.sync_bn():
        torch.testing.assert_close(normalized(), expected, atol=1e-5, rtol=0)


@pytest.mark.ranks(2)
def test_own_steps_are_taken_at_the_rate_that_was_asked_for_and_the_outer_one_is_not():
    def weight():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        return weight.item()

    assert -2.0 == local(every=2, lr="linear")(weight)()
    assert pytest.approx(-2.0 * 0.7 * 1.9) == local(every=2, lr="linear", outer="nesterov")(weight)()


@pytest.mark.ranks(2)
def test_a_function_inside_averages_as_often_as_it_says():
    def history():
        weight, seen = nn.Parameter(torch.zeros(1)), []
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(4):
            optimizer.zero_grad()
            (weight * parwrap.rank()).sum().backward()
            optimizer.step()
            seen.append(-weight.item())
        return seen

    with local(every=4):
        assert [0.5, 1.0, 1.5, 2.0] == local(every=1)(history)()
        assert ([0, 0, 0, 2] if parwrap.rank() == 0 else [1, 2, 3, 2]) == history()


@pytest.mark.ranks(2)
def test_what_is_trained_without_an_optimizer_is_said():
    owned, by_hand = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    told = pytest.warns(UserWarning, match=r"a parameter of shape \(3,\) that no optimizer owns changed between two backward passes")
    with told, local(every=2):
        optimizer = torch.optim.SGD([owned], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (owned.sum() + by_hand.sum()).backward()
            optimizer.step()
            by_hand.data -= 0.1 * by_hand.grad
    with pytest.warns(UserWarning, match="no optimizer of torch.optim has stepped"), local(every=2):
        by_hand.sum().backward()


@pytest.mark.ranks(2)
def test_a_step_inside_of_a_backward_is_refused():
    weight = nn.Parameter(torch.ones(1))
    with local(every=2):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(
            UsageError, match=r"SGD.step\(\) at .* runs inside a backward pass, .* weights must not change during a backward pass"
        ):
            weight.sum().backward()
        weight._post_accumulate_grad_hooks.clear()
        optimizer.step()


def test_the_example_is_learnt_and_the_first_line_says_how():
    command = ["-m", "parwrap.run", "--nproc-per-node", "2", "--strategy", "local_sgd", "--every", "32", "--outer", "nesterov"]
    run = run_command([sys.executable, *command, "examples/local_sgd.py"], cwd=ROOT, timeout=100, check=True)

    assert " local_sgd, weights averaged every 32 steps, outer nesterov lr 0.7 momentum 0.9, batch 32 per rank, 64 global, " in run.stderr
    assert float(re.search(r"^epoch 8: test loss (\S+)$", run.stdout, re.MULTILINE)[1]) < 0.02
    assert 8 == len(run.stdout.splitlines())


def test_one_rank_is_a_plain_loop():
    assert torch.equal(flat(train(5)), flat(local(every=2, outer="nesterov")(train)(5)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0 is not a positive integer"),
        ({"every": 2.5}, "every=2.5 is not a positive integer"),
        ({"warmup": -1}, "warmup=-1 is not a non-negative integer"),
        (
            {"outer": "adam"},
            "outer='adam' is not a valid value. Choose one of: None: weights are averaged, without an outer optimizer; 'nesterov': SGD",
        ),
        ({"outer": "nesterov", "outer_lr": 0}, "outer_lr=0 is not a positive learning rate"),
        ({"outer": "nesterov", "outer_momentum": 1}, r"outer_momentum=1 is not in the range \[0, 1\)"),
        ({"outer_lr": 0.5}, "outer_lr=0.5 is an option of the outer optimizer: add outer='nesterov', or remove it"),
        (
            {"compress": "bf16"},
            "compress='bf16' applies only to averaged gradients, which strategy='local_sgd' has only during its warm-up: remove it, or",
        ),
        (
            {"strategy": "ddp", "every": 4},
            "every=4 has no effect with strategy='ddp': remove it, or choose a strategy that has this option: 'local_sgd'",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "local_sgd", **options})
