"""Pytest's own fixtures in tests on several ranks: each rank has its own, as far as possible."""

import logging
import os
import sys
import warnings

import pytest
import torch  # imported here, because an inner pytest would import it again in each test

import parwrap
from inner_pytest import Run

pytest_plugins = ["pytester"]


@pytest.mark.ranks(2)
def test_capsys_captures_what_its_rank_prints(capsys):
    print(f"by rank {parwrap.rank()}")
    print("error", file=sys.stderr)

    assert (f"by rank {parwrap.rank()}\n", "error\n") == capsys.readouterr()
    with capsys.disabled():
        print("not captured")
    assert ("", "") == capsys.readouterr()


@pytest.mark.ranks(2)
def test_capfd_captures_what_its_rank_writes(capfd):
    os.write(1, b"by the system")

    assert ("by the system", "") == capfd.readouterr()


@pytest.mark.ranks(2)
def test_the_fixtures_that_capture_bytes_do_so(capsysbinary):
    print("a")

    assert b"a\n" == capsysbinary.readouterr().out


@pytest.mark.ranks(2)
def test_caplog_has_what_its_rank_logs(caplog):
    with caplog.at_level(logging.INFO):
        logging.getLogger("mine").info("by rank %d", parwrap.rank())
    logging.getLogger("mine").info("too quiet")
    logging.getLogger("mine").warning("loud")

    assert [f"by rank {parwrap.rank()}", "loud"] == caplog.messages
    assert caplog.messages == [record.message for record in caplog.get_records("call")]
    caplog.clear()
    assert "" == caplog.text


@pytest.mark.ranks(2)
def test_monkeypatch_is_undone_on_its_rank(monkeypatch):
    monkeypatch.setenv("CHANGED", "1")
    monkeypatch.setattr(torch, "save", print)

    assert [("1", True)] * 2 == parwrap.gather((os.environ["CHANGED"], torch.save is print))


@pytest.mark.ranks(2)
def test_recwarn_has_what_its_rank_warns_of(recwarn):
    warnings.warn(f"by rank {parwrap.rank()}", stacklevel=1)

    assert f"by rank {parwrap.rank()}" == str(recwarn.pop(UserWarning).message)
    assert [] == list(recwarn)


@pytest.mark.ranks(2)
def test_tmp_path_factory_makes_folders_of_each_rank(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b", numbered=False)]

    assert all(folder.is_dir() for folder in folders)
    assert 4 == len({str(folder) for each in parwrap.gather(folders) for folder in each})


@pytest.mark.parametrize("number", [3])
@pytest.mark.ranks(2)
def test_request_names_the_test(request, number):
    assert "test_request_names_the_test[3]" == request.node.name
    assert request.node.nodeid.endswith("::test_request_names_the_test[3]")
    assert {"request", "number"} <= {*request.fixturenames}
    with pytest.raises(AttributeError, match=r"request\.getfixturevalue does not exist in a test marked with ranks: .*request\.node"):
        request.getfixturevalue("tmp_path")


@pytest.fixture(scope="session")
def made_once():
    return {"by": os.getpid()}


@pytest.mark.ranks(2)
def test_a_session_fixture_is_made_once_in_the_pytest_process(made_once):
    assert 1 == len({each["by"] for each in parwrap.gather(made_once)})
    assert os.getpid() != made_once["by"]


def test_what_a_test_has_not_read_is_shown_with_its_rank_zeros_first(run: Run):
    result = run(
        """
        @pytest.mark.ranks(2)
        def test_it(capsys):
            print(f"by {rank()}")
            capsys.readouterr()
            print(f"unread by {rank()}")
            assert 0
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*stdout of rank 0*", "unread by 0", "*stdout of rank 1*", "unread by 1"])
    result.stdout.no_fnmatch_line("by *")


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("lambda: None", "made.<locals>.make.<locals>.<lambda> is defined inside a function, where the ranks cannot find it"),
        ("[Local()]", "made.<locals>.make.<locals>.Local is defined inside a function, where the ranks cannot find it"),
        ("(each for each in [])", "cannot pickle 'generator' object"),
    ],
    ids=["a function", "an object of a class", "a generator"],
)
def test_a_fixture_that_cannot_be_sent_is_named_with_what_to_do(run: Run, made: str, named: str):
    result = run(
        f"""
        @pytest.fixture
        def made():
            def make():
                class Local: pass
                return {made}
            return make()

        @pytest.mark.ranks(2)
        def test_it(made): pass
        """
    )
    result.assert_outcomes(failed=1)
    own = "The argument 'made' of test_it cannot be sent to the ranks, which are separate processes"
    result.stdout.fnmatch_lines([f"{own}: {named}. Create it inside *"])


@pytest.mark.parametrize("name", ["record_property", "pytestconfig"])
def test_a_fixture_of_pytest_itself_that_ranks_lack_is_named_with_what_to_do(run: Run, name: str):
    result = run(f"@pytest.mark.ranks(2)\ndef test_it({name}): pass")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"The argument '{name}' of test_it *: it is a fixture of pytest itself, which ranks do not have. Use *"])
    result.stdout.no_fnmatch_line("*During handling*")


def test_a_parameter_that_cannot_be_sent_is_no_fixture_of_pytest(run: Run):
    result = run("@pytest.mark.ranks(2)\n@pytest.mark.parametrize('f', [lambda: 0])\ndef test_it(f): pass")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["The argument 'f' of test_it* cannot be sent to the ranks, *. Create it inside the test, or *"])
