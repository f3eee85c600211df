"""Options and bases of classes with mixins, and what such a class cannot have."""

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
    with pytest.raises(UsageError, match="batch='all' is not one of its values"):

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
    with pytest.raises(UsageError, match="Unknown has the class keyword sead, which none of its mixins takes; did you mean 'seed'\\?"):

        class Unknown(parwrap.DistributedMixin, Base, sead=1):
            pass


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"parwrap_options": {"sead": 1}}, "Bad.parwrap_options has sead, which none of its mixins takes; did you mean 'seed'\\?"),
        ({"parwrap_methods": ("trian",)}, "Bad.parwrap_methods names 'trian', which .*Bad.* has not: give it the method, or leave it out"),
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


def test_method_names_are_a_tuple():
    with pytest.raises(UsageError, match=r"^T.parwrap_methods is 'run': give a tuple, as in \('run',\)\.$"):
        type("T", (parwrap.AmpMixin,), {"parwrap_methods": "run", "run": lambda self: None})
