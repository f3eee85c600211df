"""Who goes ahead, who waits and who answers, with real ranks."""

import re
import sys
import threading
import warnings
from datetime import timedelta

import pytest
import torch
from torch import nn

import parwrap
from parwrap.coordination import status_board
from parwrap.coordination.sync_points import Coordinator
from parwrap.errors import RankMismatchError
from parwrap.group.group import current
from parwrap.world.world import World
from warm_command import run as run_command


def answered(coordinator, kind):
    """The details of the sync points of ``kind`` that this rank answers from now on."""
    details = []
    coordinator.answer(kind, lambda detail, present: details.append((detail, present)))
    return details


@pytest.mark.ranks(3)
def test_all_that_came_for_the_same_meet():
    assert [0, 1, 2] == current().coordinator.wait("lunch")


@pytest.mark.ranks(3)
def test_who_waits_for_something_else_answers_and_waits_on():
    coordinator = current().coordinator
    lunches = answered(coordinator, "lunch")
    if parwrap.rank() == 1:
        assert [1] == coordinator.wait("lunch")

    assert [0, 1, 2] == coordinator.wait("tea")
    assert ([] if parwrap.rank() == 1 else [(0, [1])]) == lunches


def test_what_goes_wrong_in_answering_is_raised():
    coordinator = Coordinator(status_board.StatusBoard(World(), bytearray(status_board.StatusBoard.size(World()))), timedelta(seconds=1))
    failed = threading.Event()

    class Failing:
        def begin(self, part):
            pass

        def answer_begun(self, main):
            failed.set()
            raise ConnectionError("the others are gone")

    with coordinator.answering():
        pass
    coordinator.add_nested(Failing())
    with pytest.raises(ConnectionError, match="the others are gone"), coordinator.answering():
        assert failed.wait(10)
    with pytest.raises(ConnectionError) as raised, coordinator.answering():
        raise KeyError("on purpose")
    assert isinstance(raised.value.__context__, KeyError)


@pytest.mark.ranks(2)
def test_an_answer_that_lasts_is_given_in_every_part_of_the_run():
    coordinator = current().coordinator
    answered = []
    coordinator.answer("lunch", lambda detail, present: answered.append("lunch"), lasting=True)
    coordinator.answer("tea", lambda detail, present: answered.append("tea"))
    coordinator.begin()
    if parwrap.rank() == 1:
        coordinator.wait("lunch")
    coordinator.wait("dinner")

    assert ([] if parwrap.rank() == 1 else ["lunch"]) == answered


@pytest.mark.ranks(2, timeout=30)
def test_what_cannot_be_answered_is_an_error_on_all_ranks_that_names_both_places():
    coordinator = current().coordinator
    with pytest.raises(
        RankMismatchError, match=r"would wait for each other.*rank 0 is at lunch \(.*test_sync_points.py:\d+\); rank 1 is at tea \("
    ):
        coordinator.wait("lunch" if parwrap.rank() == 0 else "tea")


@pytest.mark.ranks(2, timeout=30)
def test_a_reduction_and_a_barrier_do_not_wait_for_each_other():
    with pytest.raises(RankMismatchError, match=r"rank 0 is at parwrap.reduce_sum \(.*; rank 1 is at parwrap.barrier"):
        parwrap.reduce_sum(1) if parwrap.rank() == 0 else parwrap.barrier()


@pytest.mark.ranks(2, timeout=30)
def test_different_shapes_are_an_error_before_they_end_the_process():
    with pytest.raises(RankMismatchError, match=r"it is a tensor \[2\] float32 on rank 0 and a tensor \[3\] float32 on rank 1"):
        parwrap.reduce_sum(torch.ones(2 + parwrap.rank()))


def test_different_backwards_at_the_same_time_end_the_run_by_naming_both_places(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import torch, parwrap
one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
for step in range(5):
    for number in (1, 0) if step == 4 and parwrap.rank() else (0, 1):
        if number:
            one(torch.ones(1, 2)).sum().backward()
        else:
            other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
""")
    ended = run_command([sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", script], timeout=60)

    assert ended.returncode
    assert "RankMismatchError: the ranks run different backward passes at the same time" in ended.stderr
    assert re.search(r"rank 0 is at backward \(\S+train.py:10\); rank 1 is at backward \(\S+train.py:8\)", ended.stderr)


@pytest.mark.ranks(2, timeout=30)
def test_a_rank_that_fails_is_named_by_those_who_wait_for_it():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("parwrap.coordination.sync_points.GRACE", 0.1)
        if parwrap.rank() == 1:
            with pytest.raises(ZeroDivisionError), parwrap.distributed():
                raise ZeroDivisionError("by hand")
            current().store.wait(["named"])
        else:
            with (
                pytest.raises(RankMismatchError, match="rank 1 failed with ZeroDivisionError: by hand"),
                parwrap.distributed(),
            ):
                pass
            current().store.set("named", b"")


@pytest.mark.ranks(2, timeout=40)
def test_ranks_in_different_calls_of_one_function_do_not_mix_them_up():
    model = nn.Linear(2, 1)

    def train(steps):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()

    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(6):
            train(3 + (number + parwrap.rank()) % 3 * 4)

    assert 1 == len({str(each) for each in parwrap.gather(model.state_dict())})


@pytest.mark.ranks(2, timeout=40)
def test_a_model_is_cast_when_all_ranks_have_come_there_and_evaluated_in_inference_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))

    @torch.inference_mode()
    def evaluate():
        return model.eval()(torch.ones(3, 2, dtype=model[0].weight.dtype))

    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(4):
            if epoch == 2:
                model.double()
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            model.train()
            for step in range(8):
                if step == 3 + parwrap.rank() * 2:
                    break
                optimizer.zero_grad()
                model(torch.randn(4, 2, dtype=model[0].weight.dtype)).square().mean().backward()
                optimizer.step()
            evaluate()

    assert 1 == len({str(each) for each in parwrap.gather(model.state_dict())})
