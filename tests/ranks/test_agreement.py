"""Ranks that are about to do different things raise an error on every rank instead of mixing their data."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist

import parwrap
from parwrap.errors import LockstepError, RankMismatchError
from parwrap.ranks import group as groups
from parwrap.ranks.agreement import agree
from parwrap.ranks.group import current, open_group


@pytest.fixture(params=["parwrap's group", "the user's own group"])
def whose(request):
    return request.param


def group_of(whose, monkeypatch):
    if whose != "parwrap's group":
        monkeypatch.setattr(groups, "_current", None)
    return open_group()


def gather_nothing():
    parwrap.gather(None)


def never():
    raise AssertionError("ranks that agree send no details")


def refused(details):
    return RankMismatchError(f"different: {details}")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("digest", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_ranks_that_agree_send_no_details(whose, monkeypatch, digest):
    assert agree(group_of(whose, monkeypatch), "a set", digest, never, refused) is None


@pytest.mark.ranks(3)
def test_a_difference_is_an_error_with_all_details_on_every_rank(whose, monkeypatch):
    group = group_of(whose, monkeypatch)
    odd = parwrap.rank() == 1
    with pytest.raises(RankMismatchError, match=r"^different: \['even', 'odd', 'even'\]$"):
        agree(group, "a set", int(odd), lambda: "odd" if odd else "even", refused)

    assert agree(group, "a set", 5, never, refused) is None


@pytest.mark.ranks(2)
def test_a_difference_may_be_allowed_and_returns_the_details():
    assert [0, 1] == agree(current(), "a set", parwrap.rank(), parwrap.rank, lambda details: None)


@pytest.mark.ranks(3)
def test_different_collectives_are_an_error_with_both_places_on_every_rank(whose, monkeypatch):
    group_of(whose, monkeypatch)
    text = (
        r"rank 0 is in parwrap.gather at test_agreement.py:\d+, but rank 2 is in parwrap.barrier at test_agreement.py:\d+. Every rank must "
        r"make the same calls in the same order, because each waits for all others. Let the ranks decide alike, for example with "
        r"parwrap.any_rank\(condition\).$"
    )
    collective = parwrap.barrier if parwrap.rank() == 2 else gather_nothing
    with pytest.raises(LockstepError, match=text):
        collective()

    assert 3 == parwrap.reduce_sum(1)


@pytest.mark.ranks(2)
def test_the_kind_is_announced_before_anything_is_sent(monkeypatch):
    announced = []
    monkeypatch.setattr(current(), "control_message", lambda kind: nullcontext(announced.append(kind)))
    parwrap.barrier()
    parwrap.any_rank(True)
    agree(current(), "a set", 0, never, refused)

    assert ["parwrap.barrier", "parwrap.any_rank", "parwrap.any_rank", "a set"] == announced


@pytest.mark.ranks(2)
def test_the_message_has_a_constant_size_and_goes_to_the_group_for_control(monkeypatch):
    sent, real = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **kwargs: (sent.append((tensor, kwargs)), real(tensor, *args, **kwargs)))
    parwrap.barrier()

    ((tensor, keywords),) = sent
    assert (4, current().control) == (tensor.numel(), keywords["group"])
