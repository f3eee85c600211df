"""``@amp``: bit for bit autocast by hand, alone and on ranks; refusals; and the option of the command."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import parwrap
from parwrap.precision.choice import choose
from scaled import same

BF16 = torch.bfloat16


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def loader():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :1] * 2), batch_size=8)


def plain():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def bf16_by_hand():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        for x, y in loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=BF16):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("dtype", ["bf16", "auto", "bfloat16", BF16])
def test_weights_are_bit_for_bit_those_of_autocast_by_hand(dtype):
    assert same(bf16_by_hand(), parwrap.amp(dtype=dtype)(plain)())


def test_o0_changes_nothing():
    assert same(plain(), parwrap.amp(level="O0")(plain)())


@pytest.mark.parametrize("asked", [{"level": "O1"}, {"dtype": "O1"}, {"dtype": "fp16"}, {"dtype": "float16"}, {"dtype": torch.float16}])
def test_o1_is_fp16(asked):
    with parwrap.amp(**asked):
        assert (torch.float16, 65536.0) == (nn.Linear(2, 2)(torch.ones(1, 2)).dtype, parwrap.amp_state().scale)


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, BF16), (False, torch.float16)])
def test_auto_on_a_gpu_is_bf16_where_it_has_it(monkeypatch, has_bf16, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    precision = choose("auto", None, "cuda")

    assert (dtype, not has_bf16) == (precision.dtype, precision.scales)


def test_an_autocast_of_the_scripts_own_is_left_alone(capfd):
    expected = bf16_by_hand()
    with parwrap.amp(dtype="fp16", init_scale=2.0):
        with torch.autocast("cpu", enabled=False):  # a part that is to be in float32 is no autocast of its own
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32

        assert same(expected, bf16_by_hand())
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32

    part, own = capfd.readouterr().err.splitlines()
    assert part.startswith("parwrap: torch.autocast(enabled=False) at test_amp_scope.py:")
    assert part.endswith(
        " keeps that part in float32. If this line belongs to the script's own option for mixed precision, turn on that option instead of "
        "parwrap.amp, or remove the line."
    )
    assert (
        "parwrap: this script uses torch.autocast itself, so parwrap.amp leaves it alone and casts nothing. To let parwrap.amp cast, "
        "remove torch.autocast from the script."
    ) == own


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"dtype": "fp8"},
            "dtype='fp8' is not a dtype for mixed precision: use 'bf16', 'fp16' or 'auto', which is bf16 on devices that "
            "support it and fp16 on others.",
        ),
        (
            {"level": "O4"},
            "level='O4' is not one of Apex's levels. 'O0': float32, without changes; 'O1': autocast to float16 with a dynamic loss "
            "scale; 'O2': a float16 model with float32 BatchNorm, float32 master weights and a dynamic loss scale; 'O3': a pure float16 "
            "model.",
        ),
        ({"level": "O1", "dtype": "bf16"}, "level='O1' sets the dtype, but dtype='bf16' is passed too: remove one of them."),
        ({"device": "gpu"}, "device='gpu' is not a device type for parwrap.amp: use 'cuda' or 'cpu', or remove it."),
        ({"init_scale": 0}, "init_scale=0 is not a positive number."),
        ({"growth_factor": 1}, "growth_factor=1 is not a number above 1."),
        ({"backoff_factor": 2}, "backoff_factor=2 is not a number between 0 and 1."),
        ({"growth_interval": 0}, "growth_interval=0 is not a positive number of iterations."),
    ],
)
def test_what_makes_no_sense_is_refused(given, text):
    with pytest.raises(parwrap.UsageError) as refusal:
        parwrap.amp(**given)

    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("dtype", "run", "text"),
    [
        (
            "fp16",
            lambda x: nn.functional.rrelu(x, training=True),
            "rrelu_with_noise_out_cpu does not exist for float16 on cpu: use parwrap.amp(dtype='bf16'), or pass it float32 tensors in "
            "`with parwrap.amp(level='O0'):`.",
        ),
        (
            "bf16",
            torch.linalg.slogdet,
            "linalg.slogdet does not exist for bfloat16 on cpu: remove parwrap.amp, or pass it float32 tensors in `with "
            "parwrap.amp(level='O0'):`.",
        ),
        (
            "bf16",
            torch.Tensor.numpy,
            "NumPy has no bfloat16, the dtype of outputs under parwrap.amp: write .float().numpy() instead of .numpy().",
        ),
    ],
)
def test_an_operation_that_is_missing_is_named_with_what_to_do(dtype, run, text):
    with pytest.raises(parwrap.UsageError) as refusal, parwrap.amp(dtype=dtype):
        run(torch.eye(2, dtype=choose(dtype, None, "cpu").dtype))

    assert str(refusal.value) == text
    assert isinstance(refusal.value.__cause__, (RuntimeError, TypeError))


@pytest.mark.parametrize("article", ["the", "an"])
def test_a_layer_that_the_library_of_the_cpu_lacks_is_named_too(article):
    """Some CPUs have these in float16."""
    with pytest.raises(parwrap.UsageError, match=r"LSTM does not exist for float16 on cpu: use parwrap\.amp"), parwrap.amp(dtype="fp16"):
        raise RuntimeError(f"could not create a primitive descriptor for {article} LSTM forward propagation primitive. Run workload with")


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="on purpose"), parwrap.amp():
        raise RuntimeError("on purpose")
    with pytest.raises(RuntimeError, match="float64"), parwrap.amp():
        raise RuntimeError("not implemented for 'float64'")
    with pytest.raises(TypeError, match="on purpose"), parwrap.amp(dtype="bf16"):
        raise TypeError("on purpose")


@pytest.mark.ranks(2)
def test_two_ranks_are_bit_for_bit_ddp_and_autocast_by_hand():
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = loader().dataset
    sampler = DistributedSampler(data, shuffle=False)
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=BF16):
                loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
    actual = parwrap.distributed(parwrap.amp(dtype="bf16")(plain))()

    expected = model.state_dict()
    assert [] == [name for name, value in expected.items() if "running" not in name and not torch.equal(value, actual[name])]


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)])
@pytest.mark.parametrize("asked", [{"dtype": "bf16"}, {"level": "O1"}, {"level": "O2"}], ids=str)
def test_however_they_are_stacked_the_result_is_the_same(size, asked):
    results = []
    for order in itertools.permutations([parwrap.distributed(seed=1), parwrap.amp(**asked)]):
        train = plain
        for decorator in order:
            train = decorator(train)
        results.append(copy.deepcopy(train()))

    assert same(*results)
    for each in parwrap.gather({key: value for key, value in results[0].items() if "running" not in key}):
        assert all(torch.equal(value, results[0][key]) for key, value in each.items())


def test_methods_and_blocks_too():
    class Trainer:
        @parwrap.amp(dtype="bf16")
        def train(self):
            return plain()

    with parwrap.amp(dtype="bf16"):
        in_block = plain()

    assert same(in_block, Trainer().train())


def test_an_amp_without_options_inside_another_changes_nothing():
    with parwrap.amp(dtype="fp16", init_scale=8.0), parwrap.amp():
        assert (torch.float16, 8.0) == (nn.Linear(2, 2)(torch.ones(1, 2)).dtype, parwrap.amp_state().scale)
