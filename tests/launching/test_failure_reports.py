"""What the user reads when ranks fail."""

import json
import signal
import sys
from dataclasses import asdict, replace

import pytest

from parwrap.errors import LaunchError, LockstepError
from parwrap.launching.failures import Failure, Recorder, read_failures, report


def failure(
    rank: int, time: float, ending: str = "raised", status: int = 1, text: str = "", exception: str = "", attempt: int = 0
) -> Failure:
    return Failure(rank, 2, attempt, time, ending, status, text, exception)  # type: ignore[arg-type]


UNHAPPY = failure(1, time=1.0, text="Traceback ...\nValueError: unhappy", exception="ValueError: unhappy")
ALSO_UNHAPPY = failure(0, time=2.0, text="Traceback elsewhere ...\nValueError: unhappy", exception="ValueError: unhappy")
DESERTED = failure(0, time=2.0, text="Traceback ...\nRuntimeError: closed by peer", exception="RuntimeError: closed by peer")
PLACED = replace(DESERTED, place="train.py:31")
KILLED = failure(1, time=1.0, ending="killed", status=128 + 9)
ABORTED = failure(1, time=1.0, ending="killed", status=128 + 6)
LEFT = failure(1, time=1.0, ending="exited", status=3)
INTERRUPTED = [
    failure(rank, time, status=130, text=f"Traceback {rank} ...\nKeyboardInterrupt", exception="KeyboardInterrupt")
    for rank, time in ((1, 1.0), (0, 3.0))
]
SPOKE = failure(1, time=1.0, ending="exited", status=1, text="no data")


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ([UNHAPPY], "rank 1 of 2 failed:\nTraceback ...\nValueError: unhappy"),
        ([UNHAPPY, ALSO_UNHAPPY], "rank 1 of 2 failed:\nTraceback ...\nValueError: unhappy"),
        (
            [UNHAPPY, DESERTED],
            "rank 0 of 2 failed later: RuntimeError: closed by peer\nrank 1 of 2 failed:\nTraceback ...\nValueError: unhappy",
        ),
        ([KILLED, DESERTED], "rank 0 of 2 failed later: RuntimeError: closed by peer\nrank 1 of 2 was killed by SIGKILL (out of memory?)"),
        ([ABORTED], "rank 1 of 2 was killed by SIGABRT"),
        ([DESERTED, KILLED], "rank 1 of 2 later was killed by SIGKILL (out of memory?)\n" + str(DESERTED)),
        ([INTERRUPTED[0], DESERTED, INTERRUPTED[1]], "rank 0 of 2 was interrupted:\nTraceback 0 ...\nKeyboardInterrupt"),
        ([UNHAPPY, INTERRUPTED[1]], "rank 0 of 2 failed later: KeyboardInterrupt\n" + str(UNHAPPY)),
        ([KILLED, PLACED], "rank 0 of 2 failed later at train.py:31: RuntimeError: closed by peer\n" + str(KILLED)),
        ([LEFT], "rank 1 of 2 exited with code 3"),
        ([LEFT, failure(0, time=2.0, ending="exited", status=3)], ""),
        ([failure(0, time=1.0, ending="exited", status=3)], ""),
        ([SPOKE], "rank 1 of 2 exited with code 1: no data"),
        ([SPOKE, failure(0, time=2.0, ending="exited", status=1, text="no data")], "no data"),
        ([LEFT, DESERTED], "rank 0 of 2 failed later: RuntimeError: closed by peer\nrank 1 of 2 exited with code 3"),
        ([SPOKE, DESERTED], "rank 0 of 2 failed later: RuntimeError: closed by peer\nrank 1 of 2 exited with code 1: no data"),
    ],
)
def test_the_first_failure_has_the_last_word(failures, text):
    assert report(failures) == text


@pytest.mark.parametrize(
    ("exception", "lost"),
    [
        ("LockstepError: the ranks have come apart", True),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer", True),
        ("RuntimeError: shapes differ", False),
        ("KeyboardInterrupt", False),
    ],
)
def test_a_failure_tells_whether_another_rank_ended_first(exception, lost):
    assert lost == failure(0, 1.0, exception=exception).lost_another


def test_failures_are_read_in_the_order_of_time_from_the_last_attempt(tmp_path):
    for each in (DESERTED, UNHAPPY):
        each.write(tmp_path)
    assert [each.rank for each in read_failures(tmp_path)] == [1, 0]

    again = failure(0, time=9.0, attempt=1)
    again.write(tmp_path)
    (tmp_path / "1-1.part").write_text("{")  # of a rank that was killed in the middle of it

    assert read_failures(tmp_path) == [again]


@pytest.mark.parametrize(
    ("ending", "status", "first"), [("killed", 128 + 9, 1), ("exited", 3, 1), ("killed", 128 + 6, 0)], ids=["killed", "left", "aborted"]
)
def test_who_ended_without_a_report_comes_before_who_lost_the_connection(tmp_path, ending, status, first):
    """The launcher notices it later than the other rank, unless torch gave up there because of the other."""
    failure(1, time=3.0, ending=ending, status=status).write(tmp_path)
    DESERTED.write(tmp_path)

    assert first == read_failures(tmp_path)[0].rank


