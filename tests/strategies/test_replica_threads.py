import concurrent.futures
import contextvars
import gc
import re
import threading
import time
import weakref

import pytest
import torch

import parwrap
from parwrap.strategies.data_parallel.replica_threads import current_replica, is_undivided, run_together, undivided

CPU = torch.device("cpu")


def together(*calls):
    return run_together([CPU] * len(calls), calls)


def synchronize(value, what="a norm"):
    return lambda: current_replica().synchronize(what, value, list)


def test_each_call_has_a_thread_and_its_result_its_place():
    def ident():
        return current_replica().synchronize("idents", threading.get_ident(), set)

    assert 3 == len(together(ident, ident, ident)[0] - {threading.get_ident()})
    assert [0, 1] == together(lambda: 0, lambda: 1)
    assert current_replica() is None


def test_those_that_meet_have_the_values_of_all_in_order_and_the_last_one_merges_once():
    merged = []

    def twice():
        replica = current_replica()
        first = replica.synchronize("one", replica.index, lambda values: merged.append(values) or sum(values))
        return first, replica.synchronize("two", first + replica.index, list)

    assert [(3, [3, 4, 5])] * 3 == together(twice, twice, twice)
    assert [[0, 1, 2]] == merged


def failing():
    raise FileNotFoundError(2, "no such batch")


@pytest.mark.parametrize("calls", [(failing, synchronize(1)), (synchronize(1), failing), (synchronize(1), failing, synchronize(2))])
def test_nobody_waits_for_one_that_has_failed_whose_error_it_is(calls):
    with pytest.raises(FileNotFoundError) as raised:
        together(*calls)

    assert [f"in replica {calls.index(failing)} on cpu (parwrap.data_parallel)"] == raised.value.__notes__
    assert "failing" == raised.traceback[-1].name


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (
            (synchronize(1), synchronize(1, "another")),
            "replica 0 on cpu is in a norm while replica 1 on cpu is in another. Run the same layers in the same ",
        ),
        (
            (synchronize(1), lambda: None),
            "replica 0 on cpu is in a norm, but replica 1 on cpu has already finished its forward pass. Run the same ",
        ),
    ],
)
def test_nobody_waits_for_one_that_does_not_come(calls, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        together(*calls)


def test_an_error_of_what_merges_is_raised():
    def fail(values):
        raise ZeroDivisionError(str(values))

    with pytest.raises(ZeroDivisionError, match=re.escape("[1, 1]")):
        together(*[lambda: current_replica().synchronize("a norm", 1, fail)] * 2)


def test_modes_and_context_go_along_and_stay_as_they_are_here():
    place = contextvars.ContextVar("place", default="outside")
    place.set("inside")

    def here():
        cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cpu, place.get()

    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.float16, cache_enabled=False)):
        with mode:
            assert [here()] * 2 == together(here, here)
    assert (True, False) == here()[:2]


def test_what_replicas_run_is_not_divided_again():
    with undivided():
        inside = is_undivided()

    assert [True, True] == [inside, *together(is_undivided)]
    assert not is_undivided()


def test_what_ends_the_wait_from_outside_ends_those_that_wait_for_each_other(monkeypatch):
    join, asked = threading.Thread.join, []

    def interrupted(thread, timeout=None):
        asked.append(thread)
        if len(asked) == 1:
            raise KeyboardInterrupt
        join(thread, timeout)

    released = threading.Event()
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    threading.Timer(0.2, released.set).start()
    with pytest.raises(KeyboardInterrupt):
        together(synchronize(1), released.wait)

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("parwrap replica")]


def test_those_on_one_device_take_turns_in_order_and_give_them_up_while_they_wait():
    running, seen = [], []

    def call():
        replica = current_replica()
        for part in ("before", "after"):
            running.append(replica.index)
            time.sleep(0.01)
            seen.append((part, replica.index, len(running)))
            running.pop()
            if part == "before":
                replica.synchronize("a norm", None, list)

    together(call, call, call)

    assert [("before", index, 1) for index in range(3)] == seen[:3]
    assert {("after", index, 1) for index in range(3)} == {*seen[3:]}


def test_those_on_several_devices_run_at_the_same_time():
    barrier = threading.Barrier(2, timeout=20)

    assert [0, 1] == sorted(run_together([CPU, torch.device("meta")], [barrier.wait] * 2))


def test_cpu_replicas_share_the_threads_of_the_process_which_has_all_of_them_afterwards():
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        shared = together(torch.get_num_threads, torch.get_num_threads)
        afterwards = torch.get_num_threads()
        with concurrent.futures.ThreadPoolExecutor() as others:
            elsewhere = others.submit(torch.get_num_threads).result()
    finally:
        torch.set_num_threads(before)

    assert ([2, 2], 5, 5) == (shared, afterwards, elsewhere)


def test_the_default_device_goes_along():
    with torch.device("meta"):
        assert ["meta"] * 2 == together(*[lambda: torch.ones(1).device.type] * 2)


def test_an_error_holds_what_it_came_from_no_longer_than_it_lives():
    class Batch:
        pass

    def fail(batch):
        raise ValueError("on purpose")

    def run():
        batch = Batch()
        with pytest.raises(ValueError, match="on purpose"):
            together(lambda: fail(batch), lambda: None)
        return weakref.ref(batch)

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()
