import inspect
import io
import os
import pickle
import random
import sys
import time
from contextlib import redirect_stderr
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import parwrap
from parwrap.decorators.distributed import script_scope
from parwrap.errors import UsageError
from parwrap.ranks import group


@parwrap.distributed
def train(epochs: int = 2, *, samples: int = 8) -> list[float]:
    """Trains a little."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in DataLoader(range(samples), batch_size=2):
            optimizer.zero_grad()
            model(batch.float().view(-1, 1)).mean().backward()
            optimizer.step()
    return model.weight.detach().flatten().tolist()


def with_stderr(function, *args, **kwargs):
    """What a call writes to stderr, and its result."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        result = function(*args, **kwargs)
    return stderr.getvalue(), result


@pytest.mark.ranks(2)
def test_a_decorated_function_returns_its_value_on_every_rank():
    weights = parwrap.gather(train())

    assert weights[0] == weights[1]


def test_a_decorated_function_keeps_what_it_is():
    assert str(inspect.signature(train)) == "(epochs: int = 2, *, samples: int = 8) -> list[float]"
    assert ("train", "Trains a little.") == (train.__name__, train.__doc__)
    assert pickle.loads(pickle.dumps(train)) is train


def test_one_rank_starts_no_process_group_and_says_nothing():
    stderr, weights = with_stderr(train)

    assert ("", False) == (stderr, dist.is_initialized())
    assert len(weights) == 1


@pytest.mark.ranks(3)
def test_without_a_seed_all_ranks_go_on_from_rank_zeros_state():
    torch.manual_seed(parwrap.rank())
    expected = torch.Generator().manual_seed(0)
    with parwrap.distributed():
        drawn = torch.rand(1).item(), np.random.rand()

    assert drawn[0] == torch.rand(1, generator=expected).item()
    assert 1 == len(set(parwrap.gather(drawn)))


@pytest.mark.ranks(2)
def test_a_seed_inside_stands_for_its_function():
    with parwrap.distributed(seed=1), parwrap.distributed(seed=2):
        drawn = torch.rand(1)
    torch.manual_seed(2)

    assert torch.rand(1).item() == drawn.item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", [1, None])
def test_a_function_with_a_seed_begins_with_it_in_every_call(outer):
    @parwrap.distributed(seed=1)
    def inner():
        return torch.rand(1).item(), np.random.rand(), random.random()

    with parwrap.distributed(seed=outer):
        drawn = [inner() for _ in range(3)]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()

    assert [expected] * 3 == drawn


@pytest.mark.ranks(2)
def test_a_function_inside_joins_the_open_scope_with_its_own_options():
    loader = DataLoader(range(8), batch_size=4, shuffle=True)

    @parwrap.distributed(batch="global")
    def inside():
        return len(loader)

    @parwrap.distributed
    def bare():
        return len(loader)

    with parwrap.distributed():
        assert (1, 2, 1, 1) == (len(loader), inside(), bare(), len(loader))
    with parwrap.distributed(batch="global"):
        assert (2, 2) == (bare(), len(loader))


