import time

import pytest

import parwrap
from parwrap.errors import RankZeroError, UsageError


class Journal:
    def __init__(self):
        self.entries = []

    @parwrap.rank_zero_only
    def note(self, text):
        self.entries.append(text)
        return text

    @parwrap.rank_zero_only(broadcast=True)
    def read(self):
        """What rank 0 has noted."""
        return self.entries

    @parwrap.rank_zero_only
    @staticmethod
    def static():
        return "rank 0"


@pytest.mark.ranks(2)
def test_only_rank_zero_runs_the_function():
    journal = Journal()
    noted = journal.note("hello")

    assert [("hello", ["hello"]), (None, [])] == parwrap.gather((noted, journal.entries))
    assert ["rank 0", None] == parwrap.gather(journal.static())


@pytest.mark.ranks(3)
def test_its_result_can_be_handed_to_all():
    journal = Journal()
    journal.note("hello")
    for _ in range(2):
        assert [["hello"]] * 3 == parwrap.gather(journal.read())


def test_one_rank_runs_everything():
    journal = Journal()

    assert ("hello", ["hello"], "rank 0") == (journal.note("hello"), journal.read(), journal.static())
    with parwrap.rank_zero_first():
        pass


def test_the_function_keeps_what_it_is():
    assert ("read", "What rank 0 has noted.") == (Journal.read.__name__, Journal.read.__doc__)


@pytest.mark.ranks(2)
def test_an_exception_on_rank_zero_ends_the_waiting_of_the_others():
    @parwrap.rank_zero_only(broadcast=True)
    def download():
        raise OSError("disk full")

    with pytest.raises(OSError if parwrap.rank() == 0 else RankZeroError, match="disk full") as error:
        download()
    if parwrap.rank() > 0:
        assert "rank 0 failed in test_an_exception" in str(error.value)
        assert "download (" in str(error.value)


@pytest.mark.ranks(2)
def test_a_result_that_does_not_pickle_is_an_exception_on_every_rank():
    with pytest.raises(Exception, match="pickle"):
        parwrap.rank_zero_only(broadcast=True)(lambda: lambda: None)()


@pytest.mark.parametrize("waits", [parwrap.rank_zero_only(broadcast=True), parwrap.rank_zero_first])
def test_waiting_for_rank_zero_without_a_process_group_is_refused(waits, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="needs the other ranks, but no process group is open here"):
        waits(lambda: None)()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("local", [False, True])
def test_rank_zero_goes_first(tmp_path, local):
    path = tmp_path / "data"

    @parwrap.rank_zero_first(local=local)
    def load():
        if not path.exists():
            time.sleep(0.2)
            path.write_text(f"by rank {parwrap.rank()}")
        return path.read_text()

    for _ in range(2):
        assert load() == "by rank 0"


@pytest.mark.ranks(2)
def test_the_others_go_on_when_rank_zero_fails():
    with pytest.raises(KeyError), parwrap.rank_zero_first():
        raise KeyError


@pytest.mark.ranks(2)
def test_what_rank_zero_does_alone_may_nest():
    @parwrap.rank_zero_only(broadcast=True)
    def inner():
        return "inner"

    @parwrap.rank_zero_only(broadcast=True)
    def outer():
        return inner()

    assert outer() == "inner"


def test_what_cannot_mean_anything_is_refused():
    with pytest.raises(UsageError, match=r"cannot skip its body: write `if parwrap.is_rank_zero\(\):`"), parwrap.rank_zero_only():
        pass
    with pytest.raises(UsageError, match="does not say which node's result"):
        parwrap.rank_zero_only(local=True, broadcast=True)
    with pytest.raises(UsageError, match="rank_zero_only cannot decorate Journal"):
        parwrap.rank_zero_only(Journal)
