"""Calls that cannot launch raise an error immediately; if ranks cannot be forked they are spawned, which needs cloudpickle."""

import os
import sys
import threading

import pytest
import torch

import parwrap
from parwrap.errors import LaunchError, UsageError
from parwrap.inline.forking import choose_start_method


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"nprocs": 0}, r"^nprocs=0 is not a positive number of ranks, nor 'gpu', 'cpu' or 'auto'\.$"),
        ({"nprocs": True}, r"^nprocs=True is not a positive number of ranks"),
        ({"nprocs": "two"}, r"^nprocs='two' is not a positive number of ranks"),
        (
            {"returns": "mean"},
            r"^returns='mean' is not a valid value\. Choose one of: 'rank0': rank 0's result; 'all': the list of the results of all",
        ),
        (
            {"start_method": "thread"},
            r"^start_method='thread' is not a valid value\. Choose one of: None: forks ranks unless CUDA is initialized; 'fork'",
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_at_once(asked, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**asked)
    with pytest.raises(UsageError, match=text):
        parwrap.launch(print, **asked)


def test_a_call_in_the_place_of_a_function_is_told_of():
    with pytest.raises(
        UsageError,
        match=r"takes a function to call on the ranks, not 3: instead of train\(3\), write parwrap\.launch\(train, 3, nprocs=2\)",
    ):
        parwrap.launch(3, nprocs=2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nproc": 2}, r"takes no argument 'nproc', which parwrap\.launch would pass to it\. Did you mean nprocs=2\?$"),
        (
            {"strategy": "fsdp"},
            r"train \(.*\.py:\d+\) takes no argument 'strategy', which .*\. 'strategy' is an option of parwrap\.distributed: decorate the "
            r"function, or call parwrap\.launch\(parwrap\.distributed\(strategy='fsdp'\)\(train\)\)\.$",
        ),
    ],
)
@pytest.mark.parametrize("decorator", [lambda function: function, parwrap.distributed(nprocs=2)], ids=["plain", "decorated"])
def test_options_that_launch_does_not_take_and_the_function_neither(decorator, given, text):
    @decorator
    def train(epochs, batch="own"):
        return batch

    with pytest.raises(UsageError, match=text):
        parwrap.launch(train, 1, **given, nprocs=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        parwrap.launch(train, epoch=1, nprocs=1)
    assert "mine" == parwrap.launch(train, 1, batch="mine", nprocs=1)
    assert {"strategy": "mine"} == parwrap.launch(lambda **options: options, strategy="mine", nprocs=1)


def test_a_block_cannot_be_launched():
    with (
        pytest.raises(
            UsageError,
            match=r"^`with parwrap\.distributed\(nprocs=2\):` has no function that other processes could run: decorate the training",
        ),
        parwrap.distributed(nprocs=2),
    ):
        pass


def test_there_have_to_be_as_many_gpus(monkeypatch):
    with pytest.raises(
        LaunchError, match=r"^nprocs='gpu' starts a rank on each GPU, but torch cannot use a GPU here: set a number of ranks to train on"
    ):
        parwrap.launch(print, nprocs="gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # stands for a machine that has them
    with pytest.raises(
        LaunchError, match=r"^nprocs=3 is more than the GPUs that torch can use here \(2\)\. Use at most 2, or set backend='gloo' to"
    ):
        parwrap.launch(print, nprocs=3)


def test_where_cuda_has_started_ranks_are_spawned_which_takes_cloudpickle(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # stands for a GPU in use
    assert "spawn" == choose_start_method()
    with pytest.raises(
        UsageError, match=r"CUDA is initialized here, .* torch\.cuda\.is_available\(\) is called, or use start_method='spawn'\.$"
    ):
        parwrap.launch(print, nprocs=2, start_method="fork")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        UsageError,
        match=r"^parwrap\.distributed with nprocs=2 starts ranks in new interpreters here, but cloudpickle, which sends functions to them, "
        r"is not installed: pip install cloudpickle, or install parwrap\[notebook\]\. Or call it before anything initializes",
    ):
        parwrap.launch(print, nprocs=2)


def test_a_driver_that_was_only_asked_for_its_gpus_is_noticed(monkeypatch):
    caller = os.getpid()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # stands for a machine with a GPU
    assert "fork" == choose_start_method()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != caller)  # as after torch.cuda.is_available()
    assert "spawn" == choose_start_method()


@pytest.mark.parametrize("reached", ["by a closure", "as an argument", "in a model"])
def test_what_spawned_ranks_cannot_be_sent_is_named(reached):
    lock, model = threading.Lock(), torch.nn.Linear(1, 1)
    model.settings = {"cache": [None, lock]}
    name, call = {
        "by a closure": ("lock", lambda: parwrap.launch(lambda: lock, nprocs=2, start_method="spawn")),
        "as an argument": ("given", lambda: parwrap.launch(lambda given: None, lock, nprocs=2, start_method="spawn")),
        "in a model": (r"model\.settings\['cache'\]\[1\]", lambda: parwrap.launch(lambda: model, nprocs=2, start_method="spawn")),
    }[reached]

    with pytest.raises(
        UsageError,
        match=rf"here, and {name}, which the function uses, cannot be sent to them: cannot pickle '_thread\.lock' object\. Create it",
    ):
        call()
