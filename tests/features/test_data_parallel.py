"""One process on several devices, against the same on one."""

import copy
import io
import re
import subprocess
import sys
import warnings
from collections import namedtuple
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap

ROOT = Path(__file__).parents[2]
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Output:
    logits: torch.Tensor
    scale: float


class Net(nn.Module):
    """Convolutions, tied weights, an unused layer, and inputs and outputs of every form.

    Args:
        form: makes what the model returns of its logits.
    """

    def __init__(self, form=lambda logits: logits):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.once_more = self.again
        self.fc, self.unused = nn.Linear(64, 3), nn.Linear(2, 2)
        self.form = form

    def forward(self, images, factor=None, *, extra=None, scale=1.0):
        if isinstance(images, dict):
            images = images["images"][0]
        x = F.relu(self.once_more(F.relu(self.again(F.relu(self.conv(images))))), inplace=True)
        x = self.fc(x.flatten(1)) * scale
        x = x if factor is None else x * factor
        return self.form(x if extra is None else x + extra["row"] + extra["all"])


def trained(model, loss_of, x, y):
    """What is left of one backward."""
    loss = loss_of(model, x, y)
    loss.backward()
    return [loss, *(None if p.grad is None else p.grad for p in model.parameters())]


def close(expected, actual, within=1e-6):
    return all(
        one is other if one is None or other is None else one.shape == other.shape and (one - other).abs().max() < within
        for one, other in zip(expected, actual, strict=True)
    )


def same(loss_of, devices=TWO, rows=7, form=lambda logits: logits, **options):
    """Whether training on ``devices`` leaves what it does on one."""
    torch.manual_seed(0)
    model, x, y = Net(form), torch.randn(rows, 1, 4, 4), torch.randint(3, (rows,))
    other = copy.deepcopy(model)
    expected = trained(model, loss_of, x, y)
    divided = parwrap.data_parallel(device_ids=devices, **options)(trained)(other, loss_of, x, y)
    return close(expected, divided)


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


def normed():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))


def one_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters()), *(each.float() for each in model.buffers())]


@pytest.mark.parametrize(
    ("rows", "dtype", "offset", "within"), [(7, torch.float32, 0, 1e-6), (7, torch.float64, 1000, 1e-9), (3, torch.float64, 0, 1e-12)]
)
@pytest.mark.parametrize("gather", [True, False])
def test_sync_bn_inside_equals_one_large_batch(rows, gather, dtype, offset, within):
    torch.manual_seed(0)
    model, x, y = normed().to(dtype), offset + torch.randn(rows, 1, 4, 4, dtype=dtype), torch.randint(3, (rows,))
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(device_ids=THREE, gather=gather)(parwrap.sync_bn(one_step))(other, x, y)

    assert close(expected, actual, within)


def test_without_sync_bn_running_statistics_are_those_of_the_first_replica():
    norm, x = nn.BatchNorm1d(1, momentum=1.0), torch.arange(8.0)[:, None]
    with parwrap.data_parallel(device_ids=TWO):
        out = norm(x)

    assert 1.5 == norm.running_mean.item()
    assert 1 == norm.num_batches_tracked.item()
    assert torch.allclose(out[:4], out[4:])


def test_with_one_replica_sync_bn_changes_nothing():
    model, x, y = normed(), torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(device_ids=["cpu"])(parwrap.sync_bn(one_step))(other, x, y)

    assert all(torch.equal(one, two) for one, two in zip(expected, actual, strict=True))


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x):
        if x[0, 0] > 3:
            raise KeyError("on purpose")
        return self.norm(x)


@pytest.mark.parametrize("inside", [parwrap.sync_bn, lambda function: function], ids=["others wait for it", "nobody waits"])
def test_an_error_in_a_replica_is_the_callers_with_its_device_and_its_place(inside):
    with pytest.raises(KeyError, match="on purpose") as raised:
        parwrap.data_parallel(device_ids=THREE)(inside(Fails()))(torch.arange(6.0)[:, None])

    assert ["in replica 2 on cpu (parwrap.data_parallel)"] == raised.value.__notes__
    assert 'raise KeyError("on purpose")' in str(raised.traceback[-1].statement)


class Skips(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.first, self.second, self.both = nn.BatchNorm1d(1), nn.BatchNorm1d(1), both

    def forward(self, x):
        if x[0, 0] > 1:
            return self.second(x) if self.both else x
        return self.first(x)


@pytest.mark.parametrize(
    ("both", "message"),
    [
        (
            True,
            "replica 0 on cpu is in batch norm 'first' while replica 1 on cpu is in batch norm 'second'. Have all replicas run the same ",
        ),
        (False, "replica 0 on cpu is in batch norm 'first', and replica 1 on cpu is through with its forward. Have all replicas run "),
    ],
)
def test_replicas_in_different_layers_are_named(both, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)), parwrap.data_parallel(device_ids=TWO), parwrap.sync_bn():
        Skips(both)(torch.arange(4.0)[:, None])