@pytest.mark.ranks(2)
def test_another_backend_inside_is_refused():
    from torch.testing._internal.distributed import fake_pg  # registers a second backend on machines without GPUs

    assert fake_pg
    inside = parwrap.distributed(backend="fake")
    with (
        parwrap.distributed(),
        pytest.raises(UsageError, match="backend='fake' is not possible inside of another @distributed, which runs with 'gloo'"),
    ):
        inside.__enter__()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bach": "global"}, "parwrap.distributed has no option 'bach'; did you mean 'batch'?"),
        (
            {"sync_bn": True},
            "parwrap.distributed has no option 'sync_bn'; write @parwrap.sync_bn below @parwrap.distributed, or --sync-bn.",
        ),
        *(
            (
                {name: 2},
                f"parwrap.distributed has no option {name!r}; pass the number of ranks to parwrap run as --nproc-per-node.",
            )
            for name in ("devices", "nproc_per_node", "num_processes")
        ),
        (
            {"zzz": 1},
            "has no option 'zzz'; it takes backend, seed, batch, uneven, lr, loss, draws, strategy, bucket_cap_mb, gradient",
        ),
        ({"batch": "split"}, "batch='split' is not a valid value. Choose one of: 'per_rank': each rank takes batches of"),
        (
            {"uneven": "fill"},
            "uneven='fill' is not a valid value. Choose one of: 'pad': samples are repeated .*; 'drop': .*; 'join': every sample",
        ),
        ({"lr": "square"}, "lr='square' is not a valid value. Choose one of: 'keep': learning rates are unchanged; 'linear': .*; 'sqrt': "),
        ({"loss": "max"}, "loss='max' is not a valid value. Choose one of: 'mean': the loss is an average over the batch; 'sum': "),
        ({"draws": "mine"}, "draws='mine' is not a valid value. Choose one of: 'by_pass': each rank has .*; 'per_rank': each rank has"),
        ({"backend": "carrier pigeon"}, "backend='carrier pigeon' is not available in this build of torch, which has gloo"),
        ({"seed": -1}, r"seed=-1 is not an integer from 0 to 2\*\*64 - 1"),
        ({"seed": "1"}, "seed='1' is not an integer"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not a positive number of megabytes"),
        ({"timeout": 0}, "timeout=0 is too small: pass at least 0.001 seconds"),
        ({"timeout": 1e-9}, "timeout=1e-09 is too small: pass at least 0.001 seconds, or a timedelta."),
        ({"timeout": "10"}, "timeout='10' is not a finite number: pass at least 0.001 seconds"),
        ({"timeout": float("inf")}, "timeout=inf is not a finite number: pass at least 0.001 seconds"),
        ({"bucket_cap_mb": "1"}, "bucket_cap_mb='1' is not a positive number of megabytes"),
        ({"backend": 3}, "backend=3 is not available in this build of torch"),
        ({"seed": True}, "seed=True is not an integer from 0 to"),
        ({"gradient_as_bucket_view": "yes"}, "gradient_as_bucket_view='yes' is neither True nor False"),
        ({"strategy": "local_sgd", "outer": "nesterov", "outer_lr": "a"}, "outer_lr='a' is not a positive learning rate"),
        ({"timeout": timedelta(0)}, "is too small: pass at least 0.001 seconds"),
    ],
)
def test_options_that_do_not_exist_are_refused_before_anything_runs(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**options)


@pytest.mark.parametrize("thing", [nn.Linear, type(train)])
def test_a_class_cannot_be_decorated(thing):
    with pytest.raises(UsageError, match=f"@parwrap.distributed cannot decorate {thing.__qualname__}.*: it is a class"):
        parwrap.distributed(thing)


@pytest.mark.ranks(2)
def test_a_script_that_wraps_its_model_in_ddp_itself_is_left_alone():
    model = nn.Linear(1, 1)
    stderr = io.StringIO()
    with redirect_stderr(stderr), parwrap.distributed():
        during = torch.autograd.backward
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert torch.autograd.backward is not during
        wrapped(torch.full((1, 1), float(parwrap.rank() + 1))).sum().backward()
        assert 5 == len(DataLoader(range(5)))

    assert 1.5 == model.weight.grad.item()
    expected = "parwrap: this script calls DistributedDataParallel itself, so parwrap leaves it alone"
    assert [True, False] == parwrap.gather(stderr.getvalue().startswith(expected))


@pytest.mark.ranks(2)
def test_a_process_group_that_was_there_before_is_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(group, "_current", None)  # as if the user's code, not this test's runner, had started it
    with parwrap.distributed():
        assert 5 == len(DataLoader(range(5), shuffle=True))

    assert "this script calls init_process_group itself" in parwrap.gather(capsys.readouterr().err)[0]


MODEL = nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.0)


def passes_that_train(run, *args):
    """How many batches of 8 a pass reads in ``run``: 4 of a share on 2 ranks."""
    return len(parwrap.distributed(run)(*args))


class Trainer:
    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    @parwrap.distributed
    def fit(self):
        return list(trained_batches(self.model))


