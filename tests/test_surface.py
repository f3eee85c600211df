import subprocess
import sys

import pytest

import parwrap

IMPORT = "import sys; before = set(sys.modules); import parwrap; print(*sorted(set(sys.modules) - before))"


def test_every_public_name_is_there_and_documented():
    assert sorted(set(parwrap.__all__)) == sorted(parwrap.__all__)
    for name in parwrap.__all__:
        assert getattr(parwrap, name).__doc__, name
    assert set(parwrap.__all__) <= set(dir(parwrap))


def test_the_names_of_data_are_there_and_documented():
    for name in parwrap.data.__all__:
        assert getattr(parwrap.data, name).__doc__, name
    assert set(parwrap.data.__all__) <= set(dir(parwrap.data))
    with pytest.raises(AttributeError, match=r"module .parwrap\.data. has no attribute .pad."):
        _ = parwrap.data.pad


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'parwrap' has no attribute 'distribute'"):
        _ = parwrap.distribute


@pytest.mark.parametrize(("code", "imports_torch"), [(IMPORT, False), (IMPORT.replace("parwrap;", "parwrap; parwrap.rank;"), True)])
def test_importing_parwrap_imports_nothing_else_until_a_name_is_used(code, imports_torch):
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert "parwrap" in imported
    assert imports_torch == ("torch" in imported)
