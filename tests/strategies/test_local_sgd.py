"""Local SGD against DDP, and against ranks that are played one after the other in a single process."""

import copy
import gc
import pickle
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import UsageError

ROOT = Path(__file__).parents[2]
FEATURES = 6


def local(**options):
    return parwrap.distributed(strategy="local_sgd", **options)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def batch(step, rank):
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :1] * 2


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train(steps, optimizer_of=adam, each=lambda model: None):
    """A plain loop, in which every rank has batches of its own."""
    model = build()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        train_step(model, optimizer, *batch(step, parwrap.rank()))
        each(model)
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def mean(replicas, old):
    return sum(replicas) / len(replicas)


class DiLoCo:
    """Algorithm 1 of Douillard et al. (2023), with Nesterov's momentum as torch has it."""

    velocity = 0.0

    def __init__(self, lr=0.7, momentum=0.9):
        self.lr, self.momentum = lr, momentum

    def __call__(self, replicas, old):
        gradient = old - mean(replicas, old)
        self.velocity = self.momentum * self.velocity + gradient
        return old - self.lr * (gradient + self.momentum * self.velocity)


def in_one_process(size, every, outer=mean, optimizer_of=adam, parts=((7,),), leaves=None):
    """The weights that ``size`` ranks come to, which all begin anew from an average after each of ``parts``; a rank may leave sooner."""
    replicas = [build() for _ in range(size)]
    optimizers = [optimizer_of(model.parameters()) for model in replicas]
    old, taken, step = flat(replicas[0]), 0, 0

    def average(present):
        nonlocal old, taken
        old, taken = outer([flat(replicas[rank]) for rank in present], old), 0
        for model in replicas:
            nn.utils.vector_to_parameters(old.clone(), model.parameters())

    for (steps,) in parts:
        for _ in range(steps):
            present = [rank for rank in range(size) if step < (leaves or {}).get(rank, 1000)]
            for rank in present:
                train_step(replicas[rank], optimizers[rank], *batch(step, rank))
            step, taken = step + 1, taken + 1
            if taken == every:
                average(present)
        if taken:
            average(present)
    return old


def same_on_all_ranks(tensor):
    return all(torch.equal(tensor, each) for each in parwrap.gather(tensor))


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
def test_optimizers_are_counted_by_themselves_and_average_their_own_parameters():
    """The second steps in every other batch."""
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    history = []
    with local(every=2):
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (one, two)]
        for step in range(6):
            for p, optimizer in list(zip((one, two), optimizers, strict=True))[: 1 + step % 2]:
                p.grad = None
                (p * (parwrap.rank() + 1)).sum().backward()
                optimizer.step()
            history.append((-one.item(), -two.item()))

    expected = {0: [(1, 0), (3, 1), (4, 1), (6, 3), (7, 3), (9, 4)], 1: [(2, 0), (3, 2), (5, 2), (6, 3), (8, 3), (9, 5)]}
    assert expected[parwrap.rank()] == history
    assert (-9.0, -4.5) == (one.item(), two.item())


def train_anew(parts, each=lambda model: None):
    """An optimizer built anew for each of ``parts``: how many steps it takes."""
    model, step = build(), 0
    for steps in parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            train_step(model, optimizer, *batch(step, parwrap.rank()))
            each(model)
            step += 1
    return model


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.ranks(2)
def test_an_optimizer_built_anew_first_averages_what_another_has_trained(outer):
    """Its first step, that is, whose gradients are from before."""
    combine = DiLoCo(momentum=0.0) if outer else mean
    replicas, old, step = [build() for _ in range(2)], flat(build()), 0
    for steps in (parts := [3, 10, 2]):
        for taken in range(steps):
            losses = [nn.functional.mse_loss(model(x), y) for rank, model in enumerate(replicas) for x, y in [batch(step, rank)]]
            gradients = [
                nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
                for loss, model in zip(losses, replicas, strict=True)
            ]
            if taken == 0:
                old = combine([flat(model) for model in replicas], old)
            for model, gradient in zip(replicas, gradients, strict=True):
                begun = old if taken == 0 else flat(model)
                nn.utils.vector_to_parameters(begun - 0.1 * gradient, model.parameters())
            if taken == 7:
                old = combine([flat(model) for model in replicas], old)
                for model in replicas:
                    nn.utils.vector_to_parameters(old.clone(), model.parameters())
            step += 1
    expected = combine([flat(model) for model in replicas], old)

    options = {"outer": outer, "outer_momentum": 0.0} if outer else {}
    with warnings.catch_warnings(action="error"):
        actual = flat(local(every=8, **options)(train_anew)(parts))

    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_optimizers_of_which_one_has_a_part_of_the_others_parameters_average_before_they_take_turns():
    with warnings.catch_warnings(action="error"), local(every=4):
        model = build()
        optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)]
        seen = []
        for step in range(4):
            before = flat(model)
            train_step(model, optimizers[step % 2], *batch(step, parwrap.rank()))
            seen.append(same_on_all_ranks(before))

    assert [True, False, False, False] == seen
    assert same_on_all_ranks(flat(model))


