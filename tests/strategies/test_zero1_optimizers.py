"""Sharded optimizers that wrap others, or define their own steps and states."""

import copy

import pytest
import torch

import parwrap
from parwrap.errors import UsageError
from sharded_steps import Renamed, alike, model_of, train


@pytest.mark.ranks(2)
def test_a_step_that_raises_leaves_all_gradients_behind():
    model = model_of()[:3]
    optimizer = Renamed(model.parameters(), 0.1)
    scope = parwrap.distributed(strategy="zero1")
    scope.__enter__()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError) as raised:
        optimizer.step()
    scope.__exit__(raised.type, raised.value, raised.tb)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.ranks(2)
def test_what_cannot_be_sharded_is_said():
    with parwrap.distributed(strategy="zero1"):
        with pytest.raises(UsageError, match="LBFGS steps all parameters as one vector, so its state cannot be sharded"):
            torch.optim.LBFGS(model_of().parameters())
        optimizer = torch.optim.Adam(model_of().parameters())

        @parwrap.rank_zero_only
        def save():
            with pytest.raises(UsageError, match=r"Adam.state_dict\(\) needs all ranks with strategy='zero1'"):
                optimizer.state_dict()

        save()


class Lookahead(torch.optim.Optimizer):
    """Around another: goes half of the way that it has gone in two steps, with slow weights in a state of its own."""

    def __init__(self, inner):
        self.inner, self.taken = inner, 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        self.inner.step(closure)
        self.taken += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.taken % 2 == 0:
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter, and steps less and less."""

    def step(self, closure=None):
        self.state["taken"] = self.state.get("taken", 0) + 1
        self.param_groups[0]["lr"] = 0.1 / self.state["taken"]
        return super().step(closure)


@pytest.mark.ranks(2)
def test_an_optimizer_around_another_goes_on_as_with_ddp():
    def around(parameters):
        return Lookahead(torch.optim.Adam(parameters, lr=0.01))

    def trained(strategy):
        with parwrap.distributed(strategy=strategy, seed=4):
            model, optimizer = train(around, epochs=1, schedule=False)
            assert all(p.grad is not None for p in model.parameters())
            return model, optimizer.state_dict()

    (by_ddp, state), (by_zero1, sharded) = trained("ddp"), trained("zero1")

    assert alike(by_ddp, by_zero1)
    assert state["state"].keys() == sharded["state"].keys()


@pytest.mark.ranks(2)
def test_state_of_no_parameter_state_that_was_looked_at_and_copies_go_on_as_with_ddp():
    def trained(strategy):
        with parwrap.distributed(strategy=strategy, seed=4):
            model = model_of()
            optimizer = Counting(model[2].parameters(), lr=0.1, momentum=0.9)
            train(lambda parameters: optimizer, epochs=1, model=model, schedule=False)
            optimizer.add_param_group({"params": list(model[0].parameters())})
            assert all(len(optimizer.state[p]) < 2 for p in optimizer.param_groups[0]["params"])
            model, optimizer = copy.deepcopy((model, optimizer))
            train(lambda parameters: optimizer, epochs=1, model=model, schedule=False)
            resumed = Counting([{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())}], lr=0.1, momentum=0.9)
            resumed.load_state_dict(optimizer.state_dict())
            train(lambda parameters: resumed, epochs=1, model=model, schedule=False)
        return model, resumed.state_dict()

    (by_ddp, state), (by_zero1, sharded) = trained("ddp"), trained("zero1")

    assert alike(by_ddp, by_zero1)
    assert state["state"].keys() == sharded["state"].keys()
    assert 18 == sharded["state"]["taken"]
