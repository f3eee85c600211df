"""The loss scale: when it changes, for how long it lives, what saves it, and when an iteration of a loop is over."""

import copy
import gc
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import parwrap
from parwrap.precision.loss_scale import AmpState, Iterations
from scaled import FP16, LOW, batches, build, by_hand, loss_of, same


def test_the_scale_goes_on_from_call_to_call_unless_a_new_training_begins():
    model = build()
    outside = torch.optim.SGD(model.parameters(), lr=0.01)

    @parwrap.amp(dtype="fp16")
    def step(optimizer=None):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        loss_of(model, *batches(1, overflowing=[0])[0]).backward()
        optimizer.step()
        return parwrap.amp_state().scale

    assert [32768.0, 16384.0] == [step(outside), step(outside)]
    outside.add_param_group({"params": nn.Linear(1, 1).parameters()})  # of the same training
    assert 8192.0 == step(outside)
    assert 32768.0 == step()


@pytest.mark.parametrize(
    "decorator", [parwrap.amp(dtype="fp16"), parwrap.amp(level="O2"), parwrap.amp(dtype="bf16")], ids=["fp16", "O2", "bf16"]
)
def test_nothing_of_a_training_is_kept_alive_once_the_function_has_returned(decorator):
    @decorator
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss_of(model, *batches(1)[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[0].weight)

    kept = train()
    gc.collect()

    assert [None] * 3 == [each() for each in kept]


@pytest.mark.parametrize("policy", [{}, {"growth_interval": 2}, {"init_scale": 3.0, "growth_factor": 1.7, "backoff_factor": 0.3}], ids=str)
def test_the_scale_is_bit_for_bit_that_of_a_grad_scaler(policy):
    scaler, state = torch.amp.GradScaler("cpu", **policy), AmpState(**policy)
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.0)
    for number in range(60):
        found = number % 7 == 3
        scaler.scale(weight.sum() * (math.inf if found else 1.0)).backward()
        scaler.step(sgd)
        scaler.update()
        state.end_iteration(found)
        weight.grad = None

        assert scaler.get_scale() == state.scale
    assert scaler.state_dict() == {name: value for name, value in state.state_dict().items() if name != "skipped_steps"}


def test_a_training_goes_on_from_a_checkpoint_of_the_scale():
    def train(stop=None, start=0, saved=None):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            parwrap.amp_state().load_state_dict(saved[2])
        for x, y in batches(overflowing=(1, 2))[start:stop]:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict(), parwrap.amp_state().state_dict()

    with_amp = {"dtype": "fp16", "growth_interval": 3}
    expected = parwrap.amp(**with_amp)(train)()
    saved = copy.deepcopy(parwrap.amp(**with_amp)(train)(stop=5))
    actual = parwrap.amp(**with_amp)(train)(start=5, saved=saved)

    assert same(expected, actual)


def test_the_state_of_a_grad_scaler_can_be_loaded_and_its_own_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    with parwrap.amp(dtype="fp16"):
        parwrap.amp_state().load_state_dict(scaler.state_dict())
        state = parwrap.amp_state().state_dict()

        assert (8.0, 7, 0) == (state["scale"], state["growth_interval"], state["skipped_steps"])
    with parwrap.amp(dtype="fp16"):
        parwrap.amp_state().load_state_dict({**state, "skipped_steps": 3})

        assert "AmpState(scale=8.0, skipped_steps=3)" == repr(parwrap.amp_state())
    with parwrap.amp(dtype="bf16"):
        parwrap.amp_state().load_state_dict(state)

        assert ({}, 1.0) == (parwrap.amp_state().state_dict(), parwrap.amp_state().scale)


def test_a_script_with_a_scaler_of_its_own_is_left_to_it(capfd):
    data = batches(overflowing=(4,))
    expected = by_hand(data, clip=0.1)
    amp = parwrap.amp(dtype="fp16")
    for _ in range(2):
        with amp:
            assert same(expected, by_hand(data, clip=0.1))
            assert math.isfinite(expected[2])

    said = [line for line in capfd.readouterr().err.splitlines() if "GradScaler" in line]
    assert [
        "parwrap: this script uses GradScaler itself, so parwrap.amp leaves it alone: parwrap.amp scales no loss and skips no step. "
        "To let parwrap.amp do that, remove GradScaler from the script."
    ] == said


def ends(steps, known=""):
    """After which of ``steps`` an iteration is over, and how many; a step in capitals was skipped."""
    optimizers = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))]) for name in "abc"}
    optimizers |= {name: torch.optim.SGD(optimizers[of].param_groups[0]["params"]) for name, of in (("d", "a"), ("e", "b"))}
    over, seen = [], []
    iterations = Iterations(over.append)
    for name in known:
        iterations.expect(optimizers[name])
    for step in steps:
        optimizer = optimizers[step.lower()]
        iterations.expect(optimizer)
        iterations.stepped(optimizer, step.isupper())
        seen.append("".join("X" if found else "." for found in over))
        over.clear()
    return seen


@pytest.mark.parametrize(
    ("steps", "known", "seen"),
    [
        ("aaAa", "", [".", ".", "X", "."]),
        ("ababAb", "ab", ["", ".", "", ".", "", "X"]),
        ("abaB", "", [".", "", ".", ""]),  # the second was not known before: from then on they take turns
        ("aaabaaab", "ab", ["", "..", ".", "", ".", ".", ".", ""]),  # a critic that has three steps to the generator's one
        ("Aaa", "ab", ["", "X.", "."]),  # another that never steps costs one late update
        ("aDd", "", [".", "X", "."]),  # a later one has the parameters: it has taken over
        ("abDbdb", "ab", ["", ".", "", "X", "", "."]),  # of one of two
        ("dedE", "abde", ["", ".", "", "X"]),  # of both
        ("adaD", "ad", ["", ".", "", "X"]),  # or both step in each iteration
    ],
)
def test_when_an_iteration_is_over(steps, known, seen):
    assert seen == ends(steps, known)


def test_an_optimizer_that_is_gone_is_not_waited_for():
    over = []
    iterations = Iterations(over.append)
    stays, goes = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    iterations.expect(stays)
    iterations.expect(goes)
    del goes
    gc.collect()
    iterations.stepped(stays, False)

    assert [False] == over


def in_two_phases(scaler=None):
    """The weights and the scale after each batch; a second optimizer takes over where batches overflow, and the first still exists."""
    model, seen, optimizers = build(), [], []
    for lr, overflowing in ((0.01, ()), (0.001, (0, 1))):
        optimizers.append(torch.optim.SGD(model.parameters(), lr))
        for x, y in batches(4, overflowing):
            with torch.autocast("cpu", FP16) if scaler else nullcontext():
                loss = loss_of(model, x, y)
            optimizers[-1].zero_grad()
            if scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizers[-1])
                scaler.update()
            else:
                loss.backward()
                optimizers[-1].step()
            seen.append([(scaler or parwrap.amp_state()).state_dict()["scale"], *(p.detach().clone() for p in model.parameters())])
    return seen


def test_an_optimizer_that_takes_over_the_parameters_of_another_has_the_scale_of_a_loop_by_hand():
    with parwrap.amp(**LOW):
        seen = in_two_phases()

    assert same(in_two_phases(torch.amp.GradScaler("cpu", init_scale=LOW["init_scale"])), seen)
    assert [1024.0] * 4 + [512.0] + [256.0] * 3 == [each[0] for each in seen]
