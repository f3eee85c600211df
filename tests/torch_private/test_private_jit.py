"""What parwrap needs of private names of TorchScript."""

import importlib
import warnings

from parwrap.torch_private import jit


def test_the_operator_of_a_python_function_is_found_by_its_identity():
    find = getattr(importlib.import_module(jit.SCRIPTING), jit.FIND_BUILTIN)

    assert "aten::warn" == find(warnings.warn)
    assert find(lambda: None) is None
