"""Random programs that split, search and start anew, and train by hand or by loaders: what they draw, and which rows they train on.

``programs()`` draws what a program does, and ``run`` does it in plain torch.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from sklearn.model_selection import KFold, train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

__all__ = ["Drawn", "Fold", "programs", "run"]

ROWS, SIZE = 24, 4
SPLITS = ("sklearn", "kfold", "torch", "numpy", "python", "random_split", "bootstrap", "mask by torch", "mask by python")
BATCHES = ("whole", "cut", "torch", "numpy", "python", "permutation", "generator", "loader", "loader and break", "loader by next")
DRAWS_FOR_EACH_STEP = ("torch", "numpy", "python", "permutation", "generator")


@dataclass(frozen=True)
class Fold:
    """One part of a program: a split, a model that is trained on it, and a look at the rest.

    Attributes:
        split: what draws it.
        batches: how the rows of a step come about.
        steps: how many steps it takes.
        accumulate: backwards for each step.
        dropout: none, as a module or as a function.
        noise: whether noise is drawn for each step.
        search: what draws the learning rate and the width.
        seeds: what is seeded before the split.
        afresh: whether there is a new model with a new optimizer; else the one of before is reset.
        two_optimizers: whether each layer has its own.
        look: how the fold is evaluated.
    """

    split: str
    batches: str
    steps: int
    accumulate: int
    dropout: str
    noise: bool
    search: str
    seeds: str
    afresh: bool
    two_optimizers: bool
    look: str


@st.composite
def programs(draw):
    """Several folds, each of its own kind or all alike."""
    fold = st.builds(
        Fold,
        split=st.sampled_from(SPLITS),
        batches=st.sampled_from(BATCHES),
        steps=st.integers(2, 7),
        accumulate=st.integers(1, 2),
        dropout=st.sampled_from(["none", "module", "function"]),
        noise=st.booleans(),
        search=st.sampled_from(["none", "torch", "numpy", "python"]),
        seeds=st.sampled_from(["none", "none", "torch", "numpy", "python"]),
        afresh=st.booleans(),
        two_optimizers=st.booleans(),
        look=st.sampled_from(["none", "eval", "no_grad", "dropout", "bootstrap"]),
    )
    return draw(st.lists(fold, min_size=2, max_size=4) | st.tuples(fold, st.integers(2, 4)).map(lambda one: [one[0]] * one[1]))


@dataclass
class Drawn:
    """What one fold has drawn.

    Attributes:
        arranged: index sets, permutations and what is searched for: each drawn rarely.
        training, validation: the rows of the split.
        trained: the rows that were in a step.
        batches, noise: what was drawn for each step.
    """

    arranged: list = field(default_factory=list)
    training: list = field(default_factory=list)
    validation: list = field(default_factory=list)
    trained: set = field(default_factory=set)
    batches: list = field(default_factory=list)
    noise: list = field(default_factory=list)


class Net(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, width), nn.Linear(width, 2), dropout
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(self.dropout(x) if self.how == "module" else x)


def split(kind, number):
    """The rows to train on and those to validate on."""
    rows = list(range(ROWS))
    if kind == "sklearn":
        return train_test_split(rows)
    if kind == "kfold":
        parts = list(KFold(4, shuffle=True).split(rows))[number % 4]
        return [part.tolist() for part in parts]
    if kind == "random_split":
        return [list(part.indices) for part in random_split(rows, [18, 6])]
    if kind == "bootstrap":
        chosen = np.random.choice(ROWS, ROWS).tolist()
        return chosen, sorted({*rows} - {*chosen})
    if kind.startswith("mask"):
        chosen = (torch.rand(ROWS) < 0.8).tolist() if kind == "mask by torch" else [random.random() < 0.8 for _ in rows]
        return [row for row in rows if chosen[row]] or rows[:1], [row for row in rows if not chosen[row]]
    if kind == "python":
        random.shuffle(rows)
    else:
        rows = (torch.randperm(ROWS) if kind == "torch" else np.random.permutation(ROWS)).tolist()
    return rows[:18], rows[18:]


def search(kind):
    """A learning rate and a width."""
    if kind == "torch":
        return 0.1 * torch.rand(1).item(), int(torch.randint(2, 9, ()))
    if kind == "numpy":
        return 10 ** np.random.uniform(-3, -1), int(np.random.choice([2, 4, 8]))
    return (random.uniform(0.01, 0.1), random.choice([2, 4, 8])) if kind == "python" else (0.05, 4)


def handmade(fold, drawn):
    """The rows of each step, which the script draws itself."""
    rows = drawn.training

    def generated():
        while True:
            yield torch.randint(len(rows), (SIZE,)).tolist()

    generator, taken = generated(), 0
    while taken < fold.steps:
        if fold.batches == "whole":
            taken += 1
            yield rows
        elif fold.batches == "cut":
            order = torch.randperm(len(rows)).tolist()
            drawn.arranged.append(order)
            for begin in range(0, len(rows), SIZE):
                taken += 1
                yield [rows[place] for place in order[begin : begin + SIZE]]
        else:
            taken += 1
            if fold.batches == "torch":
                places = torch.randint(0, len(rows), (SIZE,)).tolist()
            elif fold.batches == "numpy":
                places = np.random.choice(len(rows), SIZE).tolist()
            elif fold.batches == "python":
                places = random.choices(range(len(rows)), k=SIZE)
            elif fold.batches == "permutation":
                places = torch.randperm(len(rows))[:SIZE].tolist()
            else:
                places = next(generator)
            drawn.batches.append(places)
            yield [rows[place] for place in places]


def loaded(fold, drawn, data):
    """The rows of each step, from a loader."""
    loader = DataLoader(Subset(data, drawn.training), batch_size=SIZE, shuffle=True)
    if fold.batches == "loader by next":
        left_open.append(iter(loader))
        for _ in range(fold.steps):
            try:
                rows = next(left_open[-1])
            except StopIteration:
                left_open[-1] = iter(loader)
                rows = next(left_open[-1])
            yield rows[0].tolist()
        return
    for _ in range(fold.steps):
        for (rows,) in loader:
            yield rows.tolist()
            if fold.batches == "loader and break":
                break


left_open = []
"""Iterators that a fold leaves behind."""


def run(folds):
    """Do what ``folds`` say; returns a :class:`Drawn` for each."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    left_open.clear()
    x, y = torch.randn(ROWS, 3), torch.randint(0, 2, (ROWS,))
    data = TensorDataset(torch.arange(ROWS))
    model, result = None, []
    for number, fold in enumerate(folds):
        drawn = Drawn()
        result.append(drawn)
        if fold.seeds != "none":
            {"torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed}[fold.seeds](number)
        drawn.training, drawn.validation = split(fold.split, number)
        rate, width = search(fold.search)
        drawn.arranged += [drawn.training, drawn.validation, rate, width]
        if fold.afresh or model is None:
            model = Net(width, fold.dropout)
            parts = [model.first, model.last] if fold.two_optimizers else [model]
            optimizers = [torch.optim.SGD(part.parameters(), lr=rate) for part in parts]
        else:
            for layer in (model.first, model.last):
                layer.reset_parameters()
        model.train()
        batches = loaded(fold, drawn, data) if fold.batches.startswith("loader") else handmade(fold, drawn)
        for rows in batches:
            drawn.trained.update(rows)
            inputs = x[rows]
            if fold.noise:
                drawn.noise.append(torch.randn(3).tolist())
                inputs = inputs + 0.1 * torch.tensor(drawn.noise[-1])
            for _ in range(fold.accumulate):
                outputs = model(inputs)
                outputs = F.dropout(outputs, 0.3) if fold.dropout == "function" else outputs
                (F.cross_entropy(outputs, y[rows]) / fold.accumulate).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        look(fold, model, x[drawn.validation])
    return result


def look(fold, model, x):
    if fold.look == "eval":
        model.eval()(x)
    elif fold.look == "no_grad":
        with torch.no_grad():
            model(x)
    elif fold.look == "dropout":
        [model(x) for _ in range(3)]
    elif fold.look == "bootstrap" and len(x):
        model.eval()
        for _ in range(5):
            with torch.no_grad():
                model(x[np.random.choice(len(x), len(x))])
