"""Programs as people write them give the numbers of one process with ``batch="whole"``."""

import importlib
import inspect
import io
import numbers
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

import parwrap

THEMES = sorted(path.stem for path in (Path(__file__).parent / "whole_programs").glob("programs_*.py"))


def programs(theme):
    module = importlib.import_module(f"whole_programs.{theme}")
    return {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_")
    }


NAMES = [(theme, name) for theme in THEMES for name in programs(theme)]


def difference(a, b, at=""):
    """Where ``a`` and ``b`` first differ by more than rounding; ``None`` if nowhere."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return at, a.shape, b.shape, a.dtype, b.dtype
        if not a.is_floating_point():
            return None if torch.equal(a, b) else (at, a, b)
        x, y = a.detach().double(), b.detach().double()
        finite = x[x.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 0.0
        return None if torch.allclose(x, y, rtol=2e-4, atol=2e-6 + 2e-5 * size, equal_nan=True) else (at, a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return at, list(a), list(b)
        return next((found for key in a if (found := difference(a[key], b[key], f"{at}.{key}"))), None)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return at, a, b
        return next((found for i, (x, y) in enumerate(zip(a, b, strict=True)) if (found := difference(x, y, f"{at}[{i}]"))), None)
    if isinstance(a, numbers.Real) and isinstance(b, numbers.Real) and type(a) is not bool:
        return None if a == b or (a != a and b != b) or abs(a - b) <= 2e-6 + 2e-4 * abs(a) else (at, a, b)
    return None if type(a) is type(b) and a == b else (at, a, b)


def check(theme, name):
    program = programs(theme)[name]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with mock.patch("torch.distributed.is_initialized", return_value=False):  # torchmetrics would add up over the ranks
            alone = program()
        together = parwrap.distributed(batch="whole")(program)()

    assert difference(alone, together) is None


LIMITS = {
    "exact_type_checks": "type(x) is torch.Tensor is false of rows",
    "numpy_shares_memory": "x.numpy() of rows is a copy",
    "stream_of_the_datasets_own_tensors": "a batch shares no memory with the dataset",
    "in_place_errors_of_autograd": "no error of a backward can be caught and passed over",
}
"""What docs/whole_batches.rst says that a whole batch cannot do."""

LEAVES_SOMETHING = {"compiled_model", "compiled_training_step", "checkpointed_segments"}
"""What torch loads for these stays in the process."""


OF_THE_TABLE = {"programs_views", "programs_indexing", "programs_inplace", "programs_reductions"}
"""The themes whose operations ``test_table.py`` tries one by one."""


def cases(of=None):
    for theme, name in NAMES:
        if (name in LEAVES_SOMETHING) == (of is LEAVES_SOMETHING):
            marks = [pytest.mark.xfail(strict=True, reason=LIMITS[name])] if name in LIMITS else []
            yield pytest.param(theme, name, marks=[*marks, pytest.mark.slow] if theme in OF_THE_TABLE else marks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("theme", "name"), list(cases()))
def test_on_two_ranks_a_program_gives_the_numbers_of_one_process(theme, name):
    check(theme, name)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize(("theme", "name"), list(cases(LEAVES_SOMETHING)))
def test_on_two_fresh_ranks_a_program_gives_the_numbers_of_one_process(theme, name):
    check(theme, name)


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize(("theme", "name"), list(cases()))
def test_on_three_ranks_a_program_gives_the_numbers_of_one_process(theme, name):
    check(theme, name)