@pytest.mark.ranks(2)
def test_the_warm_up_goes_on_with_an_optimizer_built_anew():
    same = []
    local(every=8, warmup=6)(train_anew)([5, 5], each=lambda model: same.append(same_on_all_ranks(flat(model))))

    assert [True] * 6 + [False] * 4 == same


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
        told = pytest.warns(UserWarning, match=r"torch.save at .*test_local_sgd.py:\d+ is called 3 step\(s\) after the ranks last averaged")
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
        pytest.warns(UserWarning, match="rank 2 is at the end .*, and other ranks have trained on")
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
def test_half_precision_weights_are_averaged_in_single_precision():
    weight = nn.Parameter(torch.tensor([60000.0, 1.0], dtype=torch.float16))
    with local(every=1):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight[1] * parwrap.rank()).backward()
        optimizer.step()

    assert [60000.0, 0.5] == weight.tolist()


@pytest.mark.ranks(2)
def test_of_fp16_only_steps_that_were_taken_count():
    """On rank 1 the second step overflows, so that its second is taken in the third batch; rank 0 waits for it there."""
    weight = nn.Parameter(torch.zeros(1))
    history = []
    with parwrap.amp(dtype="fp16", init_scale=2.0), local(every=2):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for step in range(4 + parwrap.rank()):
            optimizer.zero_grad()
            (weight * (float("inf") if (step, parwrap.rank()) == (1, 1) else parwrap.rank() + 1)).sum().backward()
            optimizer.step()
            history.append(-weight.item())

    assert [[1.0, 3.0, 4.0, 6.0], [2.0, 2.0, 3.0, 5.0, 6.0]] == parwrap.gather(history)


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


@pytest.mark.parametrize("how", ["copied", "pickled"])
@pytest.mark.ranks(2)
def test_the_steps_of_a_copied_optimizer_count(how):
    with local(every=2):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer, *batch(0, parwrap.rank()))
        model.eval()
        model, optimizer = copy.deepcopy((model, optimizer)) if how == "copied" else pickle.loads(pickle.dumps((model, optimizer)))
        same = []
        for step in range(1, 5):
            train_step(model, optimizer, *batch(step, parwrap.rank()))
            same.append(same_on_all_ranks(flat(model)))

    assert [False, True, False, True] == same
    expected = in_one_process(2, 2, optimizer_of=lambda parameters: torch.optim.SGD(parameters, lr=0.1), parts=[(1,), (4,)])
    torch.testing.assert_close(flat(model), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [2, "auto"])
@pytest.mark.ranks(2)
def test_a_window_of_accumulated_batches_is_one_step(steps):
    """5 batches: the last window is smaller, and is applied at the end."""
    weight = nn.Parameter(torch.zeros(1))
    history = []
    with local(every=2), parwrap.accumulate(steps):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for step, (x,) in enumerate(DataLoader(TensorDataset(torch.arange(10.0)[:, None]), batch_size=1)):  # rank 1 has the odd ones
            loss = (weight * x).sum()
            if steps == "auto":
                (loss / 2).backward()
                if step % 2 or step == 4:
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            history.append(-weight.item())

    # means of two batches: 1 and then 5 on rank 0, 2 and 6 on rank 1; at the end 8 and 9 of one batch, which by hand was halved
    first = 1.0 + parwrap.rank()
    assert [0.0, first, first, 7.0] == history[:4]
    assert -(7.0 + 8.5 / (2 if steps == "auto" else 1)) == weight.item()


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
def test_closures_decide_by_the_ranks_own_loss_however_often_they_are_called():
    calls, target = 0, torch.full((2,), 3.0 * parwrap.rank())
    weight = nn.Parameter(torch.zeros(2))
    with local(every=2):
        optimizer = torch.optim.LBFGS([weight], max_iter=8, line_search_fn="strong_wolfe")

        def closure():
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = ((weight - target) ** 4).sum() + weight.exp().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]

    assert 2 == len(set(parwrap.gather(calls)))
    assert [2.0, 164.0] == parwrap.gather(losses[0])
    assert same_on_all_ranks(weight)


@pytest.mark.ranks(2)
def test_an_optimizer_around_another_class_of_step_counts_once():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # so that torch has hooked both classes
    weight = nn.Parameter(torch.zeros(1))
    with local(every=2):
        optimizer = Counting([weight], lr=1.0)
        (weight * parwrap.rank()).sum().backward()
        optimizer.step()
        assert -parwrap.rank() == weight.item()


