"""What ``data_parallel`` refuses, what it runs on one device with a warning, and errors inside of replicas."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import parwrap
from divided import THREE, TWO
from parwrap.strategies.replicas import current_replica


class Returns(nn.Module):
    """A model with parameters that returns what a function makes of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(1)), function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": "cpu"}, "device_ids='cpu' is not a list of devices: use GPU numbers or device names, such as [0, 1] or ['cpu', "),
        ({"device_ids": []}, "device_ids=[] is not a list of devices: use GPU numbers or device names, such as [0, 1] or ['cpu', 'cpu'], "),
        ({"device_ids": ["gpu"]}, "device_ids names 'gpu', which is not a device: use GPU numbers, 'cuda:0' or 'cpu'."),
        ({"device_ids": [True]}, "device_ids names True, which is not a device: use GPU numbers, 'cuda:0' or 'cpu'."),
        (
            {"device_ids": ["meta"]},
            "device_ids names 'meta', but parwrap.data_parallel runs on GPUs ('cuda:0' or its number) and on 'cpu'.",
        ),
        (
            {"device_ids": ["cpu", 0]},
            "device_ids=['cpu', 0] mixes the CPU with GPUs: parts of equal size would take far longer on the CPU. Name devices of "
            "one kind.",
        ),
        ({"gather": "no"}, "gather='no' is neither True, which gathers outputs on the first device, nor False, which leaves them on "),
        (
            {"loss": "max"},
            "loss='max' is neither 'mean' nor 'sum'. loss= says whether a scalar that the model returns is the mean or the sum over the "
            "samples of its batch. Leave it out if the model returns no scalar.",
        ),
        ({"devices": 2}, "parwrap.data_parallel has no option 'devices'; did you mean 'device_ids'?"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        parwrap.data_parallel(**options)


def test_devices_that_do_not_exist():
    with (
        pytest.raises(parwrap.UsageError, match=r"names cuda:99, but torch sees \d+ GPUs? here: choose other devices, or name none to use"),
        parwrap.data_parallel([99, 99]),
    ):
        pass


def test_a_model_that_is_not_on_the_first_device():
    with (
        parwrap.data_parallel(TWO),
        pytest.raises(
            parwrap.UsageError,
            match=r"test_data_parallel_refusals.py:\d+ calls Linear, which has a tensor on meta, but the model must be on the first device",
        ),
    ):
        nn.Linear(2, 2, device="meta")(torch.ones(4, 2))


REFUSED = {
    "a loss": (
        lambda x: (x[:, 0] * torch.arange(len(x))).mean(),
        r"a number for each part of the batch \(1, 0\.5\)\. If this number .*pass loss='mean' or loss='sum' to parwrap\.data_par",
    ),
    "a float": (lambda x: float(len(x)), r"a number for each part of the batch \(3, 2\)\."),
    "a count": (
        len,
        r"an object of type int that differs between the parts of the batch and has no row for each sample\. Return",
    ),
    "other keys": (
        lambda x: {str(len(x)): x},
        r"an object of type dict that differs between the parts of the batch and has no row for each sample",
    ),
    "no batch": (
        lambda x: torch.ones(4, 2),
        r"tensors of shape \[4, 2\] and \[4, 2\] for 3 and 2 samples, which have no row for each sample\. The first dimension of all",
    ),
    "other lengths": (
        lambda x: torch.ones(len(x), len(x)),
        r"tensors of shape \[3, 3\] and \[2, 2\] for the parts of a batch\. All dimensions but the first must be equal: pad to the length",
    ),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_outputs_that_cannot_be_merged(function, message):
    with (
        parwrap.data_parallel(TWO),
        pytest.raises(parwrap.UsageError, match=r"test_data_parallel_refusals.py:\d+ calls Returns, which returned " + message),
    ):
        Returns(function)(torch.ones(5, 2))


class Batch:
    def __init__(self, x):
        self.given = {"x": x}


WHOLE = {
    "other rows": ((torch.ones(4, 1), torch.ones(3, 1)), "its inputs have 4 and 3 rows, so the number of samples is unclear"),
    "sparse": ((torch.ones(4, 1), torch.eye(4).to_sparse()), "one of its inputs is a sparse or nested tensor"),
    "packed": (
        (torch.ones(2, 1), pack_padded_sequence(torch.ones(2, 2, 1), [2, 1], batch_first=True)),
        "one of its inputs is a PackedSequence, which contains tensors",
    ),
    "object": ((torch.ones(4, 1), Batch(torch.ones(4))), "one of its inputs is a Batch, which contains tensors"),
    "texts": (
        (torch.ones(2, 1), {"texts": ["a", "b"]}),
        "one of its inputs is a list or an array of 2 items for 2 samples, which may be one for each sample",
    ),
    "array": ((torch.ones(3, 1), torch.ones(3).numpy()), "one of its inputs is a list or an array of 3 items for 3 samples"),
}


@pytest.mark.parametrize(("given", "reason"), WHOLE.values(), ids=WHOLE)
def test_calls_that_cannot_be_cut_run_on_one_device_with_a_warning(given, reason):
    model = Returns(lambda *given: given)
    with (
        parwrap.data_parallel(TWO),
        pytest.warns(UserWarning, match=f"Returns runs on cpu alone, because parwrap.data_parallel cannot divide it: {reason}") as said,
    ):
        out = [model(*given), model(*given)]

    assert all(each[1] is given[1] for each in out)
    assert 1 == len(said)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_models_run_on_one_device_with_a_warning():
    model, x = nn.Sequential(nn.Linear(2, 1)), torch.randn(4, 2)
    expected = model(x)
    for compiled in (torch.compile(model, backend="eager"), nn.Sequential(torch.jit.trace(model, x))):
        with parwrap.data_parallel(TWO), pytest.warns(UserWarning, match=r"cannot divide it: the model, or a part of it, is compiled\."):
            assert torch.allclose(expected, compiled(x))


@pytest.mark.ranks(2)
def test_on_several_ranks_it_does_nothing_and_several_devices_are_an_error():
    rows = []
    model = Returns(lambda x: rows.append(len(x)) or x * 1)
    with parwrap.distributed(), parwrap.data_parallel():
        model(torch.ones(4, 2))

    assert [4] == rows
    message = re.escape(f"parwrap.data_parallel({TWO}) is for one process, but there are 2 ranks, each with one device. Remove the devices")
    with pytest.raises(parwrap.UsageError, match=message), parwrap.distributed(), parwrap.data_parallel(TWO):
        pass
    with pytest.raises(parwrap.UsageError, match=message), parwrap.data_parallel(TWO), parwrap.distributed():
        model(torch.ones(4, 2))


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x):
        if current_replica().index == 2:
            raise KeyError("on purpose")
        return self.norm(x)


@pytest.mark.parametrize("inside", [parwrap.sync_bn, lambda function: function], ids=["others wait for it", "nobody waits"])
def test_an_error_in_a_replica_is_the_callers_and_names_the_device(inside):
    with pytest.raises(KeyError, match="on purpose") as raised:
        parwrap.data_parallel(THREE)(inside(Fails()))(torch.arange(6.0)[:, None])

    assert ["in replica 2 on cpu (parwrap.data_parallel)"] == raised.value.__notes__
    assert 'raise KeyError("on purpose")' in str(raised.traceback[-1].statement)
