"""Training by plain loops under ``@uniform_length``, on one rank and on two."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parwrap
from parwrap import UniformLengthBatchSampler
from parwrap.ranks.group import alone
from texts import LONGEST, Texts, seen


class Model(nn.Module):
    """The mean of embeddings, of tokens that are no padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(120, 4, dtype=torch.float64), nn.Linear(4, 2).double()

    def forward(self, texts):
        real = (texts != 0).unsqueeze(2)
        return self.head((self.embed(texts) * real).sum(1) / real.sum(1))


def train(epochs=2, batch_size=4, dataset=None):
    """A plain loop; also the number of batches before and after the first pass."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(dataset or Texts(pad_to=LONGEST), batch_size=batch_size, shuffle=True)
    lengths = [len(loader)]
    for _ in range(epochs):
        steps = 0
        for texts, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(texts), labels).backward()
            optimizer.step()
            steps += 1
        lengths += [steps, len(loader)]
    return model, lengths


def reference(ranks, **size):
    """The weights of one process that takes the mean gradient of the batches of a step."""
    dataset, model = Texts(pad_to=LONGEST), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = UniformLengthBatchSampler(dataset.lengths, **size, seed=None)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # the seed of workers, which every pass of a loader draws
        batches = iter(sampler.for_ranks(ranks))
        for step in zip(*[batches] * ranks, strict=True):
            optimizer.zero_grad()
            for batch in step:
                texts, labels = zip(*map(dataset.__getitem__, batch), strict=True)
                (nn.functional.cross_entropy(model(torch.stack(texts)), torch.tensor(labels)) / ranks).backward()
            optimizer.step()
    return model


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "size"), [({}, {"batch_size": 4}), ({"max_tokens": 100}, {"max_tokens": 100})])
def test_ranks_train_what_one_process_trains_on_the_same_batches(options, size):
    model, lengths = parwrap.uniform_length(pad_value=0, **options)(parwrap.distributed(train))()
    with alone():
        expected = reference(2, **size)

    assert distance(model, expected) < 1e-12
    assert 1 == len({*lengths})


@pytest.mark.ranks(2)
def test_a_global_batch_has_the_numbers_of_a_single_process():
    model, lengths = parwrap.distributed(batch="global")(parwrap.uniform_length(pad_value=0)(train))()
    with alone():
        expected, lengths_alone = parwrap.uniform_length(pad_value=0)(train)()

    assert distance(model, expected) < 1e-12
    assert lengths == lengths_alone
    with alone():
        assert distance(expected, reference(1, batch_size=4)) < 1e-12


@pytest.mark.ranks(2)
def test_ranks_step_with_batches_of_one_width_and_evaluate_all():
    dataset = Texts(100, pad_to=LONGEST)
    steps = []

    @parwrap.distributed
    @parwrap.uniform_length(pad_value=0)
    def run():
        model, _ = train(1, dataset=dataset)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for texts, labels in DataLoader(dataset, batch_size=4, shuffle=True):
            nn.functional.cross_entropy(model(texts), labels).backward()
            optimizer.step()
            steps.append(texts.shape)
        model.eval()
        with torch.no_grad():
            return seen(DataLoader(dataset, batch_size=8))

    evaluated = run()
    padded = [[shape[0] * shape[1] for shape in each] for each in parwrap.gather(steps)]

    assert list(range(100)) == [i for batch, _ in evaluated for i in batch]
    assert sum(map(max, zip(*padded, strict=True))) * 2 < 1.1 * sum(map(sum, padded))
    assert [len(each) for each in padded] == [13, 13]
