"""Pytest's reports of tests on ranks that fail, hang, die or cannot run."""

import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401 - a pytest inside would drop it again, and no process can import it twice

from inner_pytest import Run, on_two_ranks
from parwrap.testing.rank_pools import Rank, collect
from parwrap.testing.rank_process import RankSetup, Report

pytest_plugins = ["pytester"]


def test_the_rank_that_fails_first_is_shown_last_with_its_values(run: Run):
    result = run(
        """
        @pytest.mark.ranks(2)
        def test_sum():
            if rank() == 1:
                assert [1, 2] == [1, rank() + 2]
            dist.barrier()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_sum _*",
            "[[]rank 1] assert [[]1, 2] == [[]1, 3]",
            "[[]rank 0] afterwards: RuntimeError: *Connection * by peer*",
            "[[]rank 1] ",
            "[[]rank 1]     @pytest.mark.ranks(2)",
            "[[]rank 1]     def test_sum():",
            "[[]rank 1]         if rank() == 1:",
            "[[]rank 1] >           assert [[]1, 2] == [[]1, rank() + 2]",
            "[[]rank 1] E           assert [[]1, 2] == [[]1, 3]",
            "[[]rank 1] E             ",
            "[[]rank 1] E             At index 1 diff: 2 != 3",
            "[[]rank 1] E             Use -v to get more diff",
            "[[]rank 1] ",
            "[[]rank 1] test_inner.py:*: AssertionError",
            "=*short test summary*",
            "FAILED test_inner.py::test_sum - Failed: [[]rank 1] assert [[]1, 2] == [[]1, 3]",
        ],
        consecutive=True,
    )


def test_a_rank_that_does_not_notice_is_killed(run: Run, short_grace: float):
    result = run(on_two_ranks("time.sleep(60 * rank()); raise ValueError('no')"))
    result.stdout.fnmatch_lines(
        ["[[]rank 0] ValueError: no", f"[[]rank 1] was still running {short_grace} s later and was killed", "[[]rank 0] E*ValueError: no"]
    )


def test_asserts_show_values_where_sys_path_does_not_reach(run: Run):
    result = run(on_two_ranks("assert rank() == 4"), "--import-mode=importlib")
    result.stdout.fnmatch_lines(["[[]rank ?] E * assert ? == 4", "[[]rank ?] E * +  where ? = rank()"])


def test_a_hang_ends_with_the_stack_of_every_rank(run: Run):
    started = time.monotonic()
    result = run(
        """
        @pytest.mark.ranks(3)
        def test_passes():
            dist.barrier()

        @pytest.mark.ranks(3, timeout=1)
        def test_stuck():
            if rank() == 1:
                time.sleep(60)
            if rank() == 0:
                dist.barrier()
        """
    )
    assert time.monotonic() - started < 15
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "The ranks did not finish within 1 s. Where each of them is, most recent call first:",
            '[[]rank 0]   File "*distributed_c10d.py", line * in barrier',
            '[[]rank 0]   File "*test_inner.py", line 15 in test_stuck',
            '[[]rank 1]   File "*test_inner.py", line 13 in test_stuck',
            "[[]rank 2] passed, and waits for the others",
        ]
    )


@pytest.mark.slow
def test_a_hang_of_a_process_that_a_rank_has_forked_shows_its_stack_too(run: Run):
    result = run(
        """
        def stuck(): time.sleep(60)

        @pytest.mark.ranks(1, timeout=3)
        def test_waits():
            worker = multiprocessing.get_context("fork").Process(target=stuck)
            worker.start()
            worker.join()
        """
    )
    result.stdout.fnmatch_lines(
        [
            '[[]rank 0]   File "*test_inner.py", line * in test_waits',
            "[[]rank 0] In a process that it forked (pid *, S (sleeping) in *, blocks signals 0000000000000000 and catches *):",
            '[[]rank 0]   File "*test_inner.py", line 6 in stuck',
        ]
    )


def test_a_time_limit_may_be_over_before_the_ranks_have_started(run: Run):
    result = run("@pytest.mark.ranks(2, timeout=1e-6)\ndef test_it(): pass")
    result.stdout.fnmatch_lines(["The ranks did not finish within 1e-06 s.*", "[[]rank 0] *", "[[]rank 1] *"])


@pytest.mark.parametrize(
    ("death", "shown"),
    [
        ("os._exit(7)", ["ended with exit code 7"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["was killed by SIGKILL"]),
        ("ctypes.string_at(0)", ["was killed by SIGSEGV", '[[]rank 1]   File "*test_inner.py", line * in test_it']),
    ],
)
def test_a_rank_that_dies_is_named_with_how_it_died(run: Run, death: str, shown: list[str]):
    result = run(on_two_ranks(f"if rank() == 1: {death}\ndist.barrier()"))
    result.assert_outcomes(failed=1)
    how, *stack = shown
    result.stdout.fnmatch_lines([f"[[]rank 1] {how} before the test finished", "[[]rank 0] afterwards: RuntimeError: *", *stack])


def test_a_death_is_blamed_before_the_errors_by_which_the_others_noticed_it(tmp_path: Path):
    sentinels = list(Pipe())  # neither is ever written to

    def started(rank: int) -> tuple[Rank, Connection]:
        setup = RankSetup(rank, 2, tmp_path, (), {}, True)
        setup.stacks.touch()
        ours, theirs = Pipe()
        process = SimpleNamespace(pid=0, sentinel=sentinels.pop(), exitcode=7, join=lambda timeout=None: None, kill=lambda: None)
        return Rank(setup, process, ours), theirs

    (other, others_end), (dead, deads_end) = started(0), started(1)
    noticed = Report(0, "failed", time.time(), "Connection closed by peer")
    deads_end.close()
    showing_it_takes_a_while = threading.Timer(0.2, others_end.send, [noticed])
    showing_it_takes_a_while.start()

    assert [report.headline for report in collect([other, dead], 5)] == [
        "ended with exit code 7 before the test finished",
        "Connection closed by peer",
    ]


@pytest.mark.parametrize(
    ("leave", "outcome", "shown"),
    [
        ("pytest.skip('not today')", "skipped", "SKIPPED*test_inner.py:*: not today"),
        ("pytest.importorskip('no_such_module')", "skipped", "SKIPPED*test_inner.py:*: could not import 'no_such_module'*"),
        ("raise unittest.SkipTest('not here')", "skipped", "SKIPPED*test_inner.py:*: not here"),
        ("pytest.xfail('known')", "xfailed", "XFAIL test_inner.py::test_it - *known"),
    ],
)
def test_one_rank_can_skip_or_xfail_the_test(run: Run, leave: str, outcome: str, shown: str):
    result = run(on_two_ranks(f"if rank() == 1: {leave}\ndist.barrier()"), "-rsx")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([shown])


def test_xfail_expects_the_exception_of_a_rank(run: Run):
    result = run(
        """
        class Known(LookupError):
            def __init__(self, code, why):
                super().__init__(code, why)

        def fails(kind, *args):
            if rank() == 1:
                raise kind(*args)
            dist.barrier()

        @pytest.mark.xfail(raises=(OSError, LookupError))
        @pytest.mark.ranks(2)
        def test_known():
            fails(Known, 3, "known")

        @pytest.mark.xfail(raises=(OSError, LookupError))
        @pytest.mark.ranks(2)
        def test_another():
            fails(ValueError, "another")

        @pytest.mark.xfail(raises=LookupError)
        @pytest.mark.ranks(2)
        def test_of_a_local_class():
            raise type("Local", (Known,), {})(1, "local")
        """,
        "-rxf",
    )
    result.assert_outcomes(xfailed=2, failed=1)
    result.stdout.fnmatch_lines(["FAILED test_inner.py::test_another - Failed: [[]rank 1] ValueError: another"])


def test_the_output_of_each_rank_is_a_section_of_its_own(run: Run):
    result = run(
        on_two_ranks(
            """
            print("I am", rank())
            print("ouch", rank(), file=sys.stderr)
            assert False
            """
        )
    )
    result.stdout.fnmatch_lines(
        [
            *("*Captured stdout of rank 0 call*", "I am 0", "*Captured stderr of rank 0 call*", "ouch 0"),
            *("*Captured stdout of rank 1 call*", "I am 1", "*Captured stderr of rank 1 call*", "ouch 1"),
        ],
        consecutive=True,
    )


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ("ranks", "does not say how many ranks to run on"),
        ("ranks()", "does not say how many ranks to run on"),
        ("ranks(0)", "takes a positive number of ranks, not 0"),
        ("ranks('2')", "takes a positive number of ranks, not '2'"),
        ("ranks(True)", "takes a positive number of ranks, not True"),
        ("ranks(2, 60)", "takes one positional argument, not (2, 60)"),
        ("ranks(2, timeout=0)", "takes a positive timeout in seconds, not 0"),
        ("ranks(2, timeout='1 min')", "takes a positive timeout in seconds, not '1 min'"),
        ("ranks(2, fresh=1)", "takes True or False for fresh, not 1"),
        ("ranks(2, backend='gloo')", "has no option backend"),
    ],
)
def test_an_invalid_mark_is_refused(run: Run, mark: str, problem: str):
    result = run(f"@pytest.mark.{mark}\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    advice = "Write @pytest.mark.ranks(2) or @pytest.mark.ranks(2, timeout=60) on a plain function or method."
    assert f"@pytest.mark.ranks {problem}. {advice}" in result.stdout.lines


ASYNC = """
@pytest.mark.ranks(2)
async def test_it(): pass
"""
TEST_CASE = """
class TestIt(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_it(self): pass
"""


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param(ASYNC, "cannot run an async test, because the ranks run no event loop.", id="async"),
        pytest.param(TEST_CASE, "cannot run a method of a unittest.TestCase.", id="TestCase"),
    ],
)
def test_a_test_that_ranks_cannot_run_is_refused(run: Run, source: str, problem: str):
    result = run(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.ranks {problem} Write @pytest.mark.ranks(2)*"])


OPEN_FILE_AS_ARGUMENT = """
@pytest.fixture
def log(): return sys.stdout

@pytest.mark.ranks(2)
def test_it(log): pass
"""
OPEN_FILE_IN_SELF = """
class TestIt:
    def setup_method(self): self.log = sys.stdout

    @pytest.mark.ranks(2)
    def test_it(self): pass
"""


@pytest.mark.parametrize(
    ("source", "named"),
    [
        pytest.param(OPEN_FILE_AS_ARGUMENT, "argument 'log'", id="argument"),
        pytest.param(OPEN_FILE_IN_SELF, "attribute 'self.log'", id="attribute"),
    ],
)
def test_a_value_that_does_not_pickle_is_named(run: Run, source: str, named: str):
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"The {named} of test_it cannot be sent to the ranks, which are separate processes: cannot pickle *. Create it inside "
            "the test, or let its fixture return what it is created from, such as a path or a number."
        ]
    )
