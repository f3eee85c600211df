"""The options for several devices of one process, on the command line."""

import re

import pytest

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command.plan import plan_launch


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--data-parallel", "cpu, cpu"], {"device_ids": ["cpu", "cpu"]}),
        (["--data_parallel=0,cuda:1"], {"device_ids": [0, "cuda:1"]}),
        (["--data-parallel", "all", "--no-gather"], {"device_ids": None, "gather": False}),
        (["--data-parallel", "all", "--loss", "sum", "--no_gather"], {"device_ids": None, "loss": "sum", "gather": False}),
    ],
)
def test_what_is_asked_for(argv, expected):
    planned = plan_launch([*argv, __file__], {}, 2, 8)

    assert {"data_parallel": expected} == planned.script.features


@pytest.mark.parametrize(("devices", "missing"), [("0,1", "cuda:0"), ("cuda:0,cuda:0", "cuda:0")])
def test_gpus_that_are_not_there_are_refused_in_a_line(devices, missing):
    message = f"--data-parallel names {missing}, but torch can use 0 GPUs here: choose others, or all."
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        plan_launch(["--data-parallel", devices, __file__], {}, 0, 8)


def test_an_option_of_it_needs_it():
    message = "--no-gather has no effect without --data-parallel: add it. The script's own options come after its name."
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        plan_launch(["--no-gather", __file__], {}, 0, 8)