def trained_batches(model):
    for x in DataLoader(torch.ones(8, 1), batch_size=1):
        model(x).sum().backward()
        yield x


@pytest.mark.ranks(2)
def test_an_optimizer_built_before_the_scope_is_found():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def closure():
        assert optimizer
        return list(trained_batches(model))

    def named_globals():
        assert OPTIMIZER
        return list(trained_batches(MODEL))

    assert 4 == passes_that_train(lambda optimizers: list(trained_batches(model)), {"optimizers": [optimizer]})
    assert 4 == passes_that_train(closure) == passes_that_train(named_globals) == len(Trainer().fit())
    with parwrap.distributed():
        assert 4 == len(list(trained_batches(model)))


@pytest.mark.ranks(2)
def test_without_an_optimizer_every_rank_reads_everything():
    model = nn.Linear(1, 1)

    assert 8 == passes_that_train(lambda: list(trained_batches(model)))


@pytest.mark.ranks(2)
def test_learning_rates_follow_the_global_batch_and_show_unchanged():
    weight = nn.Parameter(torch.zeros(1))

    @parwrap.distributed(lr="linear")
    def run():
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        return optimizer.param_groups[0]["lr"]

    assert 0.1 == run()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.2]))


@pytest.mark.ranks(2)
def test_a_strategy_of_none_trains_a_model_on_each_rank_with_all_of_the_data():
    weight = nn.Parameter(torch.zeros(1))

    @parwrap.distributed(strategy="none")
    def run():
        optimizer = torch.optim.SGD([weight], lr=1.0)
        batches = list(DataLoader(range(8), batch_size=2))
        (weight * (parwrap.rank() + 1)).sum().backward()
        optimizer.step()
        return len(batches)

    assert 4 == run()
    assert -1.0 - parwrap.rank() == weight.item()
    assert -1.0 - parwrap.rank() == weight.item()


@pytest.mark.ranks(2)
def test_a_plain_script_sees_neither_the_group_nor_the_variables(monkeypatch):
    monkeypatch.setenv("RANK", str(parwrap.rank()))
    with script_scope():
        assert not dist.is_initialized()
        assert "RANK" not in os.environ
        assert 2 == parwrap.world_size()
        with pytest.raises(ValueError, match=r"use parwrap.rank\(\) and parwrap.world_size\(\) instead of get_rank\(\)"):
            dist.get_rank()

    assert dist.is_initialized()


@pytest.mark.ranks(2)
def test_rank_zero_alone_prints(capfd):
    with parwrap.distributed():
        print("loss 0.5")
        print(f"rank {parwrap.rank()}", force=True)

    said = parwrap.gather(capfd.readouterr().out)

    assert ["loss 0.5\nrank 0\n", "rank 1\n"] == said


@pytest.mark.ranks(2)
def test_what_rank_zero_draws_alone_moves_no_stream_of_all_ranks():
    @parwrap.distributed
    def run():
        parwrap.rank_zero_only(lambda: (torch.rand(3), np.random.rand(3), list(DataLoader(range(4), shuffle=True))))()
        return torch.rand(1).item(), np.random.rand()

    assert 1 == len(set(parwrap.gather(run())))


@pytest.mark.ranks(2)
def test_what_rank_zero_seeds_alone_in_a_training_pass_moves_no_stream_of_all_ranks():
    @parwrap.rank_zero_only
    def draw_picture():
        np.random.seed(0), torch.manual_seed(0), random.seed(0)
        return np.random.default_rng().random()

    @parwrap.distributed(seed=1)
    def run(alone):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(range(8), batch_size=2):
            model(batch.float().view(-1, 1)).mean().backward()
            optimizer.step()
            if alone:
                draw_picture()
        return torch.rand(1).item(), np.random.rand(), random.random(), np.random.default_rng().random()

    assert 1 == len({run(alone=False), *parwrap.gather(run(alone=True))})


@pytest.mark.ranks(2)
def test_generators_without_a_seed_are_alike_on_ranks_of_which_one_has_served_weights_before():
    @parwrap.distributed(strategy="parameter_server")
    def serve():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.sum().backward()
        optimizer.step()

    @parwrap.distributed
    def draw():
        return np.random.default_rng().random()

    serve()

    assert 1 == len(set(parwrap.gather(draw())))


