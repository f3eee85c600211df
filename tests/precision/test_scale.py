"""For how long a loss scale lives, and what saves and loads it."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import parwrap
from scaled import batches, build, by_hand, loss_of, same

pytestmark = pytest.mark.usefixtures("not_warned_yet")


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


def test_a_checkpoint_of_the_optimizer_carries_the_scale(tmp_path):
    def train(stop=None, start=0):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if start:
            saved = torch.load(tmp_path / "checkpoint.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in batches(overflowing=(1, 2))[start:stop]:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
        state = parwrap.amp_state()
        return model.state_dict(), state.scale, state.skipped_steps

    with_amp = {"dtype": "fp16", "growth_interval": 3}
    expected = parwrap.amp(**with_amp)(train)()
    parwrap.amp(**with_amp)(train)(stop=5)
    actual = parwrap.amp(**with_amp)(train)(start=5)

    assert same(expected, actual)
    optimizer = torch.optim.Adam(build().parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["optimizer"])  # also where there is no parwrap

    assert ["param_groups", "state"] == sorted(optimizer.state_dict())


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
    for _ in range(2):
        with parwrap.amp(dtype="fp16"):
            assert same(expected, by_hand(data, clip=0.1))
            assert math.isfinite(expected[2])

    said = [line for line in capfd.readouterr().err.splitlines() if "GradScaler" in line]
    assert [
        "parwrap: this script uses GradScaler itself, so parwrap.amp leaves it alone: it scales no loss and skips no step itself here. "
        "To let parwrap do it, remove it from the script."
    ] == said
