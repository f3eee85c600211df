"""One process on several devices, against the same on one, and against ``nn.DataParallel``'s rules."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import parwrap
from divided import THREE, TWO, after_backward, close, normed, same, trained

ROOT = Path(__file__).parents[2]
GATHER = pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in pieces"])
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
    "a module that is not the root": lambda model, x, y: F.cross_entropy(model.fc(F.relu(model.conv(x)).flatten(1)), y),
    "double backward": lambda model, x, y: (
        torch.autograd.grad(model(w := x.clone().requires_grad_()).sum(), w, create_graph=True)[0].square().sum()
    ),
}


@GATHER
@pytest.mark.parametrize("loss_of", CALLS.values(), ids=CALLS)
def test_gradients_are_those_of_one_device(loss_of, gather):
    assert same(loss_of, gather=gather)


@GATHER
@pytest.mark.parametrize(("devices", "rows"), [(THREE, 2), (THREE, 1), (THREE, 4), (TWO, 6), (["cpu"], 4)], ids=str)
def test_batches_may_be_uneven_or_smaller_than_the_devices(devices, rows, gather):
    assert same(CALLS["plain"], devices, rows, gather=gather)


FORMS = {
    "dict": (lambda logits: {"logits": logits, "name": "net"}, lambda out: out["logits"]),
    "mapping": (lambda logits: UserDict(logits=logits), lambda out: out["logits"]),
    "nested tuple": (lambda logits: (logits.exp(), [logits, None]), lambda out: out[1][0]),
    "namedtuple": (lambda logits: Pair(logits, logits * 2), lambda out: out.hidden),
    "dataclass": (lambda logits: Output(logits, 2.0), lambda out: out.logits * out.scale),
    "flattened rows": (lambda logits: logits.reshape(-1, 1), lambda out: out.view(-1, 3)),
}


@GATHER
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_outputs_have_the_form_that_the_model_returns(form, gather):
    make, take = form

    assert same(lambda model, x, y: F.cross_entropy(take(model(x)), y), form=make, gather=gather)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_loss_that_the_model_returns_is_a_mean_over_the_samples_or_a_sum(loss):
    assert same(lambda model, x, y: model(x), form=lambda logits: getattr(logits.square(), loss)(), loss=loss)
    assert same(lambda model, x, y: model(x)["loss"], form=lambda logits: {"loss": getattr(logits, loss)()}, loss=loss, gather=False)


class Scaled(nn.Linear):
    """Also returns a parameter, a number that is equal for all parts."""

    def __init__(self):
        super().__init__(2, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x), self.scale.exp()


def test_a_number_that_does_not_depend_on_the_batch_needs_no_option():
    def loss_of(model, x, y):
        out, scale = model(x)
        return (out * scale).square().sum()

    model, x = Scaled(), torch.randn(5, 2)
    other = copy.deepcopy(model)
    expected = after_backward(model, loss_of, x, None)
    actual = parwrap.data_parallel(TWO)(after_backward)(other, loss_of, x, None)

    assert close(expected, actual, 1e-5)


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


class Holds(nn.Module):
    """Parameters, buffers and methods in every place where a module may have them."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)])
        self.named = nn.ParameterDict({"bias": torch.randn(2)})
        self.functions, self.by_name = [self.scaled], {"weight": self.listed[0]}
        self.register_buffer("ones", torch.ones(2))
        self.register_buffer("nothing", None)

    def scaled(self, x):
        return x * self.listed[1]

    def forward(self, x):
        out = self.functions[0](x) * self.by_name["weight"] + self.named["bias"] * self.ones
        return out + sum(p.sum() for p in self.parameters())


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class PartlyFrozen(nn.Sequential):
    def forward(self, x):
        with torch.no_grad():
            fixed = self[0](x)
        return self[1](x) * fixed


