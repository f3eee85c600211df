"""Traits of strategies, which callers ask for instead of names."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import parwrap
from parwrap.options import STRATEGIES
from parwrap.strategies.ddp import DDP
from parwrap.strategies.local_sgd import LocalSGD
from parwrap.strategies.strategy import OneModel, Strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_traits_are_those_of_the_class(name):
    kind, traits = getattr(import_module(f"parwrap.strategies.{name}"), STRATEGIES[name].kind), STRATEGIES[name]

    assert issubclass(kind, Strategy)
    assert issubclass(kind, OneModel) == traits.one_model
    assert (issubclass(kind, DDP) and kind is not LocalSGD) == traits.averages


def test_only_the_options_ask_for_a_strategy_by_its_name():
    package = Path(parwrap.__file__).parent
    asks = re.compile(r"strategy (=|!|in|not)")

    assert ["options.py"] == [path.name for path in package.rglob("*.py") if asks.search(path.read_text())]