class Around(torch.optim.Optimizer):
    """As Lookahead is around another optimizer, and no more than that."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


@pytest.mark.ranks(2)
def test_a_step_around_that_of_another_optimizer_counts_once():
    def around(parameters):
        return Around(adam(parameters))

    with warnings.catch_warnings(action="error"):
        actual = flat(local(every=3, outer="nesterov")(train)(7, around))

    torch.testing.assert_close(actual, in_one_process(2, 3, DiLoCo()), atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_steps_inside_of_another_that_has_none_of_their_parameters_count():
    class Both(torch.optim.Optimizer):
        def __init__(self, optimizers):
            super().__init__([nn.Parameter(torch.zeros(1))], {})
            self.optimizers = optimizers

        def step(self, closure=None):
            for each in self.optimizers:
                each.step()

    same = []
    with local(every=2):
        model = build()
        both = Both([adam(model[0].parameters()), adam(model[2].parameters())])
        for step in range(4):
            model.zero_grad()
            nn.functional.mse_loss(model(batch(step, parwrap.rank())[0]), torch.zeros(4, 1)).backward()
            both.step()
            same.append(same_on_all_ranks(flat(model)))

    assert [False, True, False, True] == same


@pytest.mark.ranks(2)
def test_momenta_of_the_outer_optimizer_live_no_longer_than_the_optimizer_they_belong_to():
    def alive():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) and each.numel() == 12345 for each in gc.get_objects())

    weight, counts = nn.Parameter(torch.ones(12345)), []
    with local(every=2, outer="nesterov"):
        for _ in range(4):
            optimizer = torch.optim.SGD([weight], lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
            counts.append(alive())

    assert counts[0] > 1
    assert 1 == len(set(counts))


@pytest.mark.ranks(2)
def test_weights_built_differently_become_rank_zeros_with_a_warning():
    weight = nn.Parameter(torch.full((2,), 1.0 + parwrap.rank()))
    with local(every=4):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.sum().backward()
        with pytest.warns(UserWarning, match="1 of 1 parameters have different values on different ranks; rank 0's are taken"):
            optimizer.step()
        assert [0.0, 0.0] == weight.tolist()
        assert optimizer


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
    told = pytest.warns(UserWarning, match=r"a parameter of shape \(3,\) that no optimizer owns has changed between two backwards")
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
def test_a_step_inside_of_a_backward_is_refused():
    weight = nn.Parameter(torch.ones(1))
    with local(every=2):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(UsageError, match=r"SGD.step\(\) at .* runs inside of a backward, .* weights must not change under a backward"):
            weight.sum().backward()
        weight._post_accumulate_grad_hooks.clear()
        optimizer.step()


@pytest.mark.ranks(2)
def test_one_rank_may_train_alone():
    with local(every=2):
        probed = build()
        probe = adam(probed.parameters())
        parwrap.rank_zero_only(train_step)(probed, probe, *batch(0, 0))
        model = train(3)

    torch.testing.assert_close(flat(model), in_one_process(2, 2, parts=[(3,)]), atol=1e-6, rtol=0)


def test_the_example_is_learnt_and_the_first_line_says_how():
    command = ["-m", "parwrap.run", "--nproc-per-node", "2", "--strategy", "local_sgd", "--every", "32", "--outer", "nesterov"]
    run = subprocess.run(
        [sys.executable, *command, "examples/local_sgd.py"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )

    assert " local_sgd, weights averaged every 32 steps, outer nesterov lr 0.7 momentum 0.9, batch 32 per rank, 64 global, " in run.stderr
    assert float(re.search(r"^epoch 8: test loss (\S+)$", run.stdout, re.MULTILINE)[1]) < 0.02
    assert 8 == len(run.stdout.splitlines())


def test_one_rank_is_a_plain_loop():
    assert torch.equal(flat(train(5)), flat(local(every=2, outer="nesterov")(train)(5)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0 is not a number of steps from 1"),
        ({"every": 2.5}, "every=2.5 is not a number of steps from 1"),
        ({"warmup": -1}, "warmup=-1 is not a number of steps from 0"),
        ({"outer": "adam"}, "outer='adam' is not one of its values. None: averaged weights are the means; 'nesterov': what"),
        ({"outer": "nesterov", "outer_lr": 0}, "outer_lr=0 is not a learning rate above 0"),
        ({"outer": "nesterov", "outer_momentum": 1}, "outer_momentum=1 is not a momentum from 0 to below 1"),
        ({"outer_lr": 0.5}, "outer_lr=0.5 is of the outer optimizer: give outer='nesterov' too, or leave it out"),
        ({"compress": "bf16"}, "compress='bf16' is for averaged gradients, as in the warm-up of strategy='local_sgd': leave it out, or"),
        ({"strategy": "ddp", "every": 4}, "every=4 has nothing to act on with strategy='ddp': .* that has it, 'local_sgd'"),
    ],
)
def test_what_has_no_meaning_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "local_sgd", **options})
