"""Options and bases of classes with mixins, and invalid ones."""

import pytest
import torch

import parwrap
from mixed_in import Base, first_of
from parwrap.errors import UsageError


class Drawing:
    """Another one, which draws a number."""

    def train(self):
        return torch.rand(1).item()


def test_options_come_as_keywords_or_as_a_mapping_and_go_on_to_subclasses():
    Given = type("Given", (parwrap.DistributedMixin, Drawing), {"parwrap_options": {"seed": 5}})

    class Keyword(Given, seed=6):
        pass

    class Mapping(Keyword):
        parwrap_options = {"batch": "global"}  # noqa: RUF012

    class MappingAgain(Mapping):
        parwrap_options = {"seed": 7}  # noqa: RUF012

    assert [first_of(seed) for seed in (5, 6, 6, 7)] == [cls().train() for cls in (Given, Keyword, Mapping, MappingAgain)]
    with pytest.raises(UsageError, match="batch='all' is not a valid value"):

        class BadValue(Given, batch="all"):
            pass


def test_keywords_that_no_mixin_knows_are_for_the_other_bases():
    class Registered:
        def __init_subclass__(cls, name, **keywords):
            super().__init_subclass__(**keywords)
            cls.name = name

    class Named(parwrap.DistributedMixin, Registered, name="mine", seed=1, parwrap_methods=()):
        pass

    assert "mine" == Named.name
    with pytest.raises(UsageError, match="Unknown has the class keyword sead, which none of its mixins takes; did you mean 'seed'\\?"):

        class Unknown(parwrap.DistributedMixin, Base, sead=1):
            pass


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"parwrap_options": {"sead": 1}}, "Bad.parwrap_options has sead, which none of its mixins takes; did you mean 'seed'\\?"),
        (
            {"parwrap_methods": ("trian",)},
            ("Bad.parwrap_methods names 'trian', which .*Bad.* does not have: add the method, or remove the name"),
        ),
    ],
)
def test_what_a_class_cannot_have_is_refused(attributes, text):
    with pytest.raises(UsageError, match=text):
        type("Bad", (parwrap.DistributedMixin, Base), attributes)


@pytest.mark.parametrize(
    ("mixin", "keywords", "text"),
    [
        (
            parwrap.AmpMixin,
            {"dtpye": "fp16"},
            "T has the class keyword dtpye, which none of its mixins takes; did you mean 'dtype'?",
        ),
        (parwrap.AccumulateMixin, {"step": 4}, "T has the class keyword step, which none of its mixins takes; did you mean 'steps'?"),
    ],
)
def test_a_keyword_that_nobody_takes_is_named(mixin, keywords, text):
    with pytest.raises(UsageError) as refusal:
        type("T", (mixin,), {}, **keywords)

    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("keyword", [False, True])
def test_method_names_are_a_tuple(keyword):
    names = {"parwrap_methods": "run"}
    with pytest.raises(UsageError, match=r"^T.parwrap_methods is 'run': use a tuple, such as \('run',\)\.$"):
        type("T", (parwrap.AmpMixin,), {"run": lambda self: None, **({} if keyword else names)}, **(names if keyword else {}))


def test_methods_are_named_by_a_class_keyword_too():
    class Named(parwrap.DistributedMixin, seed=5, parwrap_methods=("run",)):
        def run(self):
            return torch.rand(1).item()

    class Inheriting(Named, seed=6):
        pass

    assert [first_of(5), first_of(6)] == [Named().run(), Inheriting().run()]
    assert ("run",) == Inheriting.parwrap_methods
    with pytest.raises(UsageError, match=r"Typo\.parwrap_methods names 'rnu', which "):

        class Typo(Named, parwrap_methods=("rnu",)):
            pass


@pytest.mark.parametrize(
    ("mixins", "attributes", "text"),
    [
        (
            (parwrap.DistributedMixin, parwrap.AmpMixin),
            {"run": lambda self: None, "train_model": lambda self: None},
            "T has none of the methods that DistributedMixin and AmpMixin would decorate: train, fit. Add one, or name your own with the "
            "class keyword, as in parwrap_methods=('train_model',). If this is a base class and its subclasses have the methods, set "
            "parwrap_methods=().",
        ),
        (
            (parwrap.SyncBNMixin, torch.nn.Module),
            {},
            "T has none of the methods that SyncBNMixin would decorate: train, fit (the train(mode) of a module only sets its mode). ",
        ),
        (
            (parwrap.DistributedMixin, parwrap.EvaluateMixin),
            {"fit": lambda self: None, "run_validation": lambda self: None},
            "T has none of the methods that EvaluateMixin would decorate: evaluate, validate, test. Add one, or name your own with the "
            "class keyword, as in parwrap_evaluate_methods=('run_validation',). ",
        ),
        (
            (parwrap.EvaluateMixin,),
            {"evaluate": lambda self: None, "parwrap_methods": ("evaluate",)},
            "T has parwrap_methods, but no mixin that uses it: its mixins use parwrap_evaluate_methods.",
        ),
    ],
)
def test_a_class_on_which_a_mixin_would_do_nothing_is_an_error(mixins, attributes, text):
    with pytest.raises(UsageError) as refusal:
        type("T", mixins, attributes)

    assert str(refusal.value).startswith(text)


def test_a_base_class_may_leave_the_methods_to_its_subclasses():
    class WithSeed(parwrap.DistributedMixin, seed=5, parwrap_methods=()):
        pass

    class Trainer(WithSeed, Drawing):
        pass

    assert first_of(5) == Trainer().train()
    with pytest.raises(UsageError, match="Empty has none of the methods that DistributedMixin would decorate"):

        class Empty(WithSeed):
            pass
