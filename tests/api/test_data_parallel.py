"""One process on several devices, against the same on one."""

import io
import re
import subprocess
import sys
from collections import namedtuple
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from on_devices import THREE, TWO, close, same, weights

ROOT = Path(__file__).parents[2]
Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Output:
    logits: torch.Tensor
    scale: float


CALLS = {
    "plain": lambda model, x, y: F.cross_entropy(model(x), y),
    "loss module": lambda model, x, y: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(model(x), y),
    "keywords": lambda model, x, y: F.cross_entropy(model(images=x, scale=2.0, factor=x.mean((1, 2, 3))[:, None]), y),
    "dict and tuple": lambda model, x, y: F.cross_entropy(model({"images": (x, 3, None)}), y),
    "rows and what has none": lambda model, x, y: F.cross_entropy(
        model(x, torch.tensor(2.0), extra={"row": x[:, 0, 0, :3], "all": torch.ones(1, 3)}), y
    ),
    "several calls": lambda model, x, y: F.cross_entropy(model(x) + model(-x), y),
    "double backward": lambda model, x, y: (
        torch.autograd.grad(model(w := x.clone().requires_grad_()).sum(), w, create_graph=True)[0].square().sum()
    ),
}


def test_what_is_divided_is_said_once(capsys):
    class Divided(nn.Linear):
        pass

    @parwrap.data_parallel(device_ids=["cpu", "cpu"])
    def called(model):
        model(torch.ones(5, 2))
        model(torch.ones(5, 2))

    for _ in range(2):
        called(Divided(2, 1))
    assert capsys.readouterr().err == "parwrap: 1 process on cpu, cpu, Divided is divided, batch 5 as 3 + 2\n"


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in pieces"])
@pytest.mark.parametrize("loss_of", CALLS.values(), ids=CALLS)
def test_gradients_are_those_of_one_device(loss_of, gather):
    assert same(loss_of, gather=gather)


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in pieces"])
@pytest.mark.parametrize(("devices", "rows"), [(THREE, 2), (THREE, 1), (THREE, 4), (TWO, 6), (["cpu"], 4)], ids=str)
def test_batches_that_are_uneven_or_smaller_than_the_devices(devices, rows, gather):
    assert same(CALLS["plain"], devices, rows, gather=gather)


FORMS = {
    "dict": (lambda logits: {"logits": logits, "name": "net"}, lambda out: out["logits"]),
    "nested tuple": (lambda logits: (logits.exp(), [logits, None]), lambda out: out[1][0]),
    "namedtuple": (lambda logits: Pair(logits, logits * 2), lambda out: out.hidden),
    "dataclass": (lambda logits: Output(logits, 2.0), lambda out: out.logits * out.scale),
    "flattened rows": (lambda logits: logits.reshape(-1, 1), lambda out: out.view(-1, 3)),
}


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in pieces"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_outputs_of_every_form(form, gather):
    make, take = form

    assert same(lambda model, x, y: F.cross_entropy(take(model(x)), y), form=make, gather=gather)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_number_that_the_model_returns_is_a_mean_over_the_samples_or_a_sum(loss):
    assert same(lambda model, x, y: model(x), form=lambda logits: getattr(logits.square(), loss)(), loss=loss)
    assert same(lambda model, x, y: model(x)["loss"], form=lambda logits: {"loss": getattr(logits, loss)()}, loss=loss, gather=False)