@pytest.mark.parametrize("wrong", [{"rank": "../../1"}, {"attempt": 1.0}, {"rank": True}, {"text": None}, {}])
def test_another_nodes_failure_is_no_path(wrong):
    values = {name: value for name, value in {**asdict(UNHAPPY), **wrong}.items() if wrong or name != "rank"}
    with pytest.raises(LaunchError, match="another node reported a failure in another form"):
        Failure.checked(values)

    assert UNHAPPY == Failure.checked(json.loads(json.dumps(asdict(UNHAPPY))))


def test_a_rank_speaks_for_itself(tmp_path):
    UNHAPPY.write(tmp_path)
    KILLED.write(tmp_path)

    assert read_failures(tmp_path) == [UNHAPPY]


@pytest.fixture
def recorder(tmp_path):
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
    }
    ctrl_c = signal.getsignal(signal.SIGINT)
    yield Recorder(tmp_path, environ, lambda error: None)
    signal.signal(signal.SIGINT, ctrl_c)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("unhappy\nvery"), ("raised", 1, "ValueError: unhappy\nvery", "ValueError: unhappy")),
        (KeyboardInterrupt(), ("raised", 130, "KeyboardInterrupt", "KeyboardInterrupt")),
        (SystemExit(3), ("exited", 3, "", "SystemExit: 3")),
        (SystemExit("no data"), ("exited", 1, "no data", "SystemExit: no data")),
    ],
)
def test_what_ends_a_rank_is_written_down_once(recorder, tmp_path, error, told):
    with pytest.raises(type(error)), recorder, recorder:
        raise error

    (written,) = read_failures(tmp_path)
    assert (written.rank, written.size) == (1, 2)
    assert (written.ending, written.status, written.text, written.exception) == told


class Unspeakable(Exception):
    def __str__(self):
        raise KeyError


def test_an_error_is_told_though_it_cannot_be_told_of(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *error: 1 / 0)
    with pytest.raises(Unspeakable), recorder:
        raise Unspeakable

    (written,) = read_failures(tmp_path)
    assert "Unspeakable" == written.exception
    assert written.text.endswith("Unspeakable: <exception str() failed>")


def log_it(*error):
    """A hook that writes elsewhere."""


@pytest.mark.parametrize("hook", [log_it, lambda *error: sys.exit(3)])
def test_an_error_is_told_though_the_scripts_hook_prints_nothing(hook, recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", hook)
    with pytest.raises(ValueError, match="unhappy"), recorder:
        raise ValueError("unhappy")

    (written,) = read_failures(tmp_path)
    assert written.text == "ValueError: unhappy"


def test_a_failure_that_cannot_be_written_down_is_told_by_the_rank(recorder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(recorder, "_stderr", 2)
    monkeypatch.setattr(recorder, "_directory", tmp_path / "full")
    with pytest.raises(ValueError, match="unhappy"), recorder:
        raise ValueError("unhappy")

    assert capfd.readouterr().err == "rank 1 of 2 failed:\nValueError: unhappy\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("unhappy\nvery"), "rank 1 of 2 failed:\nValueError: unhappy\nvery\n"),
        (LockstepError("the ranks have come apart:\nfar"), "rank 1 of 2 failed later: LockstepError: the ranks have come apart\n"),
    ],
    ids=["its own", "another rank's"],
)
def test_a_rank_that_is_started_again_tells_its_failure_and_a_lost_rank_in_one_line(recorder, capfd, monkeypatch, error, said):
    monkeypatch.setattr(recorder, "_stderr", 2)
    monkeypatch.setattr(recorder, "_is_last", False)
    with pytest.raises(type(error)), recorder:
        raise error

    assert said == capfd.readouterr().err


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), SystemExit(256)])
def test_a_good_end_is_no_failure(recorder, tmp_path, error):
    with pytest.raises(SystemExit), recorder:
        raise error

    assert read_failures(tmp_path) == []


def test_a_failure_that_the_launcher_does_not_report_is_told_by_the_rank(recorder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(recorder, "_stderr", 2)
    (tmp_path / "stderr.log").touch()  # the rank has a log of its own
    with pytest.raises(ValueError, match="unhappy"), recorder:
        raise ValueError("unhappy")

    assert capfd.readouterr().err == "rank 1 of 2 failed:\nValueError: unhappy\n"


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("unhappy"), "rank 1 of 2 failed:\nValueError: unhappy\n"), (KeyboardInterrupt(), "")]
)
def test_before_the_last_attempt_a_rank_tells_of_its_failure_but_not_of_ctrl_c(tmp_path, recorder, capfd, monkeypatch, error, told):
    monkeypatch.setattr(recorder, "_stderr", 2)
    monkeypatch.setattr(recorder, "_is_last", False)
    with pytest.raises(type(error)), recorder:
        raise error

    assert told == capfd.readouterr().err
