"""Buffers follow DDP: rank 0's are everybody's, of whatever kind they are (contract, small print on buffers)."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.ranks.group import alone

STEPS = 4


class Changing(nn.Module):
    """A buffer that each training forward changes by what is in the batch, and that the graph uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.change(x.detach().mean(0))
        return x * self.seen

    def change(self, mean):
        self.seen = self.seen + mean


class InPlace(Changing):
    def change(self, mean):
        self.seen += mean


class Lazy(Changing):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)

    def change(self, mean):
        self.seen = mean if self.seen is None else self.seen + mean


class Expanded(Changing):
    """One number in the place of three."""

    def change(self, mean):
        self.seen = (self.seen[:1] + mean.mean()).expand(3)


class OfNumpy(Changing):
    """A write that raises no version, as through ``.data``, or in fused observers."""

    def change(self, mean):
        self.seen.numpy()[:] += mean.numpy()

    def forward(self, x):
        super().forward(x)
        return x * self.seen.clone()


class Observer(torch.ao.quantization.FusedMovingAvgObsFakeQuantize):
    """Torch's default observer of quantization-aware training."""

    @property
    def seen(self):
        return self.scale


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(x.detach().mean(0))
        return x * self.seen.clone()


def scripted():
    return torch.jit.script(Counts())


