"""Two ranks that share one GPU over gloo, beside hand-written DDP; with ``PARWRAP_TEST_DEVICE=cpu`` the same on CPUs, to try these tests.

NCCL is tested in test_nccl_on_one_gpu.py.
"""

import os
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parwrap

DEVICE = os.environ.get("PARWRAP_TEST_DEVICE", "cuda")
STEPS = 12
SETTLED = 36
"""Steps after which nothing is new; weights have been compared in the 32nd."""

pytestmark = pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() == 0, reason="torch sees no GPU here")


def build():
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)]
    return nn.Sequential(*layers).to(DEVICE)


def batches(number=STEPS):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(number):
        yield torch.randn(8, 3, 8, 8, generator=generator).to(DEVICE), torch.randint(4, (8,), generator=generator).to(DEVICE)


def plain_loop():
    """As for one GPU; gives the weights."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def by_hand(dtype=None, norm=lambda model: model):
    model = norm(build())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype) if dtype else nullcontext():
            loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(expected, actual, within=0.0):
    return all((one - other).abs().max() <= within for one, other in zip(expected, actual, strict=True))


@pytest.mark.ranks(2, timeout=120)
def test_weights_are_bit_for_bit_those_of_ddp_by_hand():
    assert same(by_hand(), parwrap.distributed(plain_loop)())


@pytest.mark.ranks(2, timeout=120)
def test_so_they_are_with_amp():
    assert same(by_hand(torch.bfloat16), parwrap.distributed(parwrap.amp(dtype="bf16")(plain_loop))())


@pytest.mark.ranks(2, timeout=120)
def test_shared_statistics_are_those_of_syncbatchnorm():
    if DEVICE == "cpu":
        pytest.skip("torch's SyncBatchNorm is for GPUs")

    assert same(by_hand(norm=nn.SyncBatchNorm.convert_sync_batchnorm), parwrap.distributed(parwrap.sync_bn(plain_loop))(), within=1e-5)


@pytest.mark.parametrize("options", [{"strategy": "zero1"}, {"compress": "bf16"}, {"strategy": "local_sgd", "every": 4}], ids=str)
@pytest.mark.ranks(2, timeout=120)
def test_other_ways_to_train_leave_the_same_weights_on_all_ranks(options):
    weights = parwrap.distributed(**options)(plain_loop)()

    assert all(same(weights, each) for each in parwrap.gather(weights))
    assert all(p.isfinite().all() for p in weights)


@pytest.mark.ranks(2, timeout=120)
def test_sparse_gradients_are_averaged():
    @parwrap.distributed
    def train():
        words = nn.Embedding(4, 2, sparse=True).to(DEVICE)
        optimizer = torch.optim.SGD(words.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            words(torch.tensor([parwrap.rank()], device=DEVICE)).sum().backward()
            optimizer.step()
        return words.weight.grad.to_dense().tolist()

    assert [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]] == train()


@contextmanager
def synchronizations():
    """The places at which the host waits for the GPU while the block runs."""
    places = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places += [f"{each.filename}:{each.lineno}" for each in said if "synchroniz" in str(each.message)]


@pytest.mark.parametrize(
    ("feature", "each_step"),
    [(None, 0), (partial(parwrap.amp, dtype="bf16"), 0), (partial(parwrap.amp, dtype="fp16"), 1), (partial(parwrap.accumulate, 4), 0)],
    ids=["ddp", "bf16", "fp16", "accumulate"],
)
@pytest.mark.ranks(2, timeout=120)
def test_the_host_waits_for_a_gpu_no_more_than_torchs_own_tools_do(feature, each_step):
    if DEVICE == "cpu":
        pytest.skip("only GPUs are waited for")

    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        with ExitStack() as watched:
            for number, (x, y) in enumerate(list(batches(SETTLED + 8))):
                if number == SETTLED:
                    places = watched.enter_context(synchronizations())
                step(x, y)
        return places

    places = parwrap.distributed(feature()(train) if feature else train)()

    assert 8 * each_step >= len(places), places


def step_once(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 4, device=DEVICE)).sum().backward()
    optimizer.step()


def test_what_launched_ranks_train_on_the_gpu_comes_back_there():
    torch.manual_seed(0)
    model, alone = (nn.Linear(4, 2).to(DEVICE) for _ in range(2))
    alone.load_state_dict(model.state_dict())

    parwrap.distributed(nprocs=2, backend="gloo")(step_once)(model)
    step_once(alone)

    assert torch.device(DEVICE).type == model.weight.device.type
    assert same([p.detach() for p in alone.parameters()], [p.detach() for p in model.parameters()], within=1e-6)
