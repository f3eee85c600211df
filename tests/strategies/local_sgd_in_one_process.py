"""A loop under ``local_sgd``, and the same with ranks that are played one after the other in a single process."""

import torch
from torch import nn

import parwrap

FEATURES = 6


def local(**options):
    return parwrap.distributed(strategy="local_sgd", **options)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def batch(step, rank):
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :1] * 2


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train(steps, optimizer_of=adam, each=lambda model: None):
    """A plain loop, in which every rank has batches of its own."""
    model = build()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        train_step(model, optimizer, *batch(step, parwrap.rank()))
        each(model)
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def mean(replicas, old):
    return sum(replicas) / len(replicas)


class DiLoCo:
    """Algorithm 1 of Douillard et al. (2023), with Nesterov's momentum as torch has it."""

    velocity = 0.0

    def __init__(self, lr=0.7, momentum=0.9):
        self.lr, self.momentum = lr, momentum

    def __call__(self, replicas, old):
        gradient = old - mean(replicas, old)
        self.velocity = self.momentum * self.velocity + gradient
        return old - self.lr * (gradient + self.momentum * self.velocity)


def in_one_process(size, every, outer=mean, optimizer_of=adam, parts=((7,),), leaves=None):
    """The weights that ``size`` ranks come to, which all begin anew from an average after each of ``parts``; a rank may leave sooner."""
    replicas = [build() for _ in range(size)]
    optimizers = [optimizer_of(model.parameters()) for model in replicas]
    old, taken, step = flat(replicas[0]), 0, 0

    def average(present):
        nonlocal old, taken
        old, taken = outer([flat(replicas[rank]) for rank in present], old), 0
        for model in replicas:
            nn.utils.vector_to_parameters(old.clone(), model.parameters())

    for (steps,) in parts:
        for _ in range(steps):
            present = [rank for rank in range(size) if step < (leaves or {}).get(rank, 1000)]
            for rank in present:
                train_step(replicas[rank], optimizers[rank], *batch(step, rank))
            step, taken = step + 1, taken + 1
            if taken == every:
                average(present)
        if taken:
            average(present)
    return old


def same_on_all_ranks(tensor):
    return all(torch.equal(tensor, each) for each in parwrap.gather(tensor))