def trained(build, number):
    torch.manual_seed(0)
    model = nn.Sequential(build(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for (x,) in parwrap.replicate(DataLoader(TensorDataset(torch.ones(STEPS, 3)), batch_size=1)):
        optimizer.zero_grad()
        model(x * (1 + number)).mean().backward()
        optimizer.step()
    return model[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [Changing, InPlace, Lazy, Expanded, scripted, OfNumpy, Observer], ids=lambda build: build.__name__)
def test_buffers_that_training_changes_are_rank_zeros_of_whatever_kind_they_are(build):
    with alone():
        expected = trained(build, number=0)
    with parwrap.distributed():
        actual = trained(build, parwrap.rank())

    assert torch.equal(expected.seen, actual.seen)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("holds", [0, 1])
def test_a_model_of_an_earlier_training_may_be_collected_earlier_on_one_rank(holds):
    with alone():
        expected = trained(InPlace, number=0).seen
    held, folds = [], []
    with parwrap.distributed():
        for _ in range(3):
            model = trained(InPlace, parwrap.rank())
            held += [model] if parwrap.rank() == holds else []
            folds.append((weakref.ref(model), model.seen.clone()))
            del model

    assert all(torch.equal(expected, seen) for _, seen in folds)
    assert [parwrap.rank() == holds] * 3 == [ref() is not None for ref, _ in folds]


@pytest.mark.ranks(2)
def test_buffers_without_a_shape_yet_are_those_of_rank_zero_in_evaluation():
    data = DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3)), batch_size=2)
    with parwrap.distributed():
        model = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(1))
        model(torch.ones(2, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in data:
            model(x).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            sums = [sum(model(x).sum().item() for (x,) in data) for _ in range(2)]

    assert 1 == len({each for rank in parwrap.gather(sums) for each in rank})


def evaluated(buffer):
    """What ``buffer`` holds once a pass that reads everything has begun."""
    model, held = nn.Linear(3, 1), nn.Module()
    held.register_buffer("kept", buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held.eval()
    with torch.no_grad():
        list(DataLoader(range(2)))
    return held.kept


LAYOUTS = {
    "plain": lambda number: torch.full((3,), number),
    "expanded": lambda number: torch.full((1,), number).expand(3),
    "expanded in part": lambda number: torch.full((2, 1), number).expand(2, 3).t(),
    "scalar": lambda number: torch.full((), int(number), dtype=torch.int64),
    "transposed": lambda number: torch.full((2, 3), number).t(),
    "of a small dtype": lambda number: torch.full((3,), int(number), dtype=torch.int16),
    "complex": lambda number: torch.full((3,), number * 1j),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_of_every_layout_are_rank_zeros_in_evaluation(layout):
    made = LAYOUTS[layout]
    with parwrap.distributed():
        assert torch.equal(made(1.0), evaluated(made(1.0 + parwrap.rank())))


@pytest.mark.ranks(2)
def test_buffers_that_cannot_be_sent_are_each_ranks_own():
    with torch.inference_mode():
        own = torch.full((3,), float(parwrap.rank()))
    with parwrap.distributed():
        assert [float(parwrap.rank())] * 3 == evaluated(own).tolist()


def norm_in_training():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2):
        model(x).sum().backward()
        optimizer.step()
    return model


def epochs_with_an_average(average):
    """Train for three epochs; the statistics of ``average``, which stays in eval mode, on all ranks when each is evaluated."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        for (x,) in DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2):
            model(x).sum().backward()
            optimizer.step()
        average.load_state_dict(model.state_dict())
        own = average[0].running_mean.tolist()
        with torch.no_grad():
            list(DataLoader(range(2)))
        seen.append((own, average[0].running_mean.tolist()))
    return seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_made_before", [False, True])
def test_an_average_of_models_that_stays_in_eval_mode_has_rank_zeros_statistics_in_each_evaluation(is_made_before):
    average = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval() if is_made_before else None
    train = parwrap.distributed(lambda average: epochs_with_an_average(average or nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()))
    both = parwrap.gather(train(average))

    for (first, evaluated_on_first), (second, evaluated_on_second) in zip(*both, strict=True):
        assert first != second
        assert first == evaluated_on_first == evaluated_on_second


@pytest.mark.ranks(2)
def test_a_module_that_only_one_rank_has_not_collected_yet_is_not_sent():
    held = []
    with parwrap.distributed():
        average = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
        held.append(nn.Sequential(nn.BatchNorm1d(5)).eval())
        if parwrap.rank() == 0:
            held.clear()
        both = parwrap.gather(epochs_with_an_average(average))

    assert [each for _, each in both[0]] == [each for _, each in both[1]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of_average", [False, True])
def test_tensors_that_no_loader_reads_are_evaluated_with_rank_zeros_statistics(of_average):
    """So ranks agree on the best epoch, on stopping early, and on the weights that they keep."""
    with parwrap.distributed():
        trained = norm_in_training()
        model = copy.deepcopy(trained) if of_average else trained
        own = parwrap.gather(model[0].running_mean.tolist())
        model.eval()
        with torch.no_grad():
            outputs = parwrap.gather(model(torch.ones(1, 3)).item())
        sent = parwrap.gather(model[0].running_mean.tolist())

    assert own[0] != own[1]
    assert [own[0]] * 2 == sent
    assert outputs[0] == outputs[1]


def statistics_in_eval_mode(frozen_norm):
    """The statistics of a norm on all ranks: of a model in eval mode inside a training pass, or of a norm that is frozen outside of it."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2):
        model(x).sum().backward()
        optimizer.step()
        if not frozen_norm:
            model.eval()
            inside = parwrap.gather(model[0].running_mean.tolist())
            model.train()
    return parwrap.gather(model[0].eval().running_mean.tolist()) if frozen_norm else inside


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen_norm", [False, True])
def test_eval_mode_inside_a_training_pass_and_of_a_single_norm_sends_nothing(frozen_norm):
    """An attack puts the model in eval mode for each batch, and a script that freezes norms calls each of them."""
    with parwrap.distributed():
        first, second = statistics_in_eval_mode(frozen_norm)

    assert first != second


@pytest.mark.ranks(2)
def test_a_state_dict_sends_nothing_and_what_is_saved_is_rank_zeros(tmp_path):
    folder = parwrap.broadcast(tmp_path)
    with parwrap.distributed():
        model = norm_in_training()
        own = model[0].running_mean.clone()
        if parwrap.rank() == 0:  # the other rank never comes here
            model.state_dict()
        torch.save(model.state_dict(), folder / "model.pt")
        everyones, saved = parwrap.gather(own), torch.load(folder / "model.pt")

        assert torch.equal(own, model[0].running_mean)
    assert not torch.equal(*everyones)
    assert torch.equal(everyones[0], saved["0.running_mean"])


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        out = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * out.mean(0))
        return out - self.mean


@pytest.mark.ranks(2)
def test_what_the_first_forward_changes_is_rank_zeros_from_the_second_on_as_with_ddp():
    inputs = torch.arange(16.0).view(4, 2, 2) + parwrap.rank()

    def train(model, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in inputs:
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = Codebook()
    by_hand = copy.deepcopy(model)
    expected = train(by_hand, DistributedDataParallel(by_hand))
    found = parwrap.distributed(train)(model, model)

    assert [0.0, 0.0] == [(a - b).abs().max().item() for a, b in zip(expected, found, strict=True)]