def test_a_batch_of_one_value_has_no_statistics():
    class Picks(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x[:0] if x[0, 0] else x)

    @parwrap.data_parallel(device_ids=TWO)
    @parwrap.sync_bn
    def run():
        nn.Sequential(nn.Identity(), norm)(torch.tensor([[0.0], [1.0]]))

    norm = Picks(1)
    norm._check_input_dim = lambda x: None
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        run()


def test_a_batch_norm_in_a_checkpoint_is_refused_and_not_normalized_otherwise_in_the_backward():
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)

    with (
        parwrap.data_parallel(device_ids=TWO),
        parwrap.sync_bn(),
        pytest.raises(parwrap.UsageError, match="a batch norm inside of a checkpoi"),
    ):
        Checkpointed()(torch.randn(4, 1)).sum().backward()


def test_checkpoints_without_it_are_as_ever():
    def loss_of(model, x, y):
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)

    assert same(loss_of)


class Modes(nn.Module):
    """Notes in which modes it runs."""

    def __init__(self):
        super().__init__()
        self.fc, self.seen = nn.Linear(2, 2), []

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
    seen = model.seen = type("Notes", (), {"all": [], "append": lambda self, each: self.all.append(each)})()
    with parwrap.data_parallel(device_ids=TWO), mode():
        out = model(torch.randn(4, 2))

    assert [expected] * 2 == seen.all
    assert (expected[1], expected[2]) == (out.is_inference(), out.dtype)


def weights(steps=4, half=False):
    torch.manual_seed(0)
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(6, 1, 4, 4)
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), (x.mean((1, 2, 3)) > 0).long()).backward()
        optimizer.step()
    return [each.detach().float() for each in model.state_dict().values()]


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


