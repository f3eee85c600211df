"""Errors for models and options that cannot run on several devices."""

import re

import pytest
import torch
from torch import nn

import parwrap
from on_devices import THREE, TWO, weights
from parwrap.strategies.data_parallel.replica_threads import current_replica


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x):
        if current_replica() is not None and x[0, 0] > 3:  # else the whole batch is run, with a warning
            raise KeyError("on purpose")
        return self.norm(x)


@pytest.mark.parametrize("inside", [parwrap.sync_bn, lambda function: function], ids=["others wait for it", "nobody waits"])
def test_an_error_in_a_replica_is_the_callers_with_its_device_and_its_place(inside):
    with pytest.raises(KeyError, match="on purpose") as raised:
        parwrap.data_parallel(device_ids=THREE)(inside(Fails()))(torch.arange(6.0)[:, None])

    assert ["in replica 2 on cpu (parwrap.data_parallel)"] == raised.value.__notes__
    assert 'raise KeyError("on purpose")' in str(raised.traceback[-1].statement)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device_ids": "cpu"},
            "device_ids='cpu' is not a list of devices: use GPU numbers or device names, such as [0, 1] or ['cpu', 'cpu'].",
        ),
        ({"device_ids": []}, "device_ids=[] is not a list of devices: use GPU numbers or device names, such as [0, 1] or ['cpu', 'cpu']."),
        ({"device_ids": ["gpu"]}, "device_ids names 'gpu', which is not a device: use GPU numbers, 'cuda:0' or 'cpu'."),
        ({"device_ids": [True]}, "device_ids names True, which is not a device: use GPU numbers, 'cuda:0' or 'cpu'."),
        (
            {"device_ids": ["meta"]},
            "device_ids names 'meta', but parwrap.data_parallel runs on GPUs ('cuda:0' or its number) and on 'cpu'.",
        ),
        (
            {"device_ids": ["cpu", 0]},
            ("device_ids=['cpu', 0] mixes the CPU with GPUs: parts of equal size would take far longer on the CPU."),
        ),
        (
            {"gather": "no"},
            ("gather='no' is neither True, which gathers outputs on the first device, nor False, which leaves them on their devices."),
        ),
        ({"loss": "max"}, "loss='max' is not 'mean' or 'sum': it says how a number that the model returns combines the samples."),
        ({"devices": 2}, "parwrap.data_parallel has no option 'devices'; did you mean 'device_ids'?"),
    ],
)
def test_options_that_mean_nothing_are_errors(options, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        parwrap.data_parallel(**options)


def test_devices_that_are_not_there_are_errors_before_training():
    with pytest.raises(
        parwrap.UsageError,
        match=(r"device_ids names cuda:99, but torch sees \d+ GPUs here: choose others, or remove device_ids to use all"),
    ):
        parwrap.data_parallel(device_ids=[99, 99])(weights)()


def test_a_model_that_is_not_on_the_first_device_is_an_error():
    with (
        parwrap.data_parallel(device_ids=TWO),
        pytest.raises(parwrap.UsageError, match="Linear has a tensor on meta, but the model must be on the first dev"),
    ):
        nn.Linear(2, 2, device="meta")(torch.ones(4, 2))
