"""The steps that ``local_sgd`` counts, by many kinds of optimizers, and the parameters that it averages."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from closures import minimized
from local_sgd_in_one_process import DiLoCo, adam, batch, build, flat, in_one_process, local, mean, same_on_all_ranks, train, train_step


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


def train_in_parts(parts, each=lambda model: None):
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
        actual = flat(local(every=8, **options)(train_in_parts)(parts))

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
    local(every=8, warmup=6)(train_in_parts)([5, 5], each=lambda model: same.append(same_on_all_ranks(flat(model))))

    assert [True] * 6 + [False] * 4 == same


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
def test_closures_decide_by_the_ranks_own_loss_however_often_they_are_called():
    weight = nn.Parameter(torch.zeros(2))
    with local(every=2):
        calls, losses = minimized(weight, torch.full((2,), 3.0 * parwrap.rank()), max_iter=8)

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