@pytest.mark.ranks(2)
def test_ranks_that_train_alone_end_alone():
    with parwrap.distributed(strategy="none"):
        began = time.monotonic()
        if parwrap.rank() == 1:
            time.sleep(0.5)

    assert parwrap.rank() == 1 or time.monotonic() - began < 0.4


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_batch_norm_that_gets_one_sample_of_a_share_is_explained(batch):
    @parwrap.distributed(batch=batch)
    def train(model):
        torch.optim.SGD(model.parameters(), 0.1)
        for x in DataLoader(torch.ones(6, 2), batch_size=2):
            model(x)

    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        train(nn.BatchNorm1d(2))

    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].endswith(
            "Compute the statistics over all ranks, @parwrap.sync_bn (--sync-bn), or set drop_last=True in the loader."
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("batch", "notes"), [("global", 1), ("per_rank", 0)])
def test_a_batch_size_that_is_fixed_in_the_code_is_explained(batch, notes):
    @parwrap.distributed(batch=batch)
    def train(model):
        torch.optim.SGD(model.parameters(), 0.1)
        for x in DataLoader(torch.ones(16, 2), batch_size=8):
            x.view(8 if batch == "global" else 7, 2)

    with pytest.raises(RuntimeError) as caught:
        train(nn.Linear(2, 1))

    assert notes == len(getattr(caught.value, "__notes__", []))
    if notes:
        assert caught.value.__notes__ == [
            'parwrap: with batch="global" this rank has a part of each batch, 4 samples of the last one. If a batch size is fixed in the '
            'code, read it from the tensors, x.shape[0], or use batch="per_rank" (--batch per-rank).'
        ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("trains", "notes"), [(True, 1), (False, 0)])
def test_an_assertion_in_a_part_of_a_batch_is_explained(trains, notes):
    """Such as that of a queue of features, whose length the batch size must divide."""

    @parwrap.distributed(batch="global")
    def train(model):
        torch.optim.SGD(model.parameters(), 0.1)
        for x in DataLoader(torch.ones(12, 2), batch_size=6) if trains else [torch.ones(3, 2)]:
            if len(x) != 6:
                raise AssertionError  # as of an `assert` that pytest has not rewritten

    with pytest.raises(AssertionError) as caught:
        train(nn.Linear(2, 1))

    assert notes == len(getattr(caught.value, "__notes__", []))
    assert all("a part of each batch, 3 samples of the last one" in note for note in getattr(caught.value, "__notes__", []))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("samples", "notes"), [(12, 1), (13, 0)])
def test_a_batch_that_is_short_only_in_a_share_is_explained(samples, notes):
    """Such as a hidden state that is made once, for batches of 4."""

    @parwrap.distributed
    def train(model):
        torch.optim.SGD(model.parameters(), 0.1)
        for x in DataLoader(torch.ones(samples, 2), batch_size=4):
            x + torch.zeros(4, 2)

    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        train(nn.Linear(2, 1))

    short = "parwrap: the last batch of this rank's share has 2 samples, where every batch of one process has 4."
    assert notes == len(getattr(caught.value, "__notes__", []))
    assert all(note.startswith(short) and "drop_last=True" in note for note in getattr(caught.value, "__notes__", []))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("module", "sees"),
    [
        ("transformers.modeling_utils", False),
        ("ignite.distributed.utils", False),
        ("lightning.fabric.utilities.distributed", False),
        ("pytorch_lightning.trainer", False),
        ("torchmetrics.metric", True),
        ("igniter", True),
    ],
)
def test_a_library_that_would_act_on_the_process_group_alone_does_not_see_it(module, sees):
    """Such as transformers, whose ``save_pretrained`` then writes nothing on ranks above 0."""
    import torch.distributed as dist

    def asked_by(module):
        names = {"__name__": module, "dist": dist}
        exec("def asks(): return dist.is_initialized()", names)
        return names["asks"]()

    with parwrap.distributed():
        assert sees == asked_by(module)
