import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import batch_norm
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import parwrap
from parwrap.group.group import alone

ROOT = Path(__file__).parents[2]


def test_without_ranks_it_changes_nothing():
    @parwrap.sync_bn
    def train(x):
        return nn.BatchNorm1d(2)(x)

    x = torch.randn(4, 2)

    assert torch.equal(nn.BatchNorm1d(2)(x), train(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_sise": 2}, "parwrap.sync_bn has no option 'group_sise'; did you mean 'group_size'?"),
        ({"world": 2}, "parwrap.sync_bn has no option 'world'; it takes process_group, group_size."),
        ({"group_size": 0}, "group_size=0 is not a positive integer."),
        ({"group_size": "2"}, "group_size='2' is not a positive integer."),
        ({"group_size": True}, "group_size=True is not a positive integer."),
        ({"process_group": [0, 1]}, "process_group=[0, 1] is not a process group: pass the result of torch.distributed.new_group, or use "),
        ({"process_group": [0], "group_size": 2}, "parwrap.sync_bn takes either process_group or group_size, because both say which "),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)):
        parwrap.sync_bn(**options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_torchs_function_is_put_back_under_every_name(fails):
    before = F.batch_norm

    @parwrap.sync_bn
    def train():
        assert before is not F.batch_norm
        assert batch_norm is F.batch_norm or callable(batch_norm)
        if fails:
            raise KeyError("on purpose")

    for _ in range(2):
        try:
            train()
        except KeyError:
            assert fails

        assert before is F.batch_norm
        assert before is batch_norm


@pytest.mark.ranks(2)
def test_a_name_that_the_module_has_imported_shares_too():
    @parwrap.sync_bn
    def mean():
        running = torch.zeros(1)
        batch_norm(torch.full((2, 1), float(parwrap.rank())), running, torch.ones(1), training=True, momentum=1.0)
        return running.item()

    assert 0.5 == mean()


def functional_mean():
    running = torch.zeros(1)
    batch_norm(torch.full((2, 1), float(parwrap.rank())), running, torch.ones(1), training=True, momentum=1.0)
    return running.item()


@pytest.mark.ranks(2)
def test_a_name_imported_by_the_module_of_a_block_or_by_a_helper_module_shares_too():
    helpers = types.ModuleType("helpers")
    helpers.__file__ = "helpers.py"
    exec("from torch.nn.functional import batch_norm", vars(helpers))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "helpers", helpers)
        with parwrap.sync_bn():
            assert 0.5 == functional_mean()
            assert helpers.batch_norm is F.batch_norm

    assert helpers.batch_norm is F.batch_norm


@pytest.mark.ranks(2)
def test_the_order_of_decorators_does_not_matter():
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 2).cumsum(0) * (1 + step + parwrap.rank())).square().mean().backward()
            optimizer.step()
        return str(model.state_dict())

    one = parwrap.sync_bn(parwrap.distributed(train))()

    assert one == parwrap.distributed(parwrap.sync_bn(train))()
    assert one != parwrap.distributed(train)()
    assert 1 == len(set(parwrap.gather(one)))


@pytest.mark.ranks(2)
def test_a_function_inside_may_share_in_smaller_groups():
    def mean():
        norm = nn.BatchNorm1d(1, momentum=1.0)
        norm(torch.full((2, 1), float(parwrap.rank())))
        return norm.running_mean.item()

    with parwrap.sync_bn():
        assert [0.0, 1.0] == parwrap.gather(parwrap.sync_bn(group_size=1)(mean)())
        assert 0.5 == mean()


@torch.no_grad()
def forward_all(loader, model):
    for (x,) in loader:
        model(x)


def trained_and(look):
    """The running statistics after passes that ``look`` at data in the midst of training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    samples = TensorDataset(torch.randn(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(samples, batch_size=6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        look(DataLoader(samples, batch_size=4), model)
    return torch.cat([model[1].running_mean, model[1].running_var])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("look", [update_bn, forward_all])
def test_what_all_ranks_read_whole_counts_once(look):
    with alone():
        expected = trained_and(look)
    actual = parwrap.distributed(batch="global")(parwrap.sync_bn(trained_and))(look)

    assert (actual - expected).abs().max() < 1e-6


@pytest.mark.ranks(2)
def test_what_the_users_own_sampler_shares_out_is_no_whole():
    norm = nn.BatchNorm1d(1, momentum=1.0)

    @parwrap.distributed
    @parwrap.sync_bn
    def look():
        loader = DataLoader(TensorDataset(torch.arange(4.0).view(4, 1)), 2, sampler=DistributedSampler(range(4), 2, parwrap.rank()))
        with torch.no_grad():
            for (x,) in loader:
                norm(x)
        return norm.running_mean.item()

    assert [1.5, 1.5] == parwrap.gather(look())


@pytest.mark.ranks(2)
def test_a_forward_without_gradients_on_a_training_batch_shares():
    """As of a teacher that follows the model."""
    teacher = nn.BatchNorm1d(1, momentum=1.0)
    weight = nn.Parameter(torch.ones(1))

    @parwrap.distributed(batch="global")
    @parwrap.sync_bn
    def train():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with torch.no_grad():
            for _ in DataLoader(range(4)):
                pass
        for x in DataLoader(torch.arange(4.0).view(4, 1), batch_size=4):
            (weight * x).sum().backward()
            optimizer.step()
            with torch.no_grad():
                teacher(x)
        return teacher.running_mean.item()

    assert [1.5, 1.5] == parwrap.gather(train())


def hints(batch_size, layer=nn.BatchNorm1d, scope=parwrap.distributed):
    """How often training with that many samples a rank is said to make noisy statistics."""
    model = nn.Sequential(nn.Linear(2, 3), layer(3), nn.Linear(3, 1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with parwrap.distributed(), scope():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                for (x,) in DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=batch_size):
                    model(x).mean().backward()
                    optimizer.step()
    return len([each for each in said if f"train on batches of {batch_size} on each rank" in str(each.message)])


@pytest.mark.ranks(2)
def test_batches_of_two_are_worth_one_hint_on_rank_zero():
    assert [1, 0] == parwrap.gather(hints(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 2, "layer": nn.LayerNorm}, {"batch_size": 2, "scope": parwrap.sync_bn}], ids=str
)
def test_larger_batches_other_layers_and_shared_ones_are_not(options):
    assert [0, 0] == parwrap.gather(hints(**options))


PLAIN = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    for inputs, targets in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_plain_script_on_two_ranks_trains_the_weights_of_one_process_with_one_option(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    options = {"alone": [], "shared": ["--nproc-per-node", "2", "--batch", "global", "--sync-bn"]}
    options["apart"] = options["shared"][:-1]
    for name, given in options.items():
        command = [sys.executable, *(["-m", "parwrap.run", *given] if given else []), "train.py", f"{name}.pt"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    states = {name: torch.load(tmp_path / f"{name}.pt") for name in options}

    def differ(name):
        return max(float((states["alone"][key] - value).abs().max()) for key, value in states[name].items())

    assert differ("shared") < 1e-4
    assert differ("apart") > 1e-3