def test_models_are_divided_and_losses_and_what_is_inside_of_others_are_not():
    class ArcLoss(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    model, bare, loss, preparing = (calls_of(kind) for kind in (nn.Linear, nn.Linear, ArcLoss, nn.Identity))
    x = torch.randn(6, 2)
    with parwrap.data_parallel(device_ids=TWO):
        outer = nn.Sequential(model(2, 2), bare(2, 2))
        loss(2, 2)(outer(preparing()(x)))

    assert [(3, 3), (3, 3), (6,), (6,)] == [kind.rows for kind in (model, bare, loss, preparing)]


WHOLE = {
    "it is given tensors of 6 and of 4 rows, so that the samples are not to be told": lambda: (
        nn.Bilinear(2, 2, 1),
        torch.ones(6, 2),
        torch.ones(4, 2),
    ),
    "its batch is not the first dimension (batch_first=False)": lambda: (nn.LSTM(2, 2), torch.ones(6, 3, 2)),
    "it is given a PackedSequence, which holds tensors of its own": lambda: (
        nn.LSTM(2, 2, batch_first=True),
        nn.utils.rnn.pack_padded_sequence(torch.ones(6, 3, 2), torch.full((6,), 3), batch_first=True),
    ),
    "it is given a tensor that is sparse or nested": lambda: (nn.Linear(2, 2), torch.ones(6, 2).to_sparse()),
    "it is compiled; compile the parts of it instead": lambda: (torch.compile(nn.Linear(2, 2), backend="eager"), torch.ones(6, 2)),
    "it is compiled by TorchScript": lambda: (torch.jit.trace(nn.Linear(2, 2), torch.ones(6, 2)), torch.ones(6, 2)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse")
@pytest.mark.parametrize("reason", WHOLE)
def test_what_cannot_be_divided_runs_as_a_whole_and_says_why_once(reason):
    model, *given = WHOLE[reason]()

    def run():
        try:
            return model(*given)
        except RuntimeError as error:
            return str(error)

    expected = run()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with parwrap.data_parallel(device_ids=TWO):
            for _ in range(2):
                actual = run()

    assert str(expected) == str(actual)
    assert 1 == len(
        [each for each in said if f"on cpu alone, and parwrap.data_parallel does nothing for it: {reason}. " in str(each.message)]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: x.mean(0, keepdim=True).expand(5, 2),
            "has returned tensors of shape [5, 2] and [5, 2] for 3 and 2 samples, which have no row",
        ),
        (
            lambda x: x.sum().long(),
            "has returned a Tensor that differs between its replicas and has no row for each sample, so it cannot be ",
        ),
        (
            lambda x: str(x.sum().item()),
            "has returned a str that differs between its replicas and has no row for each sample, so it cannot be ",
        ),
        (lambda x: [x] * len(x), "has returned outputs of different structure on its replicas: "),
    ],
)
def test_outputs_that_cannot_be_put_together_are_errors(make, message):
    class Odd(nn.Linear):
        def forward(self, x):
            return make(x + 0 * super().forward(x))

    with parwrap.data_parallel(device_ids=TWO), pytest.raises(parwrap.UsageError, match=re.escape(f"Odd {message}")):
        Odd(2, 2)(torch.arange(10.0).view(5, 2))


def test_a_lazy_model_takes_its_shapes_from_a_whole_batch():
    torch.manual_seed(0)
    model, x = nn.LazyLinear(2), torch.randn(4, 3)
    with parwrap.data_parallel(device_ids=TWO):
        outputs = [model(x), model(x)]

    assert torch.allclose(*outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": "cpu"}, "device_ids='cpu' is not a list of devices: give numbers of GPUs or names, as [0, 1] or ['cpu', 'cpu']."),
        ({"device_ids": []}, "device_ids=[] is not a list of devices: give numbers of GPUs or names, as [0, 1] or ['cpu', 'cpu']."),
        ({"device_ids": ["gpu"]}, "device_ids names 'gpu', which is no device: give numbers of GPUs, 'cuda:0' or 'cpu'."),
        ({"device_ids": [True]}, "device_ids names True, which is no device: give numbers of GPUs, 'cuda:0' or 'cpu'."),
        (
            {"device_ids": ["meta"]},
            "device_ids names 'meta', and parwrap.data_parallel runs on GPUs ('cuda:0' or its number) and on 'cpu'.",
        ),
        ({"device_ids": ["cpu", 0]}, "device_ids=['cpu', 0] mixes the CPU with GPUs: parts of one size would take far longer there."),
        ({"gather": "no"}, "gather='no' is not one of its values: True puts outputs together, False leaves them on their devices."),
        ({"loss": "max"}, "loss='max' is not one of its values: numbers that a model returns are a 'mean' over the samples or a 'sum'."),
        ({"devices": 2}, "parwrap.data_parallel has no option 'devices'; did you mean 'device_ids'?"),
    ],
)
def test_options_that_mean_nothing_are_errors(options, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        parwrap.data_parallel(**options)


def test_devices_that_are_not_there_are_errors_before_training():
    with pytest.raises(parwrap.UsageError, match=r"device_ids names cuda:99, and torch sees \d+ GPUs here: name others, or leave it out"):
        parwrap.data_parallel(device_ids=[99, 99])(weights)()


def test_a_model_that_is_not_on_the_first_device_is_an_error():
    with (
        parwrap.data_parallel(device_ids=TWO),
        pytest.raises(parwrap.UsageError, match="Linear has a tensor on meta, and the first of the dev"),
    ):
        nn.Linear(2, 2, device="meta")(torch.ones(4, 2))


def test_sync_bn_among_some_ranks_has_no_meaning_for_replicas():
    with (
        parwrap.data_parallel(device_ids=TWO),
        parwrap.sync_bn(group_size=1),
        pytest.raises(parwrap.UsageError, match="are of ranks: leave t"),
    ):
        nn.BatchNorm1d(2)(torch.randn(4, 2))


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
    assert (parwrap.rank() == 0) == (", data_parallel does nothing with one device a rank, seed " in said.getvalue())
    message = re.escape(
        f"parwrap.data_parallel(device_ids={TWO}) is for one process, and there are 2 ranks, each of which has one device. "
    )
    with pytest.raises(parwrap.UsageError, match=message), parwrap.distributed(), parwrap.data_parallel(device_ids=TWO):
        pass
    with pytest.raises(parwrap.UsageError, match=message), parwrap.data_parallel(device_ids=TWO), parwrap.distributed():
        nn.Linear(2, 1)(torch.ones(4, 2))


def test_inside_of_itself_it_does_nothing_more_and_a_single_device_switches_it_off():
    rows = calls_of(nn.Linear)
    model, x = rows(2, 1), torch.ones(6, 2)
    with parwrap.data_parallel(device_ids=TWO):
        with parwrap.data_parallel():
            model(x)
        with parwrap.data_parallel(device_ids=THREE):
            model(x)
        with parwrap.data_parallel(device_ids=["cpu"]):
            model(x)

    assert (3, 3, 2, 2, 2, 6) == rows.rows


def test_the_example_learns_the_same_with_outputs_in_pieces():
    printed = subprocess.run(
        [sys.executable, "examples/data_parallel.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout

    assert 3 == len(re.findall(r"^\S.*: accuracy 0\.9\d+$", printed, re.MULTILINE))


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU here")
@pytest.mark.parametrize("gather", [True, False])
def test_gpus_give_what_one_gives(gather):
    torch.manual_seed(0)
    gpus = list(range(torch.cuda.device_count()))
    model, x, y = normed().cuda(0).double(), torch.randn(9, 1, 4, 4).cuda(0).double(), torch.randint(3, (9,)).cuda(0)
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(device_ids=gpus if len(gpus) > 1 else [0, 0], gather=gather)(parwrap.sync_bn(one_step))(other, x, y)

    assert close(expected, actual)
