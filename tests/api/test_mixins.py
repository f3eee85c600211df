"""Classes whose training methods run as decorated functions do."""

import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from mixed_in import Base, first_of, open_group
from parwrap.errors import UsageError
from parwrap.group.group import alone, current


class Trainer(parwrap.DistributedMixin, Base, batch="global"):
    pass


class Overriding(Trainer, seed=3):
    parwrap_methods = ("pretrain",)

    def train(self, x=1):
        """Trains twice."""
        self.calls.append("Overriding.train")
        return super().train(x)

    def pretrain(self):
        return open_group()


def test_an_inherited_method_runs_in_the_scope_and_others_do_not():
    assert Trainer().train()
    assert not Trainer().evaluate()
    assert not Base().train()


def test_an_overriding_method_calls_the_next_one_within_the_same_scope():
    trainer = Overriding()

    assert trainer.train(x=2)
    assert ["Overriding.train", "Base.train"] == trainer.calls
    assert "Trains twice." == Overriding.train.__doc__


def test_methods_named_in_parwrap_methods_run_in_the_scope_too():
    assert Overriding().pretrain()


def test_methods_that_a_base_names_are_those_of_its_subclasses_too():
    class Naming(Overriding, seed=8):
        parwrap_methods = ("draw",)

        def draw(self):
            return torch.rand(1).item()

        def pretrain(self):
            return self.draw()

    assert [first_of(8)] * 2 == [Naming().draw(), Naming().pretrain()]


def test_class_methods_are_inherited_and_overridden_too():
    class Base:
        @classmethod
        def fit(cls):
            return cls.__name__, torch.rand(1).item()

    class Fitting(parwrap.DistributedMixin, Base, seed=5):
        pass

    class Overriding(Fitting, seed=6):
        @classmethod
        def fit(cls):
            return super().fit()

    assert [("Fitting", first_of(5)), ("Overriding", first_of(6))] == [Fitting.fit(), Overriding.fit()]


def test_a_class_that_comes_in_between_is_not_passed_over():
    class Between(Base):
        def train(self, x=1):
            self.calls.append("Between.train")
            return super().train(x)

    class Diamond(Trainer, Between):
        pass

    trainer = Diamond()
    assert trainer.train()
    assert ["Between.train", "Base.train"] == trainer.calls


def test_an_instance_is_pickled_as_any():
    trainer = Overriding()
    trainer.train()

    assert trainer.calls == pickle.loads(pickle.dumps(trainer)).calls


def test_the_mode_of_a_module_is_no_training_method():
    class Model(parwrap.DistributedMixin, nn.Linear, batch="global"):
        def fit(self):
            return open_group()

    assert Model.train is nn.Module.train
    assert Model(1, 1).fit()


def test_an_overridden_mode_of_a_module_is_no_training_method_either():
    class Frozen(parwrap.DistributedMixin, nn.Module, batch="global"):
        def train(self, mode=True):
            self.was_open = open_group()
            return super().train(mode)

        def fit(self):
            pass

    class Passing(Frozen):
        def train(self, *args):
            return super().train(*args)

    class Named(Frozen):
        parwrap_methods = ("train",)

    for cls, is_open in ((Frozen, False), (Passing, False), (Named, True)):
        model = cls()
        assert not model.eval().training
        assert is_open == model.was_open


def test_a_module_may_have_a_training_method_called_train():
    class Trainer(parwrap.DistributedMixin, nn.Linear, batch="global"):
        def train(self, epochs=3):
            return open_group()

    class Other(parwrap.DistributedMixin, nn.Linear, batch="global"):
        def train(self):
            return open_group()

    assert [True, True] == [Trainer(1, 1).train(2), Other(1, 1).train()]


class Overflowing(parwrap.AmpMixin, dtype="fp16", init_scale=1024.0):
    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, factor):
        self.optimizer.zero_grad()
        (self.model(torch.ones(1, 2)).float().mean() * factor).backward()
        self.optimizer.step()
        return parwrap.amp_state().skipped_steps

    def fit(self, factor):
        return self.train(factor)

    __hash__ = None


def test_each_instance_has_a_loss_scale_of_its_own_which_its_methods_share():
    one, other = Overflowing(), Overflowing()

    assert [1, 0] == [one.train(1e9), other.train(1.0)]
    assert [2, 0] == [one.fit(1e9), other.fit(1.0)]
    assert 0 == Overflowing().train(1.0)
    assert vars(one).keys() == vars(pickle.loads(pickle.dumps(one))).keys() == {"model", "optimizer"}


def test_nothing_is_kept_of_an_instance_that_is_gone():
    trainer = Overflowing()
    trainer.train(1e9)
    gone = weakref.ref(trainer)
    del trainer

    assert gone() is None
    assert 0 == Overflowing().train(1.0)


def test_static_methods_are_inherited_and_called_on_the_class_too():
    class Base:
        @staticmethod
        def train(x):
            return x, torch.rand(1).item()

    class Inheriting(parwrap.DistributedMixin, Base, seed=5):
        pass

    class Overriding(Inheriting):
        @staticmethod
        def train(x):
            return Base.train(x + 1)

    assert [(1, first_of(5))] * 2 == [Inheriting.train(1), Inheriting().train(1)]
    assert (2, first_of(5)) == Overriding.train(1)


@pytest.mark.ranks(2)
def test_a_class_trains_on_ranks():
    class Averaging(parwrap.DistributedMixin):
        def fit(self):
            weight = nn.Parameter(torch.zeros(1))
            torch.optim.SGD([weight], lr=1.0)
            (weight * (parwrap.rank() + 1.0)).sum().backward()
            return weight.grad.item(), current() is not None

    assert (1.5, True) == Averaging().fit()


class Loop:
    """A plain trainer with an epoch a call, which ``fit`` calls."""

    def __init__(self, batch_size):
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        samples = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.loader = DataLoader(TensorDataset(samples), batch_size=batch_size, shuffle=True)

    def train(self):
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), x[:, :1]).backward()
            self.optimizer.step()

    def fit(self, epochs=2):
        for _ in range(epochs):
            self.train()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)])
def test_methods_that_call_each_other_are_in_the_scopes_once(size):
    with alone(), torch.random.fork_rng():
        torch.manual_seed(4)
        expected = Loop(16).fit()

    class Fitting(parwrap.DistributedMixin, parwrap.SyncBNMixin, parwrap.AccumulateMixin, Loop, batch="global", seed=9, steps=4):
        def train(self):
            super().train()

    class Overriding(parwrap.AmpMixin, Fitting, seed=4, steps=2, level="O0"):
        def __init__(self):
            pass

        def train(self):
            super().train()

        def fit(self):
            Loop.__init__(self, 8)
            return super().fit()

    trainer = Overriding()
    for _ in range(2):
        assert (trainer.fit() - expected).abs().max() < 1e-12


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)])
def test_an_instance_inside_another_follows_the_rule_of_the_decorators(size):
    class Inner(parwrap.AccumulateMixin, Loop, steps=2):
        pass

    class DiLoCo(parwrap.AccumulateMixin, steps=4):
        def fit(self, inner):
            return inner.fit()

    with pytest.raises(UsageError, match=r"parwrap.accumulate\(2\) cannot be opened inside parwrap.accumulate\(4\), because a batch"):
        DiLoCo().fit(Inner(8))
