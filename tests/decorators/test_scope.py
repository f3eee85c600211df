import functools
import inspect
import json
import pickle
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from parwrap.decorators.scope import ScopeDecorator, describe, module_of
from parwrap.errors import UsageError

trace = []


class scoped(ScopeDecorator):
    layer = 1

    def __init__(self, *, word="scoped"):
        super().__init__()
        self.word = word

    @contextmanager
    def scope(self, call):
        trace.append(f"+{self.word}")
        try:
            yield self.word
        finally:
            trace.append(f"-{self.word}")


class deeper(scoped):
    layer = 2


@scoped
def train(epochs: int, *, rate: float = 0.1) -> int:
    """Trains."""
    trace.append("train")
    return epochs


@pytest.fixture(autouse=True)
def _fresh_trace():
    trace.clear()


def test_bare():
    assert train(3) == 3
    assert trace == ["+scoped", "train", "-scoped"]


class first_without_its_name(scoped):
    def __init__(self, word="scoped"):
        super().__init__(word=word)


def test_the_first_option_may_be_given_without_its_name_where_the_signature_says_so():
    assert first_without_its_name("other")(lambda: trace.append("body"))() is None
    assert first_without_its_name(lambda: trace.append("body"))() is None
    assert trace == ["+other", "body", "-other", "+scoped", "body", "-scoped"]


def test_called_with_options():
    assert scoped(word="other")(lambda: trace.append("body"))() is None
    assert trace == ["+other", "body", "-other"]


def test_as_a_with_block_also_nested_and_reused():
    block = scoped()
    with block as entered, block:
        assert entered == "scoped"
    assert trace == ["+scoped", "+scoped", "-scoped", "-scoped"]


def test_on_methods_of_all_kinds():
    class Trainer:
        @scoped
        def method(self):
            return self

        @scoped
        @classmethod
        def of_class(cls):
            return cls

        @staticmethod
        @scoped
        def static():
            return "static"

    trainer = Trainer()
    assert (trainer, Trainer, "static") == (trainer.method(), trainer.of_class(), trainer.static())
    assert trace == ["+scoped", "-scoped"] * 3


def test_a_partial_can_be_decorated():
    assert scoped(functools.partial(lambda x: x, 2))() == 2


def test_the_decorated_function_keeps_what_it_is():
    assert (train.__name__, train.__doc__, str(inspect.signature(train))) == (
        "train",
        "Trains.",
        "(epochs: int, *, rate: float = 0.1) -> int",
    )
    assert pickle.loads(pickle.dumps(train)) is train


def test_the_scope_ends_when_the_function_raises():
    with pytest.raises(ZeroDivisionError):
        scoped(lambda: 1 / 0)()
    assert trace == ["+scoped", "-scoped"]


def test_the_order_of_stacking_does_not_matter():
    def body():
        trace.append("body")

    scoped(deeper(word="deeper")(body))()
    one, _ = list(trace), trace.clear()
    deeper(word="deeper")(scoped(body))()

    assert one == trace == ["+scoped", "+deeper", "body", "-deeper", "-scoped"]


def test_somebody_elses_decorator_in_between_keeps_its_place():
    def noted(function):
        @functools.wraps(function)
        def wrapper():
            trace.append("noted")
            function()

        return wrapper

    scoped(noted(deeper(word="deeper")(lambda: trace.append("body"))))()

    assert trace == ["+scoped", "noted", "+deeper", "body", "-deeper", "-scoped"]


def test_stacked_decorators_add_one_frame():
    decorated = scoped(deeper(word="deeper")(lambda: len(inspect.stack())))

    assert decorated() == len(inspect.stack()) + 2


def test_the_module_of_a_function_or_of_a_block():
    class seen(scoped):
        @contextmanager
        def scope(self, call):
            yield module_of(call.function)

    with seen() as of_block, ExitStack() as stack:
        assert [__name__, __name__] == [of_block, stack.enter_context(seen())]
    assert "json" == module_of(json.dumps)


async def coroutine():
    pass


def generator():
    yield


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (type("Model", (), {}), r"cannot decorate Model.*: it is a class. Instead, decorate the method that trains"),
        (coroutine, r"cannot decorate coroutine \(.*test_scope.py:\d+\): it is an async function.*decorate a plain function"),
        (generator, r"cannot decorate generator .*: it is a generator function.*decorate the function that loops over it"),
        (None, "by their names: None is neither a function nor a named option"),
        (5, r"by their names: 5 is neither a function nor a named option. Write @parwrap.scoped\(option=value\)"),
    ],
)
def test_what_a_scope_cannot_serve_is_refused(function, text):
    with pytest.raises(UsageError, match=text):
        scoped(function)


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        (generator, r"make \(.*test_scope.py:\d+\) returns a generator, .*: return list\(\.\.\.\)\."),
        (coroutine, r"returns a coroutine, .*: return asyncio\.run"),
    ],
)
def test_a_result_that_would_run_after_the_scope_is_refused(begin, text):
    made = begin()

    @scoped
    def make():
        return made

    with pytest.raises(UsageError, match=text):
        make()
    made.close()


def test_a_generator_of_a_library_is_returned():
    @scoped
    def make():
        return nn.Linear(2, 1).parameters()

    assert [(1, 2), (1,)] == [tuple(p.shape) for p in make()]


def test_a_function_under_a_decorator_of_a_library_is_named_with_its_own_line():
    @torch.no_grad()
    def evaluated():
        pass

    line = inspect.unwrap(evaluated).__code__.co_firstlineno
    assert describe(evaluated).endswith(f".evaluated ({__file__}:{line})")
