"""Ranks that run one test after another: what they keep, what they compare, and what ends them."""

import importlib
import os
import pathlib
import random
import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import parwrap
from inner_pytest import Run, on_two_ranks

pytest_plugins = ["pytester"]

PIDS = """
    def note():
        with open("pids", "a") as file:
            print(os.getpid(), file=file)

    @pytest.mark.ranks(2)
    def test_first():
        note()
        {first}

    @pytest.mark.ranks(2{fresh})
    def test_second():
        note()
"""


def processes(run: Run, pytester: pytest.Pytester, first: str = "", fresh: str = "") -> list[int]:
    """The pids of the ranks of two tests, one after the other."""
    run(PIDS.format(first=first, fresh=fresh))
    return [int(pid) for pid in (pytester.path / "pids").read_text().split()]


def test_the_next_test_runs_in_the_same_processes(run: Run, pytester: pytest.Pytester):
    assert 2 == len({*processes(run, pytester)})


def test_a_fresh_test_runs_in_processes_of_its_own(run: Run, pytester: pytest.Pytester):
    assert 4 == len({*processes(run, pytester, fresh=", fresh=True")})


@pytest.mark.parametrize("first", ["assert rank() == 1", "os.environ['LEFT'] = '1'", "pytest.skip('not today')", "if rank(): os._exit(3)"])
def test_after_a_test_that_does_not_pass_the_next_runs_in_new_processes(run: Run, pytester: pytest.Pytester, first: str):
    assert 4 == len({*processes(run, pytester, first)})


IMPORTS = """
import builtins, io, numpy, pathlib, random, threading, torch, warnings
from torch import save
from torch.optim import optimizer
from parwrap.ranks import group

"""
LEFT = [
    ("multiprocessing.get_context('fork').Process(target=time.sleep, args=[60], name='lasting').start()", "the process 'lasting'"),
    ("torch.autograd.backward = print", "torch.autograd.backward"),
    ("torch.save = print", "torch.save"),
    ("torch.nn.Module.train = print", "torch.nn.modules.module.Module.train"),
    ("torch.optim.SGD.own = print", "torch.optim.sgd.SGD.own"),
    ("torch.utils.data.DataLoader.__len__ = print", "torch.utils.data.dataloader.DataLoader.__len__"),
    ("builtins.open = print", "builtins.open"),
    ("os.rename = print", "os.rename"),
    ("sys.modules['tarfile'] = pathlib", "the module tarfile"),
    ("random.shuffle = print", "random.shuffle"),
    ("numpy.random.shuffle = print", "numpy.random.shuffle"),
    ("pathlib.Path.open = print", f"{pathlib.Path.__module__}.Path.open"),
    ("sys.excepthook = print", "sys.excepthook"),
    ("sys.stdout = io.StringIO()", "the stream sys.stdout"),
    ("globals()['save'] = print", "test_inner.save"),
    ("os.environ['LEFT'] = 'yes'", "the environment variable LEFT (None before, 'yes' now)"),
    ("del os.environ['OMP_NUM_THREADS']", "the environment variable OMP_NUM_THREADS ('1' before, None now)"),
    ("os.chdir('/')", "the working directory ("),
    ("os.dup2(os.open(os.devnull, os.O_WRONLY), 1)", "the file descriptor 1 ("),
    ("threading.Thread(target=time.sleep, args=[60], name='lasting', daemon=True).start()", "the thread 'lasting'"),
    ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "the signal handler SIGUSR1 ("),
    ("warnings.simplefilter('error')", "the warning filters ([] before, [('error', None, <class 'Warning'>, None, 0)] now)"),
    ("torch.set_grad_enabled(False)", "whether gradients are on (True before, False now)"),
    ("torch.set_default_dtype(torch.float64)", "the default dtype (torch.float32 before, torch.float64 now)"),
    ("torch.set_default_device('meta')", "the default device (device(type='cpu') before, device(type='meta') now)"),
    ("torch.set_num_threads(2)", "torch's number of threads (1 before, 2 now)"),
    ("torch.nn.modules.module.register_module_forward_hook(print)", "torch's forward_hooks ("),
    ("optimizer.register_optimizer_step_post_hook(print)", "torch's optimizer_post_hooks ("),
    ("dist.new_group([0, 1])", "the open process groups ("),
    ("group.current().observer = print", "group.current().observer"),
]


def test_a_test_that_leaves_something_changed_fails_and_names_it(run: Run):
    result = run(IMPORTS + on_two_ranks("\n".join(leave for leave, _ in LEFT)))

    result.assert_outcomes(failed=1)
    said = next(line for line in result.stdout.lines if "] The test passed, but leaves changed: " in line).partition(": ")[2]
    for _, named in LEFT:
        assert f", {named}" in f", {said}", named
    advice = "Undo the change in the test, or run the test in processes of its own with @pytest.mark.ranks(n, fresh=True)."
    assert any(line.endswith(f"The next test runs in the same processes. {advice}") for line in result.stdout.lines)


def test_a_fresh_test_may_leave_what_it_likes(run: Run):
    result = run(on_two_ranks("os.environ['LEFT'] = '1'").replace("ranks(2)", "ranks(2, fresh=True)"))

    result.assert_outcomes(passed=1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("repeated", range(2))
def test_every_test_begins_with_the_same_random_streams(repeated):
    drawn = random.random(), float(np.random.rand()), torch.rand(1).item()
    torch.manual_seed(7)

    assert [drawn] * 2 == parwrap.gather(drawn)
    assert (0.8444218515250481, 0.5488135039273248, pytest.approx(0.4962566)) == drawn


@pytest.mark.ranks(2)
def test_a_test_may_build_optimizers_and_loaders_with_workers():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.RMSprop(model.parameters())
    for batch in torch.utils.data.DataLoader([torch.ones(1)] * 2, num_workers=1, persistent_workers=True):
        model(batch).sum().backward()
        optimizer.step()


@pytest.mark.ranks(2)
def test_a_test_may_load_and_unload_modules():
    sys.modules.pop("csv", None)
    importlib.import_module("torch.optim.swa_utils")


@pytest.mark.ranks(2)
def test_a_thread_that_is_about_to_end_is_waited_for():
    threading.Timer(0.1, print).start()


LOADED = "times that this file was imported"
vars(sys)[LOADED] = vars(sys).get(LOADED, 0) + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(2))
def test_a_module_is_imported_once_for_its_tests(number):
    assert 1 == vars(sys)[LOADED]


@pytest.mark.parametrize("repeated", range(2))
@pytest.mark.ranks(2)
def test_a_rank_has_the_directory_of_its_test(repeated, tmp_path, in_tmp_path):
    assert str(tmp_path) == os.getcwd()


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.ranks(3)
def test_pools_of_several_sizes_live_side_by_side():
    total = torch.ones(1)
    dist.all_reduce(total)

    assert 3 == total.item()
