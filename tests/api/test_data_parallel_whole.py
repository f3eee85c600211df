"""Models whose results dividing would change run as on one device, with one warning; others are divided."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import parwrap
from on_devices import TWO

OTHERS = {}


class Net(nn.Module):
    """A layer, and what is made of what it gives."""

    def __init__(self, make=lambda net, out: out, **modules):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 3), make
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x, *others):
        return self.make(self, self.layer(x), *others)


def results(make, *batches, **options):
    """Outputs, gradients and state of the model that ``make`` makes after a few batches, and what was warned of."""
    torch.manual_seed(0)
    model, found = make(), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with parwrap.data_parallel(**options):
            for batch in batches:
                out = model(*batch)
                found += [each for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
                sum(each.square().sum() for each in found if each.requires_grad).backward()
                found = [each.detach() for each in found]
    found += [p.grad for p in model.parameters()] + list(model.state_dict().values())
    return found, [str(each.message) for each in said if "parwrap" in str(each.message)]


def lengths(net, out, each):
    return torch.stack([row[:n].mean(0) for row, n in zip(out, each, strict=True)])


def stacked(net, out, each):
    return out + torch.stack([sample.mean() for sample in each])[:, None]


def counted(net, out, y):
    return F.cross_entropy(out, y, ignore_index=-100), (out.argmax(1) == y).sum()


def keeps(net, out):
    net.kept = out.mean(0)
    return out


def enqueues(net, out):
    net.queue[: len(out)] = out.detach()
    return out


def packed(net, out, each):
    whole = pack_padded_sequence(out, each, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(net.memory(whole)[0], batch_first=True)[0]


def with_queue():
    net = Net(enqueues)
    net.register_buffer("queue", torch.zeros(8, 3))
    return net


def with_hook():
    net = Net()
    net.layer.register_forward_hook(lambda module, given, out: OTHERS.update(features=out))
    return net


X, SEQUENCES = torch.randn(4, 4), torch.randn(4, 5, 4)
LABELS = torch.tensor([1, -100, -100, 2])
MIXED = "its outputs for parts of the batch differ from those for the whole batch: it mixes samples, or the first dimension of its inputs "
APART = "its outputs for parts of the batch cannot be combined (Net returned tensors of shape "
NUMBER = "it returns a number for the whole batch, such as a loss or a count. If it is a loss that is always the mean or the sum over the "

CASES = {
    "sequence first": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), [(SEQUENCES,)], MIXED),
    "sequence first inside": (lambda: Net(lambda net, out: net.memory(out)[0], memory=nn.LSTM(3, 2)), [(SEQUENCES,)], MIXED),
    "hidden states": (lambda: Net(lambda net, out: net.memory(out), memory=nn.GRU(3, 2, 2, batch_first=True)), [(SEQUENCES,)], MIXED),
    "hidden state": (
        lambda: Net(lambda net, out: net.memory(out), memory=nn.GRU(3, 2, batch_first=True)),
        [(SEQUENCES,)],
        APART + "[1, 2, 2] and [1, 2, 2] for 2 and 2 samples, which do not have one row per sample",
    ),
    "packed inside": (
        lambda: Net(packed, memory=nn.GRU(3, 2, batch_first=True)),
        [(SEQUENCES, torch.tensor([5, 4, 2, 1]))],
        APART + "[2, 5, 2] and [2, 2, 2] for the parts of a batch: all dimensions but the first must be equal. Pad all of them",
    ),
    "unbatched": (lambda: nn.Conv1d(4, 2, 1), [(X,)], "it fails on a part of the batch (RuntimeError: Given groups=1, weight of size "),
    "mask of T by T": (
        lambda: Net(lambda net, out, mask: F.scaled_dot_product_attention(out, out, out, mask)),
        [(torch.randn(4, 4, 4), torch.ones(4, 4).tril().bool())],
        "it fails on a part of the batch (RuntimeError: ",
    ),
    "list of lengths": (
        lambda: Net(lengths),
        [(SEQUENCES, [5, 4, 2, 1])],
        "one of its inputs is a list of 4 items for 4 samples, which may ",
    ),
    "array of lengths": (
        lambda: Net(lengths),
        [(SEQUENCES, np.array([5, 4, 2, 1]))],
        "one of its inputs is a ndarray of 4 items for 4 samples, ",
    ),
    "list of samples": (
        lambda: Net(stacked),
        [(X, [*SEQUENCES[:, :4]])],
        "it fails on a part of the batch (RuntimeError: The size of tens",
    ),
    "weights of classes": (
        lambda: Net(lambda net, out, prior: out * prior),
        [(torch.randn(6, 4), X[0, :3]), (torch.randn(3, 4), X[1, :3]), (torch.randn(3, 4), X[1, :3])],
        "its inputs are tensors with 6 and with 3 rows, so the number of samples is unclear",
    ),
    "similarities": (lambda: Net(lambda net, out: out @ out.T), [(X,)], MIXED),
    "loss": (lambda: Net(lambda net, out, y: {"loss": F.cross_entropy(out, y), "logits": out}), [(X, LABELS)], NUMBER),
    "count": (lambda: Net(counted), [(X, LABELS)] * 2, NUMBER),
    "attribute": (lambda: Net(keeps), [(X,)], "it changes kept, and changes it differently for a part of the batch"),
    "buffer": (with_queue, [(X,)], "it changes queue, and changes it differently for a part of the batch"),
    "weights": (
        lambda: nn.Embedding(8, 2, max_norm=0.1),
        [(torch.arange(8),)],
        "it changes weight, and changes it differently for a part of the batch",
    ),
    "input": (
        lambda: Net(lambda net, out, x: out + x.add_(1)),
        [(X, torch.zeros(4, 3))],
        "it changes its input in place, but each part of ",
    ),
    "outside": (
        lambda: OTHERS.update(norm=nn.BatchNorm1d(3)) or Net(lambda net, out: OTHERS["norm"](out)),
        [(X,)],
        "it calls a BatchNorm1d that is not registered as a submodule, so its replicas would share that module",
    ),
    "hooks": (with_hook, [(X,)], "it, or a part of it, has hooks, which would see parts of the batch"),
    "compiled": (lambda: torch.compile(nn.Linear(4, 3), backend="eager"), [(X,)], "it, or a part of it, is compiled"),
    "compiled part": (
        lambda: Net(lambda net, out: net.part(out), part=torch.compile(nn.Linear(3, 3), backend="eager")),
        [(X,)],
        "it, or a part of it, is compiled",
    ),
    "scripted part": (
        lambda: Net(lambda net, out: net.part(out), part=torch.jit.script(nn.Linear(3, 3))),
        [(X,)],
        "it, or a part of it, is compiled by TorchScript",
    ),
    "traced": (lambda: torch.jit.trace(nn.Linear(4, 3), X), [(X,)], "it, or a part of it, is compiled by TorchScript"),
    "sparse": (lambda: nn.Linear(4, 3), [(X.to_sparse(),)], "one of its inputs is a sparse or nested tensor"),
    "packed": (
        lambda: nn.GRU(4, 2, batch_first=True),
        [(pack_padded_sequence(SEQUENCES, torch.full((4,), 3), batch_first=True),)],
        "one of its inputs is a PackedSequence, which contains tensors",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_what_dividing_gives_other_numbers_for_runs_whole_and_says_why_once(name):
    make, batches, reason = CASES[name]
    seen = []
    for options in ({"device_ids": ["cpu"]}, {"device_ids": TWO}):
        OTHERS.clear()
        copies = [[each.clone() if isinstance(each, torch.Tensor) else each for each in batch] for batch in batches * 2]
        (found, said), state = results(make, *copies, **options), OTHERS.get("features", torch.zeros(()))
        seen.append((*found, *(each for batch in copies for each in batch if isinstance(each, torch.Tensor)), state))
    expected, actual = ([None if each is None else each.to_dense().detach() for each in found] for found in seen)

    assert all(one is two or torch.equal(one, two) for one, two in zip(expected, actual, strict=True))
    assert 1 == len(said)
    assert f" runs on the whole batch, only on cpu: parwrap.data_parallel does not divide it: {reason}" in said[0]
    assert said[0].endswith(". This is shown once.")


DIVIDED = {
    "frozen layer and a counter": lambda: Net(lambda net, out: (net.frozen(out), net.steps.add_(1))[0], frozen=nn.Linear(3, 3)),
    "steps": lambda: Net(lambda net, out: setattr(net, "step", getattr(net, "step", 0) + 1) or out),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_the_same_in_all_parts_is_divided(name, monkeypatch):
    rows = []

    def make():
        net = DIVIDED[name]()
        net.frozen = nn.Linear(3, 3).requires_grad_(False)
        net.register_buffer("steps", torch.zeros(()))
        made, net.make = net.make, lambda net, out: rows.append(len(out)) or made(net, out)
        return net

    (expected, _), (actual, said) = (results(make, (X,), (X,), device_ids=devices) for devices in (["cpu"], TWO))

    assert all(one is two or torch.allclose(one, two, atol=1e-6) for one, two in zip(expected, actual, strict=True))
    assert [] == said
    assert [2, 2] == rows[-2:]


def test_a_compiled_part_is_as_it_was_afterwards():
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.layer(x))

    in_place = Body()
    in_place.compile(backend="eager")
    for part in (torch.compile(Body(), backend="eager"), in_place):
        net = Net(lambda net, out: net.part(out), part=part)
        names = [*net.state_dict()]
        with parwrap.data_parallel(device_ids=TWO), pytest.warns(UserWarning, match="it, or a part of it, is compiled"):
            net(X)

        assert names == [*net.state_dict()]
        assert 1 == next(each for name, each in net.state_dict().items() if name.endswith("tracked"))
        assert (4, 3) == net(X).shape


def test_inside_of_a_mode_of_torchs_it_runs_whole_and_is_divided_afterwards():
    net = nn.Linear(4, 3)
    with parwrap.data_parallel(device_ids=TWO):
        with FlopCounterMode(display=False) as flops, pytest.warns(UserWarning, match="it runs inside a torch mode, which does not"):
            net(X)
        with parwrap.data_parallel(device_ids=TWO, gather=False):
            assert [2, 2] == net(X).sizes

    assert 2 * X.numel() * 3 == flops.get_total_flops()


def test_hooks_on_saved_tensors_are_called():
    def packs(options):
        packed, net = [], nn.Linear(4, 3)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each)
        with parwrap.data_parallel(**options), hooks:
            net(X)
        return len(packed)

    with pytest.warns(UserWarning, match="it runs inside hooks on saved tensors, which the threads of the replicas would not call"):
        assert packs({"device_ids": ["cpu"]}) == packs({"device_ids": TWO})


def test_later_batches_are_looked_at_ever_more_rarely():
    rows, mixing = [], []

    def make(net, out):
        rows.append(len(out))
        return out - out.mean(0) if mixing else out

    net = Net(make)
    with parwrap.data_parallel(device_ids=TWO):
        for _ in range(5):
            net(X)
        looked = [4, 2, 2, 2, 2]
        assert [*looked, *looked, 2, 2, *looked, 2, 2] == rows
        mixing.append(True)
        with pytest.warns(UserWarning, match="it mixes samples") as said:
            outputs = [net(X) for _ in range(4)]

    assert 1 == len(said)
    assert [False, False, True, True] == [torch.allclose(net(X), each) for each in outputs]


def test_a_batch_that_fails_is_the_callers_and_is_not_held_against_the_model():
    net = nn.Linear(4, 3)
    with parwrap.data_parallel(device_ids=TWO, gather=False), warnings.catch_warnings(action="error"):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            net(torch.ones(4, 5))
        assert [2, 2] == net(X).sizes


def test_what_does_not_fit_as_a_whole_is_divided_without_a_look():
    def make(net, out):
        if len(out) > 2:
            raise torch.OutOfMemoryError
        return out

    with (
        parwrap.data_parallel(device_ids=TWO),
        pytest.warns(
            UserWarning, match="Net is divided without checking that the results are the same, because a whole batch does not fit on cpu"
        ),
    ):
        assert (4, 3) == Net(make)(X).shape


def test_the_warning_names_the_line_of_the_script():
    def call():
        return Net(lambda net, out: out - out.mean(0))(X)

    with parwrap.data_parallel(device_ids=TWO), pytest.warns(UserWarning, match="mixes samples") as said:
        call()

    assert [(__file__, call.__code__.co_firstlineno + 1)] == [(each.filename, each.lineno) for each in said]


def test_a_checkpoint_finds_what_its_replica_has_dropped():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(64, 64), nn.Dropout()

        def forward(self, x):
            return checkpoint(lambda x: self.drop(self.layer(x) * torch.ones(64)), x, use_reentrant=False)

    for _ in range(10):
        net, x = Drops(), torch.randn(512, 64)
        with parwrap.data_parallel(device_ids=TWO):
            out = net(x)
            out.sum().backward()

        assert torch.allclose(2.0 * (out != 0).sum(0), net.layer.bias.grad)
