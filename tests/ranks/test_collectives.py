"""Collectives against the formula, on one rank without a launcher and on several."""

from collections import Counter, defaultdict, namedtuple

import numpy as np
import pytest
import torch

import parwrap
from parwrap.errors import UsageError
from parwrap.ranks.group import alone

Point = namedtuple("Point", "x y")


def test_one_rank_without_a_launcher():
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)

    assert (0, 1, 0, True) == (parwrap.rank(), parwrap.world_size(), parwrap.local_rank(), parwrap.is_rank_zero())
    assert parwrap.barrier() is None
    assert (3, 3.0, [3], 3) == (parwrap.reduce_sum(3), parwrap.reduce_mean(3), parwrap.gather(3), parwrap.broadcast(3))
    assert (True, False) == (parwrap.any_rank(1), parwrap.all_ranks(None))
    for result in (parwrap.reduce_sum(tensor), parwrap.reduce_mean(tensor), parwrap.broadcast(tensor), parwrap.gather(tensor)[0]):
        assert torch.equal(tensor, result)
        assert result is not tensor
        assert not result.requires_grad


@pytest.mark.ranks(3)
def test_sums_and_means_of_nested_structures():
    rank = parwrap.rank()
    mine = {"tensor": torch.tensor([rank, 1.0]), "list": [rank, (0.5, Point(rank, True))], "numpy": np.float32(rank)}

    total = parwrap.reduce_sum(mine)
    assert [3.0, 3.0] == total.pop("tensor").tolist()
    assert {"list": [3, (1.5, Point(3, 3))], "numpy": 3.0} == total
    assert isinstance(total["list"][1][1], Point)
    mean = parwrap.reduce_mean(mine)
    assert [1.0, 1.0] == mean.pop("tensor").tolist()
    assert {"list": [1.0, (0.5, Point(1.0, 1.0))], "numpy": 1.0} == mean


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_tensors_of_every_dtype(dtype):
    mine = torch.tensor([[0, 1], [1, 1]], dtype=dtype)
    total, mean = parwrap.reduce_sum(mine), parwrap.reduce_mean(mine)

    assert ([[0, 2], [2, 2]], [[0, 1], [1, 1]]) == (total.tolist(), mean.tolist())
    assert total.dtype == (dtype if dtype.is_floating_point else torch.int64)
    assert mean.dtype == (dtype if dtype.is_floating_point else torch.float32)


@pytest.mark.ranks(2)
def test_what_goes_in_is_not_changed():
    mine = torch.ones(2)
    parwrap.reduce_sum(mine)
    parwrap.broadcast(mine)

    assert [1.0, 1.0] == mine.tolist()


@pytest.mark.ranks(3)
def test_gather_and_broadcast_take_anything_of_any_shape():
    rank = parwrap.rank()

    assert [list(range(r)) for r in range(3)] == [each["x"].tolist() for each in parwrap.gather({"x": torch.arange(rank)})]
    assert ["rank 0", "rank 1", "rank 2"] == parwrap.gather(f"rank {rank}")
    assert {"from": 2} == parwrap.broadcast({"from": rank}, src=2)


@pytest.mark.ranks(3)
def test_flags():
    one = parwrap.rank() == 1

    assert (True, False, True, False) == (parwrap.any_rank(one), parwrap.all_ranks(one), parwrap.all_ranks(True), parwrap.any_rank(False))


@pytest.mark.ranks(2)
def test_whole_numbers_whose_sum_may_not_fit_are_refused_and_others_are_exact():
    assert 2**63 - 2 == parwrap.reduce_sum(2**62 - 1)
    for most in (2**62, torch.tensor([1, 2**62]), np.array([2**62]), torch.tensor(-(2**62))):
        with pytest.raises(
            UsageError,
            match=r"parwrap.reduce_sum\(\) adds up whole numbers in 64 bits, so on 2 ranks none may be beyond 4611686018427387903, but one "
            r"is -?4611686018427387904. Pass floats, or add them up as Python does: sum\(parwrap.gather\(x\)\).",
        ):
            parwrap.reduce_sum({"tokens": most})
    for unsigned in (np.uint64(2**63 + 5), np.array([1, 2**63 + 5], dtype=np.uint64)):
        with pytest.raises(UsageError, match="but one is 9223372036854775813"):
            parwrap.reduce_sum(unsigned)
    with pytest.raises(UsageError, match=r"parwrap.reduce_mean\(\) adds up .* Pass floats\.$"):
        parwrap.reduce_mean(2**62)
    assert 2**63 == sum(parwrap.gather(2**62))


@pytest.mark.ranks(2)
def test_sparse_tensors_are_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"parwrap.reduce_mean\(\) takes dense tensors, not one of layout torch.sparse_coo: pass x"):
        parwrap.reduce_mean(torch.eye(2).to_sparse())


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(
        UsageError,
        match=r"parwrap.reduce_mean\(\) takes tensors, arrays, numbers and dicts, lists, tuples and dataclasses of them, not str .'loss'.",
    ):
        parwrap.reduce_mean({"a": ["loss"]})


def test_a_source_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"broadcast\(src=2\) names a rank that does not exist: ranks go from 0 to 0"):
        parwrap.broadcast(1, src=2)


@pytest.mark.ranks(2)
def test_a_collective_where_only_one_rank_is_is_refused():
    with (
        alone(),
        pytest.raises(
            UsageError,
            match=r"parwrap.gather\(\) would wait forever, because code inside @parwrap.rank_zero_only or rank_zero_first runs without",
        ),
    ):
        parwrap.gather(1)


def test_a_collective_outside_of_the_scope_of_a_launch_is_refused(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)

    assert (1, 2) == (parwrap.rank(), parwrap.world_size())
    with pytest.raises(UsageError, match=r"parwrap.barrier\(\) needs the other ranks, but no process group is open here: call it inside"):
        parwrap.barrier()


@pytest.mark.ranks(2)
def test_dicts_of_other_kinds_and_in_another_order():
    counted = Counter("aab" if parwrap.rank() == 0 else "baa")
    by_default = defaultdict(int, counted)

    assert Counter(a=4, b=2) == parwrap.reduce_sum(counted)
    assert {"a": 4, "b": 2} == parwrap.reduce_sum(by_default)
    assert [Counter("aab")] * 2 == parwrap.gather(counted)


@pytest.mark.ranks(2)
def test_means_of_whole_numbers_in_arrays_and_sums_of_narrow_floats_lose_nothing():
    narrow = torch.full((3,), 1.0 + parwrap.rank(), dtype=torch.float8_e4m3fn)

    assert [16777217.0] == parwrap.reduce_mean(np.array([16777217])).tolist()
    assert [3.0] * 3 == parwrap.reduce_sum(narrow).float().tolist()


def test_the_rank_that_sends_is_a_number():
    with pytest.raises(UsageError, match=r"broadcast\(src='0'\): src must be the number of a rank."):
        parwrap.broadcast(1, src="0")