MODELS = {
    "recurrent": lambda: Recurrent(2, 3, num_layers=2, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    "held everywhere": Holds,
    "checkpoints inside": lambda: Checkpointed(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
    "partly frozen": lambda: PartlyFrozen(nn.Linear(2, 3), nn.Linear(2, 3)),
    "large": lambda: nn.Linear(2, 2**18),
    "sparse gradients": lambda: nn.Sequential(Indices(), nn.Embedding(5, 2, sparse=True)),
}


class Indices(nn.Module):
    def forward(self, x):
        return x.abs().long()


@GATHER
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_layers_of_every_kind_are_divided(make, gather):
    torch.manual_seed(0)
    model, x = make(), torch.randn(5, 4, 2)
    other = copy.deepcopy(model)

    def loss_of(model, x, y):
        return model(x).square().mean()

    expected = after_backward(model, loss_of, x, None)
    actual = parwrap.data_parallel(THREE, gather=gather)(after_backward)(other, loss_of, x, None)

    assert close(*([each if each is None else each.to_dense() for each in some] for some in (expected, actual)))


@GATHER
@pytest.mark.parametrize("devices", [TWO, THREE], ids=["two", "three"])
def test_weights_after_steps_are_those_of_one_device(devices, gather):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    expected = trained(model=copy.deepcopy(model), rows=7)

    assert close(expected, parwrap.data_parallel(devices, gather=gather)(trained)(model=model, rows=7))


class Parts(nn.Module):
    """The rule of ``nn.DataParallel``, by hand: batch norms normalize by the chunk, and the running statistics are the first one's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        first, second = x.chunk(2)
        kept = {name: buffer.clone() for name, buffer in self.inner.named_buffers()}
        return torch.cat([self.inner(first), functional_call(self.inner, kept, (second,))])


def test_without_sync_bn_batch_norms_are_those_of_nn_data_parallel():
    torch.manual_seed(1)
    model = normed().double()
    expected = trained(model=Parts(copy.deepcopy(model)))

    assert close(expected, parwrap.data_parallel(TWO)(trained)(model=model), 1e-9)


class Modes(nn.Module):
    """Notes in which modes it runs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.note = [].append

    def forward(self, x):
        x = self.fc(x)
        self.note((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x.dtype))
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
def test_modes_reach_the_replicas(mode, expected):
    model = Modes()
    with parwrap.data_parallel(TWO), mode():
        out = model(torch.randn(4, 2))

    assert [expected] * 2 == model.note.__self__
    assert (expected[1], expected[2]) == (out.is_inference(), out.dtype)


@GATHER
@pytest.mark.parametrize(
    ("around", "within"),
    [(parwrap.accumulate(2), 1e-5), (parwrap.amp(dtype="bf16"), 0.05), (parwrap.amp(level="O2"), 0.02), (parwrap.distributed, 1e-5)],
    ids=["accumulate", "amp", "amp O2", "distributed on one rank"],
)
def test_the_order_of_decorators_does_not_matter(around, within, gather):
    divided = parwrap.data_parallel(TWO, gather=gather)
    expected = around(trained)()
    one, other = divided(around(parwrap.sync_bn(trained)))(), parwrap.sync_bn(around(divided(trained)))()

    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert close(expected, one, within)


class Rows(nn.Linear):
    """Notes how many rows each call has."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.note = [].append

    def forward(self, x):
        self.note(len(x))
        return super().forward(x)

    @property
    def rows(self):
        return self.note.__self__


def test_models_are_divided_and_what_they_call_and_losses_are_not():
    sizes = []

    class Loss(nn.MSELoss):
        def forward(self, input, target):
            sizes.append(len(input))
            return super().forward(input, target)

    inner, x = Rows(2, 2), torch.randn(6, 2)
    with parwrap.data_parallel(TWO):
        Loss()(nn.Sequential(inner, nn.Linear(2, 2))(x), x)

    assert ([3, 3], [6]) == (inner.rows, sizes)


def test_a_model_that_a_module_without_parameters_calls_is_divided():
    class Trainer(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.models = [model]

        def forward(self, x):
            return self.models[0](x).sum()

    model = Rows(2, 1)
    with parwrap.data_parallel(TWO):
        Trainer(model)(torch.ones(4, 2))

    assert [2, 2] == model.rows


def test_inside_of_itself_the_inner_devices_count():
    model, x = Rows(2, 1), torch.ones(6, 2)
    with parwrap.data_parallel(TWO):
        for inner in (parwrap.data_parallel(), parwrap.data_parallel(THREE), parwrap.data_parallel(["cpu"])):
            with inner:
                model(x)

    assert [3, 3, 2, 2, 2, 6] == model.rows


def test_a_lazy_model_takes_its_shapes_from_a_whole_batch():
    model, x = nn.LazyLinear(2), torch.randn(4, 3)
    with parwrap.data_parallel(TWO):
        outputs = [model(x), model(x)]

    assert torch.allclose(*outputs)


def test_hooks_see_each_part():
    model, seen = nn.Linear(2, 2), []
    model.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    with parwrap.data_parallel(TWO):
        model(torch.ones(5, 2))

    assert [3, 2] == seen


def test_it_says_once_what_is_divided(capsys):
    class Divided(nn.Linear):
        pass

    for _ in range(2):
        with parwrap.data_parallel(TWO):
            Divided(2, 1)(torch.ones(5, 2))

    assert "parwrap: 1 process on cpu, cpu: each batch of Divided is divided\n" == capsys.readouterr().err


def test_calls_are_torchs_own_again_afterwards():
    before = nn.Module._call_impl
    with parwrap.data_parallel(TWO):
        assert before is not nn.Module._call_impl

    assert before is nn.Module._call_impl


@GATHER
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_model_changes_no_numbers(reentrant, gather):
    def loss_of(model, x, y):
        return F.cross_entropy(checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant), y)

    assert same(loss_of, gather=gather)


def test_the_scripts_own_data_parallel_is_left_alone():
    model = Rows(2, 1)
    with parwrap.data_parallel(TWO):
        nn.DataParallel(model)(torch.ones(4, 2))

    assert [4] == model.rows


def test_torch_func_sees_the_whole_model():
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    with parwrap.data_parallel(TWO):
        out = torch.vmap(model)(x)

    assert torch.allclose(model(x), out)


def printed_by(*command):
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_the_example_prints_what_it_prints_on_one_device_gathered_and_in_pieces():
    expected = printed_by("examples/data_parallel.py")

    for options in ([], ["--no-gather"]):
        divided = printed_by("-m", "parwrap.run", "--data-parallel", "cpu,cpu", "--sync-bn", *options, "examples/data_parallel.py")
        assert (options, expected) == (options, divided)
