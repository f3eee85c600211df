"""Numbers that loops of tutorials print, with ``parwrap.total`` where the page on numbers says so: on ranks as in one process."""

import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import parwrap

X = torch.randn(117, 5, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, (X @ torch.arange(15.0).reshape(5, 3).sin()).argmax(1))


def accuracy_by_length_of_the_dataset(batches, loader):
    correct = sum((outputs.argmax(1) == y).sum() for outputs, y, _ in batches)
    return parwrap.total(correct, of=loader) / len(DATA)


def accuracy_by_samples_seen(batches, loader):
    correct = seen = 0
    for outputs, y, _ in batches:
        correct, seen = correct + outputs.argmax(1).eq(y).sum().item(), seen + len(y)
    correct, seen = parwrap.total((correct, seen), of=loader)
    return correct / seen


def mean_of_losses_over_batches(batches, loader):
    return sum(loss.item() for _, _, loss in batches) / len(loader)


def sum_of_losses(batches, loader):
    return sum(loss.item() for _, _, loss in batches)


def loss_over_samples(batches, loader):
    return parwrap.total(sum(loss.item() * len(y) for _, y, loss in batches), of=loader) / len(DATA)


class AverageMeter:
    sum = count = 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n


def an_average_meter(batches, loader):
    meter = AverageMeter()
    for outputs, y, _ in batches:
        meter.update((outputs.argmax(1) == y).float().mean().item(), len(y))
    meter.sum, meter.count = parwrap.total((meter.sum, meter.count), of=loader)
    return meter.sum / meter.count


def a_confusion_matrix(batches, loader):
    matrix = torch.zeros(3, 3, dtype=torch.long)
    for outputs, y, _ in batches:
        matrix.index_put_((y, outputs.argmax(1)), torch.tensor(1), accumulate=True)
    return parwrap.total(matrix, of=loader)


def counts_for_each_class(batches, loader):
    correct = dict.fromkeys("abc", 0)
    for outputs, y, _ in batches:
        for label, predicted in zip(y, outputs.argmax(1), strict=True):
            correct["abc"[label]] += int(label == predicted)
    return list(parwrap.total(correct, of=loader).values())


def a_perplexity(batches, loader):
    summed = tokens = 0.0
    for _, y, loss in batches:
        summed, tokens = summed + loss.item() * y.numel(), tokens + y.numel()
    summed, tokens = parwrap.total((summed, tokens), of=loader)
    return math.exp(summed / tokens)


def a_root_of_mean_squares(batches, loader):
    squares = sum(outputs.detach().square().sum() for outputs, _, _ in batches)
    return (parwrap.total(squares, of=loader) / len(DATA)) ** 0.5


def predictions_in_a_list(batches, loader):
    predictions = []
    for outputs, _, _ in batches:
        predictions += outputs.argmax(1).tolist()
    return sorted(itertools.chain(*parwrap.gather(predictions)))


LOOPS = [
    *(accuracy_by_length_of_the_dataset, accuracy_by_samples_seen, mean_of_losses_over_batches, sum_of_losses, loss_over_samples),
    *(an_average_meter, a_confusion_matrix, counts_for_each_class, a_perplexity, a_root_of_mean_squares, predictions_in_a_list),
]


def trained(compute):
    """What ``compute`` returns for two epochs of training and of validation at one line, in one flat list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loaders = {"train": DataLoader(DATA, 9, shuffle=True), "val": DataLoader(DATA, 20)}

    def batches(phase):
        for x, y in loaders[phase]:
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(x)
                loss = cross_entropy(outputs, y)
            if phase == "train":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            yield outputs, y, loss

    numbers = []
    for _ in range(2):
        for phase, loader in loaders.items():
            model.train(phase == "train")
            if phase == "train" or compute is not predictions_in_a_list:  # a whole pass needs no gather
                numbers += torch.as_tensor(compute(batches(phase), loader)).reshape(-1).tolist()
    return numbers


@functools.cache
def of_one_process(compute):
    return trained(compute)


@pytest.mark.parametrize("compute", LOOPS, ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size), id=f"{size} ranks") for size in (2, 3)])
def test_numbers_are_those_of_one_process(compute, size, monkeypatch):
    with parwrap.distributed(batch="global"):
        numbers = trained(compute)

    if parwrap.is_rank_zero():
        with monkeypatch.context() as alone:
            alone.setattr(parwrap, "total", lambda values, of: values)
            alone.setattr(parwrap, "gather", lambda values: [values])
            assert of_one_process(compute) == pytest.approx(numbers, rel=1e-5)
