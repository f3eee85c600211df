"""A step that is skipped does nothing, whatever the optimizer is, and nothing has to be put back."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import _global_optimizer_pre_hooks

import parwrap
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.table import intercepting

DENSE = {
    name: cls
    for name in torch.optim.__all__
    if isinstance(cls := getattr(torch.optim, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls not in (torch.optim.Optimizer, torch.optim.SparseAdam)
}
BUILDERS = {
    **DENSE,
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.1}]),
    "LBFGS wolfe": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"),
}


class Chosen(Interceptor):
    """Skips while it is told to."""

    def __init__(self, skipping=False):
        self.skipping, self.asked = skipping, []

    @intercepts
    def skips(self, optimizer):
        self.asked.append(optimizer)
        return self.skipping


class Counting(torch.optim.SGD):
    """As many are: it counts its steps, hands on to its base class, and looks at every parameter."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.state["all"]["steps"] = self.steps
        for group in self.param_groups:
            group["norm"] = sum(p.grad.norm() for p in group["params"])
        return super().step(closure)


def trained(build, skipped=(), steps=5, closures=False):
    """Parameters and state after ``steps`` steps that count, with others in between that are skipped."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 3)) for _ in range(2)]
    optimizer = build(parameters)
    inputs, interceptor = torch.randn(steps, 3), Chosen()

    def loss_of(x):
        optimizer.zero_grad()
        loss = sum((p @ x - 1).square().sum() for p in parameters)
        loss.backward()
        return loss

    with intercepting([interceptor]):
        for number in range(steps):
            if number in skipped:
                interceptor.skipping = True
                optimizer.step(lambda: loss_of(torch.ones(3))) if closures else (loss_of(torch.ones(3)), optimizer.step())
            interceptor.skipping, x = False, inputs[number]
            optimizer.step(lambda x=x: loss_of(x)) if closures else (loss_of(x), optimizer.step())
    return parameters, optimizer.state_dict()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_training_goes_on_as_if_a_skipped_step_had_never_been(name, closures):
    if "LBFGS" in name and not closures:
        pytest.skip("it takes steps only with closures")
    build = BUILDERS[name]

    assert same(trained(build, closures=closures), trained(build, skipped=(0, 2, 3), closures=closures))


def test_sparse_adam_too():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with intercepting([Chosen(skipping=True)]):
        optimizer.step()

    assert torch.equal(before, embedding.weight)
    assert {} == optimizer.state


def test_what_an_optimizer_of_the_users_own_counts_stays_too():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Counting([parameter], lr=0.1)
    parameter.sum().backward()
    before = copy.deepcopy(optimizer.state_dict())
    with intercepting([Chosen(skipping=True)]):
        optimizer.step()

        assert (0, before) == (optimizer.steps, optimizer.state_dict())
        assert [1.0, 1.0] == parameter.grad.tolist() == parameter.tolist()
    optimizer.step()

    assert (1, [0.9, 0.9]) == (optimizer.steps, pytest.approx(parameter.tolist()))


def test_a_closure_is_called_once_and_its_loss_returned():
    parameter, called = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def closure():
        called.append(1)
        parameter.sum().backward()
        return 7.0

    with intercepting([Chosen(skipping=True)]):
        assert (7.0, [1], 1.0) == (optimizer.step(closure), called, parameter.grad.item())


def test_nothing_is_left_behind_when_a_closure_raises():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    attributes, hooks = dict(vars(optimizer)), dict(_global_optimizer_pre_hooks)
    with pytest.raises(ZeroDivisionError), intercepting([Chosen(skipping=True)]):
        optimizer.step(lambda: 1 / 0)

    assert attributes == vars(optimizer)
    assert hooks == dict(_global_optimizer_pre_hooks)
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_schedulers_count_skipped_steps_and_do_not_warn():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings(), intercepting([Chosen(skipping=True)]):
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()

    assert 0.05 == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("outer", "asked"), [(True, 0), (False, 1)])
def test_the_interceptor_installed_last_is_asked_first_and_the_other_only_if_it_lets_the_step_through(outer, asked):
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # so that torch's hooks are around the base class's step too
    lower, higher = Chosen(), Chosen(skipping=outer)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Counting([parameter], lr=0.1)
    parameter.sum().backward()
    with intercepting([lower]), intercepting([higher]):
        optimizer.step()

    assert [optimizer] == higher.asked
    assert [optimizer] * asked == lower.asked
    assert parameter.item() == pytest.approx(1.0 if outer else 0.9)


class Keeping(torch.optim.Optimizer):
    """Keeps its parameters in an attribute of its own, in a way that it is given, and goes by that."""

    def __init__(self, params, keep, kept):
        self.weights = keep(params)
        self._kept = kept
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self._kept(self.weights):
            p.sub_(p.grad)


KEPT = {
    "list": (list, list),
    "tuple": (tuple, list),
    "by name": (lambda params: {str(number): p for number, p in enumerate(params)}, dict.values),
    "by parameter": (lambda params: dict.fromkeys(params, 0.9), dict.keys),
}


@pytest.mark.parametrize("how", KEPT)
def test_parameters_that_an_optimizer_keeps_in_an_attribute_too_stay_as_they_are(how):
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = Keeping(parameters, *KEPT[how])
    sum(parameters).backward()
    with intercepting([Chosen(skipping=True)]):
        optimizer.step()

        assert [1.0, 1.0] == [p.item() for p in parameters]
    optimizer.step()

    assert [0.0, 0.0] == [p.item() for p in parameters]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (lambda params: [[p] for p in params], lambda nested: [p for each in nested for p in each]),
        (lambda params: nn.ParameterList(params), list),
    ],
    ids=["deeper", "a module"],
)
def test_an_optimizer_that_changes_weights_in_spite_of_it_is_refused(keep, kept):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Keeping([parameter], keep, kept)
    parameter.sum().backward()
    with intercepting([Chosen(skipping=True)]), pytest.raises(parwrap.UsageError) as refusal:
        optimizer.step()

    assert str(refusal.value).startswith(f"Keeping.step() at {__file__}:")
    assert str(refusal.value).endswith(
        " has changed a parameter of shape (2,) in a step that parwrap has to skip. Either step() does not use self.param_groups, or a "
        "hook on it changes weights. Let step() iterate over the parameters in self.param_groups, or train this part without parwrap.amp "
        "and parwrap.accumulate."
    )


class Lookahead(torch.optim.Optimizer):
    """As the many that are around: another optimizer steps, and every second time weights go halfway back."""

    def __init__(self, inner):
        self.optimizer = inner
        self.steps = 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.copy_(self.slow[p].lerp_(p.data, 0.5))
        return loss


class Several(torch.optim.Optimizer):
    def __init__(self, params):
        self.inner = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in params]
        super().__init__(params, {})

    def step(self, closure=None):
        loss = closure() if closure else None
        for each in self.inner:
            each.step()
        return loss


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("build", [lambda p: Lookahead(torch.optim.SGD(p, lr=0.1, momentum=0.9)), Several], ids=["Lookahead", "Several"])
def test_optimizers_in_an_optimizer_are_skipped_with_it(build, closures):
    assert same(trained(build, closures=closures)[0], trained(build, skipped=(0, 2, 3), closures=closures)[0])


def test_optimizers_in_an_optimizer_that_is_skipped_are_not_asked():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer, interceptor = Several(parameters), Chosen(skipping=True)
    with intercepting([interceptor]):
        optimizer.step()

    assert [optimizer] == interceptor.asked