class Modes(nn.Module):
    """Notes in which modes it runs."""

    seen: list = []  # noqa: RUF012 - not the model's own, which would be a reason to run whole

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        x = self.fc(x)
        self.seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x.dtype))
        return x


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (torch.enable_grad, (True, False, torch.float32)),
        (torch.no_grad, (False, False, torch.float32)),
        (torch.inference_mode, (False, True, torch.float32)),
        (lambda: torch.autocast("cpu", torch.bfloat16), (True, False, torch.bfloat16)),
        (lambda: parwrap.amp(dtype="bf16"), (True, False, torch.bfloat16)),
    ],
    ids=["grad", "no_grad", "inference_mode", "autocast", "amp"],
)
def test_modes_are_carried_into_the_replicas(mode, expected):
    model = Modes()
    with parwrap.data_parallel(device_ids=TWO), mode():
        out = model(torch.randn(4, 2))

    assert [expected] * 2 == Modes.seen[-2:]
    assert (expected[1], expected[2]) == (out.is_inference(), out.dtype)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("around", "within"),
    [(parwrap.accumulate(2), 1e-5), (parwrap.amp(dtype="bf16"), 0.05), (parwrap.amp(level="O2"), 0.02), (parwrap.distributed, 1e-5)],
    ids=["accumulate", "amp", "amp O2", "distributed on one rank"],
)
def test_with_other_decorators_whatever_their_order(around, within, gather):
    divided = parwrap.data_parallel(device_ids=TWO, gather=gather)
    expected = around(weights)()
    one, other = divided(around(parwrap.sync_bn(weights)))(), parwrap.sync_bn(around(divided(weights)))()

    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert close(expected, one, within)


def calls_of(kind):
    """A class of modules that note how many rows each call of theirs has."""

    class Counts(kind):
        rows = ()

        def forward(self, *args):
            type(self).rows += (len(args[0]),)
            return super().forward(*args)

    Counts.__name__ = kind.__name__
    return Counts


def test_models_are_divided_after_a_trial_and_losses_and_what_is_inside_of_others_are_not():
    model, bare, loss, preparing = (calls_of(kind) for kind in (nn.Linear, nn.Linear, nn.MSELoss, nn.Identity))
    x = torch.randn(6, 2)
    with parwrap.data_parallel(device_ids=TWO):
        outer = nn.Sequential(model(2, 2), bare(2, 2))
        loss()(outer(preparing()(x)), x)

    assert [(6, 3, 3, 3, 3), (6, 3, 3, 3, 3), (6,), (6,)] == [kind.rows for kind in (model, bare, loss, preparing)]


def test_a_lazy_model_takes_its_shapes_from_a_whole_batch():
    torch.manual_seed(0)
    model, x = nn.LazyLinear(2), torch.randn(4, 3)
    with parwrap.data_parallel(device_ids=TWO):
        outputs = [model(x), model(x)]

    assert torch.allclose(*outputs)


@pytest.mark.ranks(2)
def test_on_several_ranks_it_does_nothing_and_several_devices_are_an_error():
    rows = calls_of(nn.Linear)

    @parwrap.distributed
    @parwrap.data_parallel
    def train():
        model = rows(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=4):
            model(x).mean().backward()
            optimizer.step()

    with redirect_stderr(io.StringIO()) as said:
        train()
    assert (4,) == rows.rows
    assert (parwrap.rank() == 0) == (", data_parallel has no effect with one device per rank, seed " in said.getvalue())
    message = re.escape(f"parwrap.data_parallel(device_ids={TWO}) is for one process, but there are 2 ranks, each with one device. ")
    with pytest.raises(parwrap.UsageError, match=message), parwrap.distributed(), parwrap.data_parallel(device_ids=TWO):
        pass
    with pytest.raises(parwrap.UsageError, match=message), parwrap.data_parallel(device_ids=TWO), parwrap.distributed():
        nn.Linear(2, 1)(torch.ones(4, 2))


def test_inside_of_itself_it_does_nothing_more_and_a_single_device_switches_it_off():
    rows = calls_of(nn.Linear)
    model, x = rows(2, 1), torch.ones(6, 2)
    divided = []
    with parwrap.data_parallel(device_ids=TWO):
        for inner in (parwrap.data_parallel(), parwrap.data_parallel(device_ids=THREE), parwrap.data_parallel(device_ids=["cpu"])):
            with inner:
                model(x)
                divided.append(rows.rows[-1])

    assert [3, 2, 6] == divided


def test_the_example_learns_the_same_with_outputs_in_pieces():
    printed = subprocess.run(
        [sys.executable, "examples/data_parallel.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout

    assert 3 == len(re.findall(r"^\S.*: accuracy 0\.9\d+$", printed, re.MULTILINE))
