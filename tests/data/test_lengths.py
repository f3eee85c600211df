"""``len(loader)`` is that of what a rank gets to see, or it is said."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import parwrap
from trained_on import Setup


@pytest.mark.ranks(2)
def test_lengths_are_those_of_what_a_rank_gets_to_see():
    with parwrap.distributed():
        train, test = DataLoader(range(10), batch_size=2, shuffle=True), DataLoader(range(8), batch_size=2)

        assert (3, 4) == (len(train), len(test))
        setup = Setup()
        setup.train(train)
        setup.model.eval()

        assert (3, 4) == (len(train), len(test))
        assert 10 == len(train.dataset)
        with pytest.warns(UserWarning, match="without a backward"):
            list(train)

        assert 5 == len(train)  # by which a mean over the batches is divided
        setup.train(train)
        assert 3 == len(train)
        with torch.no_grad():
            assert 5 == len(train)
    with parwrap.distributed(batch="global"):
        assert 5 == len(train)
    assert 5 == len(train)


@pytest.mark.ranks(2)
def test_a_length_that_was_given_for_a_share_and_turns_out_whole_is_said():
    with parwrap.distributed():
        setup, train, test = Setup(), DataLoader(range(10)), DataLoader(range(8), shuffle=True)
        lengths = len(train), len(test)
        setup.train(train)
        with (
            torch.no_grad(),
            pytest.warns(UserWarning, match=r"was 4 before its first pass.*but is 8 now: the loader is not trained on.*eval\(\)"),
        ):
            list(test)

        assert (5, 4) == lengths
        assert 8 == len(test)


@pytest.mark.ranks(2)
def test_a_length_that_is_asked_for_in_an_evaluation_before_any_training_is_said_to_be_wrong():
    with parwrap.distributed():
        Setup()
        test = DataLoader(range(8))
        assert 4 == len(test)  # as of a loader that will be trained on
        with (
            torch.no_grad(),
            pytest.warns(UserWarning, match=r"was 4 before its first pass.*but is 8 now: the loader is not trained on"),
        ):
            list(test)


@pytest.mark.ranks(2)
def test_a_length_that_was_given_for_the_whole_and_turns_out_a_share_is_said():
    with parwrap.distributed():
        setup, other, train = Setup(), DataLoader(range(8), shuffle=True), DataLoader(range(10))
        lengths = len(other), len(train)
        with pytest.warns(UserWarning, match=r"was 10 before its first pass.*but is 5 now: the loader is trained on.*this rank's share"):
            setup.train(train)

        assert (4, 10) == lengths


@pytest.mark.ranks(2)
def test_lengths_that_turn_out_right_are_not_talked_about():
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup, train, test = Setup(), DataLoader(range(10), shuffle=True), DataLoader(range(8))
        lengths = len(train), len(test)
        with torch.no_grad():  # a first look at the loss before training
            list(train)
        for _ in range(2):
            setup.train(train)
            with torch.no_grad():
                list(test), list(train)

        assert (5, 8) == lengths
