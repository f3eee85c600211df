"""Classes whose training methods run as decorated functions do."""

import pickle

import pytest
import torch
from torch import nn

import parwrap
from parwrap.errors import UsageError
from parwrap.group import current


class Base:
    """A trainer by somebody who never heard of parwrap."""

    def __init__(self):
        self.calls = []

    def train(self, x=1):
        self.calls.append("Base.train")
        return open_group()

    def evaluate(self):
        return open_group()


def open_group():
    """Whether training verbs are changed, as inside the decorators."""
    return hasattr(torch.autograd.backward, "__wrapped__")


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


def test_options_come_as_keywords_or_as_a_mapping_and_go_on_to_subclasses():
    Given = type("Given", (parwrap.DistributedMixin, Base), {"parwrap_options": {"batch": "global"}})

    class Again(Given, seed=1):
        pass

    assert {"batch": "global", "seed": 1} == {**Again.parwrap_options, **Again._keywords}
    with pytest.raises(UsageError, match="batch='all' is not one of the ways to share out batches"):

        class BadValue(Given, batch="all"):
            pass


def test_keywords_that_no_mixin_knows_are_for_the_other_bases():
    class Registered:
        def __init_subclass__(cls, name, **keywords):
            super().__init_subclass__(**keywords)
            cls.name = name

    class Named(parwrap.DistributedMixin, Registered, name="mine", seed=1):
        pass

    assert "mine" == Named.name
    with pytest.raises(TypeError, match="takes no keyword arguments"):

        class Unknown(parwrap.DistributedMixin, Base, sead=1):
            pass


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"parwrap_options": {"sead": 1}}, "Bad.parwrap_options has sead, which none of its mixins takes; they take backend, batch"),
        ({"parwrap_methods": ("trian",)}, "Bad.parwrap_methods names 'trian', which .*Bad.* has not: give it the method, or leave it out"),
    ],
)
def test_what_a_class_cannot_have_is_refused(attributes, text):
    with pytest.raises(UsageError, match=text):
        type("Bad", (parwrap.DistributedMixin, Base), attributes)


@pytest.mark.ranks(2)
def test_a_class_trains_on_ranks():
    class Averaging(parwrap.DistributedMixin):
        def fit(self):
            weight = nn.Parameter(torch.zeros(1))
            torch.optim.SGD([weight], lr=1.0)
            (weight * (parwrap.rank() + 1.0)).sum().backward()
            return weight.grad.item(), current() is not None

    assert (1.5, True) == Averaging().fit()
