import inspect
import io
import pickle
import sys
from contextlib import redirect_stderr
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import parwrap
from parwrap.errors import UsageError
from parwrap.group import group


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


@pytest.mark.ranks(2)
def test_one_line_on_rank_zero_says_what_runs():
    lines = parwrap.gather(with_stderr(parwrap.distributed(seed=7)(train))[0])

    assert [
        "parwrap: 2 ranks, gloo on cpu, ddp, batch 2 per rank, 4 global, learning rate unchanged, 8 samples / 2 ranks, seed 7\n",
        "",
    ] == lines
    lines = parwrap.gather(with_stderr(parwrap.distributed(seed=7, batch="global")(train))[0])

    assert "batch 1 per rank, 2 global" in lines[0]


@pytest.mark.ranks(2)
def test_training_without_a_loader_is_said():
    def by_hand():
        weight = nn.Parameter(torch.ones(1))
        weight.sum().backward()

    assert (
        "no DataLoader was split: every rank trains on data that it reads or creates itself"
        in parwrap.gather(with_stderr(parwrap.distributed(by_hand))[0])[0]
    )


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
def test_a_function_inside_joins_the_open_scope_with_its_own_options():
    loader = DataLoader(range(8), batch_size=4)

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
        pytest.raises(UsageError, match="backend='fake' is not possible here: the process group is already open with 'gloo'"),
    ):
        inside.__enter__()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bach": "global"}, "parwrap.distributed has no option 'bach'; did you mean 'batch'?"),
        ({"amp": True}, "parwrap.distributed has no option 'amp'; add @parwrap.amp."),
        ({"sync_bn": True}, "parwrap.distributed has no option 'sync_bn'; add @parwrap.sync_bn."),
        ({"accumulate": 4}, "parwrap.distributed has no option 'accumulate'; add @parwrap.accumulate.steps.."),
        *(
            (
                {name: 2},
                f"parwrap.distributed has no option {name!r}; pass the number of ranks to parwrap.run as --nproc-per-node, or pass "
                "nprocs= to start them from Python.",
            )
            for name in ("devices", "nproc_per_node", "num_processes")
        ),
        ({"zzz": 1}, "has no option 'zzz'; it takes backend, seed, batch, uneven, lr, loss, strategy, bucket_cap_mb, timeout"),
        ({"batch": "split"}, "batch='split' is not a valid value. Choose one of: 'per_rank': each rank takes batches of"),
        (
            {"uneven": "fill"},
            "uneven='fill' is not a valid value. Choose one of: 'pad': samples are repeated .*; 'drop': .*; 'join': every sample",
        ),
        ({"lr": "square"}, "lr='square' is not a valid value. Choose one of: 'keep': learning rates are unchanged; 'linear': .*; 'sqrt': "),
        ({"loss": "max"}, "loss='max' is not a valid value. Choose one of: 'mean': the loss is an average over the batch; 'sum': "),
        ({"backend": "carrier pigeon"}, "backend='carrier pigeon' is not available in this build of torch, which has gloo"),
        ({"seed": -1}, r"seed=-1 is not an integer from 0 to 2\*\*64 - 1"),
        ({"seed": "1"}, "seed='1' is not an integer"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not a positive number of megabytes"),
        ({"timeout": 0}, "timeout=0 is not a positive number of seconds"),
        ({"timeout": timedelta(0)}, "is not a positive number of seconds"),
    ],
)
def test_options_that_do_not_exist_are_refused_before_anything_runs(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**options)


@pytest.mark.parametrize("thing", [nn.Linear, test_one_line_on_rank_zero_says_what_runs.__class__])
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
def test_a_process_group_that_was_there_before_is_left_alone():
    group._current = None  # as if the user's code, not this test's runner, had started it
    stderr = io.StringIO()
    with redirect_stderr(stderr), parwrap.distributed():
        assert 5 == len(DataLoader(range(5)))

    assert dist.is_initialized()
    assert [True, False] == parwrap.gather("calls init_process_group itself" in stderr.getvalue())


@pytest.mark.ranks(2)
def test_a_failing_function_leaves_nothing_behind_and_can_be_run_again():
    with pytest.raises(ZeroDivisionError), parwrap.distributed():
        raise ZeroDivisionError
    weights = parwrap.gather(train())

    assert weights[0] == weights[1]
    assert sys.stdout is not None


@pytest.mark.ranks(2)
def test_that_a_script_is_left_alone_is_said_once():
    def own():
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1))

    stderr = io.StringIO()
    is_rank_zero = parwrap.is_rank_zero()
    with redirect_stderr(stderr):
        parwrap.distributed(own)()
        for _ in range(2):
            parwrap.distributed(nn.Linear(1, 1).forward)(torch.ones(1))

    assert is_rank_zero == (1 == stderr.getvalue().count("parwrap leaves it alone"))
