"""torchmetrics: numbers of one process, of batches that every rank reads whole and of shares."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import ConfusionMatrix, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores

import parwrap

ROWS, TRAINED = 13, 48


@parwrap.distributed
def train(make, epochs=2, pickled=False):
    torch.manual_seed(0)
    x = torch.randn(TRAINED, 4)
    y = (x.sum(1) > 0).long()
    training = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    evaluation = DataLoader(TensorDataset(x[:ROWS], y[:ROWS]), batch_size=4)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted, metric = SumMetric(), make()
    if pickled:
        metric = pickle.loads(pickle.dumps(metric))
    found = []
    for _ in range(epochs):
        for inputs, labels in training:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            counted.update(len(inputs))
        with torch.no_grad():
            for inputs, labels in evaluation:
                metric.update(model(inputs), labels)
            by_hand = torch.bincount(2 * y[:ROWS] + model(x[:ROWS]).argmax(1), minlength=4).tolist()
        found.append((counted.compute().item(), metric.compute(), by_hand))
        counted.reset()
        metric.reset()
    return found


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.ranks(2)
def test_an_evaluation_that_every_rank_reads_whole_is_counted_once_and_shares_are_put_together(pickled):
    for counted, matrix, by_hand in train(lambda: ConfusionMatrix(task="multiclass", num_classes=2), pickled=pickled):
        assert TRAINED == counted
        assert by_hand == matrix.flatten().tolist()


@pytest.mark.ranks(3)
def test_so_are_the_members_of_a_collection():
    def make():
        return MetricCollection([MulticlassAccuracy(2, average="micro"), MulticlassStatScores(2, average="micro")]).clone(prefix="val_")

    for counted, metrics, (negatives, _, _, positives) in train(make, epochs=3):
        assert TRAINED == counted
        assert ROWS == metrics["val_MulticlassStatScores"][-1]
        assert pytest.approx((negatives + positives) / ROWS) == metrics["val_MulticlassAccuracy"].item()


@pytest.mark.ranks(2)
def test_a_step_of_a_metric_in_training_is_of_all_ranks():
    @parwrap.distributed
    def train():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = SumMetric()
        for (x,) in DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2, shuffle=True):
            model(x).sum().backward()
            optimizer.step()
            total(x)
        return total.compute().item()

    assert sum(range(8)) == train()


@pytest.mark.ranks(2)
def test_a_collection_may_be_used_for_training_and_for_evaluation():
    @parwrap.distributed
    def train():
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(24, 2), torch.arange(24) % 3)
        # two of them share their states, and the first is updated for both
        both = MetricCollection({name: ConfusionMatrix(task="multiclass", num_classes=3) for name in "ab"})
        totals = []
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                both.update(model(x), y)
            totals.append([each.sum().item() for each in both.compute().values()])
            both.reset()
            with torch.no_grad():
                for x, y in DataLoader(data, batch_size=4):
                    both.update(model(x), y)
            totals.append([each.sum().item() for each in both.compute().values()])
            both.reset()
        return totals

    assert [[24, 24]] * 4 == train()


def matrix_of(model, loader):
    metric = ConfusionMatrix(task="multiclass", num_classes=3)
    with torch.no_grad():
        for x, y in loader:
            metric.update(model(x), y)
    return metric.compute()


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("nothing_is_warned_of")
@pytest.mark.parametrize("rows", [20, 5])  # of 5 rows in batches of 4, one rank stands in
def test_states_of_an_evaluation_by_all_ranks_are_summed_once(rows):
    torch.manual_seed(0)
    model, loader = torch.nn.Linear(2, 3), DataLoader(TensorDataset(torch.randn(rows, 2), torch.arange(rows) % 3), batch_size=4)
    x, y = loader.dataset.tensors
    expected = torch.bincount(3 * y + model(x).argmax(1), minlength=9).view(3, 3)
    shared = parwrap.evaluate(reduce=lambda matrices: matrices[0])(matrix_of)

    @parwrap.distributed
    def run():
        return [shared(model, loader) for _ in range(2)]

    assert [expected.tolist()] * 2 == [each.tolist() for each in run()]
