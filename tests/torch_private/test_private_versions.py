"""A torch that is newer than those that parwrap is tested with: what is said at the start, and what a changed name does."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.torch_private import versions

ROOM = Path(versions.__file__).parent
NOT_ON_A_CLASS = {
    *(
        "_foreach_",
        "_dynamo",
        "_torchdynamo_disable",
        "_torchdynamo_disable_msg",
        "_torchdynamo_inline",
        "_orig_mod",
        "_is_replica",
        "_shutdown",
        "_saved_sparse",
        "_saved_reduction",
    ),  # set or asked for with a default
    *("_workers", "_worker_pids_set"),  # asked for with a default, and set on an instance
    *("_global_", "_getframe", "_parent_pid"),  # not a whole name, not torch's
}


@pytest.mark.parametrize("names", ["OF_RANKS", "OF_LAUNCHER"])
def test_this_torch_has_all_private_names(names):
    listed = getattr(versions, names)
    for path in re.findall(r"(torch[a-z_.]*)\.", " ".join(listed)):
        importlib.import_module(path) if importlib.util.find_spec(path) else None

    assert [] == versions.missing_names(listed)


def test_every_private_name_that_is_used_is_listed():
    listed = set(re.findall(r"\b_\w+", " ".join(versions.OF_RANKS + versions.OF_GPUS + versions.OF_LAUNCHER)))
    trees = [ast.parse(path.read_text()) for path in ROOM.glob("*.py") if path.name != "versions.py"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    assert set() == {name for name in used if re.fullmatch(r"_[A-Za-z]\w*", name)} - listed - NOT_ON_A_CLASS


def test_a_tested_torch_and_a_newer_one_with_all_names_are_not_spoken_of(monkeypatch, capsys):
    monkeypatch.setattr(versions, "NEWEST", (2, 0))
    versions.warn_of_newer_torch([*versions.OF_RANKS, *versions.OF_LAUNCHER])
    monkeypatch.undo()
    versions.warn_of_newer_torch(["torch.nn.gone"])

    assert "" == capsys.readouterr().err


@pytest.mark.ranks(2)
def test_a_newer_torch_that_has_changed_a_name_is_one_line_and_runs(monkeypatch, capfd):
    monkeypatch.setattr(versions, "NEWEST", (2, 0))
    monkeypatch.delattr(clip_grad, "_clip_grads_with_norm_")
    with parwrap.distributed():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=1):
            model(x).sum().backward()
            optimizer.step()

    said = [line for line in capfd.readouterr().err.splitlines() if "newer than" in line]
    expected = (
        f"parwrap: torch {torch.__version__} is newer than those that parwrap is tested with (2.9 to 2.15), and has changed private names "
        "that parwrap uses: torch.nn.utils.clip_grad._clip_grads_with_norm_. What needs them fails. Install one of these versions, or a "
        "newer parwrap."
    )
    assert [expected] * (parwrap.rank() == 0) == said


def test_a_changed_name_is_an_error_where_it_is_needed():
    gone = versions.private("torch.nn.utils.clip_grad._scale_all_of_them")

    with pytest.raises(RuntimeError, match=r"has no torch\.nn\.utils\.clip_grad\._scale_all_of_them, which parwrap needs here: install"):
        gone([], 1.0)


@pytest.mark.ranks(2)
def test_a_torch_that_cannot_shard_is_an_error_that_names_the_version(monkeypatch):
    monkeypatch.setattr("parwrap.strategies.fsdp.DISABLED_SUBCLASSES_WORK", False)

    text = r"^strategy='fsdp' needs torch 2\.10 or newer, and this is torch \S+: install a newer torch, or use strategy='zero1'"
    with pytest.raises(parwrap.UsageError, match=text), parwrap.distributed(strategy="fsdp"):
        pass
