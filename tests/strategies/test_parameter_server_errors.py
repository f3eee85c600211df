"""Workers and servers that die or fail, and refused options."""

import warnings

import pytest
import torch
from torch import nn

import parwrap
from parwrap.errors import RankMismatchError, UsageError
from served import Own, X, train


@pytest.mark.ranks(3)
@pytest.mark.parametrize("survive", [False, True])
def test_a_worker_that_dies_is_reported_at_once_and_survived_if_asked(survive):
    def dies():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model.train()
            if step == 2 and parwrap.rank() == 1:
                raise KeyError("enough")
            optimizer.zero_grad()
            model(X[:4]).mean().backward()
            optimizer.step()
            model.eval()
        return parwrap.rank()

    try:
        ended = parwrap.distributed(strategy="parameter_server", staleness=0, survive=survive)(dies)()
    except (KeyError, RankMismatchError) as error:
        ended = str(error)

    told = parwrap.gather(ended)
    assert "'enough'" == told[1]
    if survive:
        assert [0, 0] == [told[0], told[2]]
    else:
        assert {"rank 1, a worker of the parameter server, failed with KeyError: 'enough'."} == {told[0], told[2]}


@pytest.mark.ranks(2)
def test_a_server_that_fails_is_reported_by_name():
    def fails():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if parwrap.rank() == 1:
            raise KeyError("no data")
        model(X).mean().backward()
        optimizer.step()

    with pytest.raises((KeyError, RankMismatchError)) as raised:
        parwrap.distributed(strategy="parameter_server")(fails)()

    assert ["rank 1, a parameter server, failed with KeyError: 'no data'.", "'no data'"] == parwrap.gather(str(raised.value))


@pytest.mark.ranks(2)
def test_an_optimizer_that_fails_on_the_server_is_reported():
    def fails():
        weight = nn.Parameter(torch.ones(1))
        optimizer = Own([weight], lr=0.1, sign="no number")
        weight.sum().backward()
        optimizer.step()

    with pytest.raises((TypeError, RankMismatchError)) as raised:
        parwrap.distributed(strategy="parameter_server")(fails)()

    assert [True, False] == parwrap.gather("rank 1, a parameter server, failed with TypeError" in str(raised.value))


def closes(weight):
    torch.optim.LBFGS([weight]).step(lambda: weight.square().sum())


def without_an_optimizer(weight):
    weight.sum().backward()


def casts(weight):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    model.half()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("train_wrongly", "text"),
    [
        (closes, r"step\(closure\) at .* cannot run on a parameter server: the closure computes gradients on the worker"),
        (without_an_optimizer, "runs before any optimizer is built, but a parameter server needs an optimizer for its steps"),
        (casts, "casts parameters that a parameter server holds, but they would keep their dtype on the server"),
    ],
)
def test_what_a_server_cannot_do_is_refused(train_wrongly, text):
    with pytest.raises((UsageError, RankMismatchError), match=text):
        parwrap.distributed(strategy="parameter_server")(train_wrongly)(nn.Parameter(torch.ones(1)))


@pytest.mark.ranks(2)
def test_more_servers_than_ranks_leave_no_worker():
    with pytest.raises(UsageError, match="servers=2 leaves no worker among 2 ranks: the last ranks are the servers"):
        parwrap.distributed(strategy="parameter_server", servers=2)(train)()


def scaled_by_hand(train):
    def train_scaled(enabled=True):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return weight.item()

    return train_scaled


@pytest.mark.ranks(2)
def test_a_scaler_that_is_off_is_none():
    assert 0.5 == parwrap.distributed(strategy="parameter_server", staleness=0)(scaled_by_hand(train))(enabled=False)


@pytest.mark.ranks(3)
def test_features_without_a_meaning_are_refused_on_the_workers():
    def refused(feature, text, **options):
        try:
            parwrap.distributed(strategy="parameter_server", **options)(feature(train))()
        except (UsageError, RankMismatchError) as error:
            return text in str(error)

    assert refused(parwrap.sync_bn, "sync_bn needs a shared batch: each worker of a parameter server steps on its own")
    assert refused(parwrap.amp(dtype="fp16"), "parwrap.amp in fp16 skips steps where gradients overflow", staleness=0)
    assert refused(scaled_by_hand, "test_parameter_server_errors.py:", staleness=0)
    assert refused(parwrap.accumulate(2), "do not work together with batch='global' or uneven='join'", staleness=0, batch="global")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": 0}, "servers=0 is not a positive integer"),
        ({"staleness": -1}, "staleness=-1 is not a non-negative integer"),
        ({"staleness": 1.5}, "staleness=1.5 is not a non-negative integer"),
        (
            {"batch": "global"},
            "batch='global' applies to a batch that all ranks share, but workers of a parameter server step",
        ),
        ({"lr": "linear", "staleness": 2}, "lr='linear' applies to a batch .* set staleness=0"),
        ({"uneven": "join"}, "uneven='join' applies to a batch"),
        ({"strategy": "ddp", "servers": 2}, "servers=2 has no effect with strategy='ddp': .* 'parameter_server'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "parameter_server", **options})


@pytest.mark.ranks(3)
def test_clipping_in_step_is_said_not_to_be_that_of_the_average():
    @parwrap.distributed(strategy="parameter_server", staleness=0)
    def train():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        return [str(each.message) for each in said]

    said = [each for each in train() if "clips" in each]
    assert ["each worker clips its own gradients" in each for each in said] == [True]
