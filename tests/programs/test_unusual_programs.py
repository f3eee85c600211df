"""Training programs of unusual kinds: with ``batch="global"`` two ranks train the weights of one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

import parwrap


def dataset(size=48, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(size, 8, generator=generator), torch.randn(8, 3, generator=generator)
    return TensorDataset(x, (x @ w).argmax(1))


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def sharpness_aware():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(dataset(), 8, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        ascent = [p.grad * 0.05 / norm for p in model.parameters()]
        with torch.no_grad():
            for p, e in zip(model.parameters(), ascent, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), ascent, strict=True):
                p.sub_(e)
        optimizer.step()
    return [model]


def maml():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tasks = TensorDataset(torch.rand(16, 2, generator=torch.Generator().manual_seed(1)))
    x = torch.linspace(-2, 2, 10)[:, None]
    for (batch,) in DataLoader(tasks, 4, shuffle=True):
        losses = []
        for amplitude, phase in batch:
            y = amplitude * torch.sin(x + phase)
            w, b = model.weight, model.bias
            dw, db = torch.autograd.grad(F.mse_loss(F.linear(x[:5], w, b), y[:5]), [w, b], create_graph=True)
            losses.append(F.mse_loss(F.linear(x[5:], w - 0.1 * dw, b - 0.1 * db), y[5:]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [model]


def mean_teacher():
    student = network()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    labeled, unlabeled = DataLoader(dataset(24), 8, shuffle=True), DataLoader(dataset(seed=8), 8, shuffle=True)
    batches = iter(labeled)
    for _ in range(2):
        for u, _ in unlabeled:
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(labeled)
                x, y = next(batches)
            loss = F.cross_entropy(student(x), y) + F.mse_loss(student(u).softmax(1), teacher(u).softmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.data.lerp_(q.data, 0.1)
    return [student, teacher]


def architecture_search():
    model, mixture = network(), nn.Linear(2, 1, bias=False)
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(mixture.parameters(), lr=0.05)
    training, validation = DataLoader(dataset(), 8, shuffle=True), DataLoader(dataset(seed=6), 8, shuffle=True)

    def mixed(x):
        w = mixture.weight[0].softmax(0)
        return w[0] * model(x) + w[1] * model(x.tanh())

    held_out = iter(validation)
    for x, y in training:
        step(mixed, outer, *next(held_out))
        step(mixed, inner, x, y)
    return [model, mixture]


def pseudo_labels():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    labeled, x_unlabeled = dataset(24), dataset(seed=8).tensors[0]
    samples = labeled
    for _ in range(3):
        model.train()
        for x, y in DataLoader(samples, 8, shuffle=True, drop_last=True):
            step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            confidence, label = model(x_unlabeled).softmax(1).max(1)
        samples = ConcatDataset([labeled, TensorDataset(x_unlabeled[confidence > 0.4], label[confidence > 0.4])])
    return [model]


def active_learning():
    x, y = dataset(60).tensors
    known, unknown = list(range(10)), list(range(10, 60))
    for _ in range(3):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        for batch in DataLoader(TensorDataset(x[known], y[known]), 5, shuffle=True):
            step(model, optimizer, *batch)
        model.eval()
        with torch.no_grad():
            doubt = torch.cat([1 - model(each).softmax(1).max(1).values for (each,) in DataLoader(TensorDataset(x[unknown]), 16)])
        chosen = [unknown[i] for i in doubt.topk(10).indices.tolist()]
        known, unknown = known + chosen, [i for i in unknown if i not in chosen]
    return [model]


def elastic_weight_consolidation():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(dataset(), 8, shuffle=True):
        step(model, optimizer, x, y)
    anchors = [p.detach().clone() for p in model.parameters()]
    model.eval()  # so that the pass is whole and its gradients are those of single samples
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in DataLoader(dataset(16, seed=7), 1):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for f, g in zip(fisher, gradients, strict=True):
            f += g**2
    model.train()
    for x, y in DataLoader(dataset(seed=8), 8, shuffle=True):
        penalty = sum((f * (p - a) ** 2).sum() for f, p, a in zip(fisher, model.parameters(), anchors, strict=True))
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty).backward()
        optimizer.step()
    return [model]


def federated_averaging():
    model = network()
    clients = random_split(dataset(), [16, 16, 16])
    for _ in range(2):
        states = []
        for client in clients:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            for x, y in DataLoader(client, 4, shuffle=True):
                step(local, optimizer, x, y)
            states.append(local.state_dict())
        model.load_state_dict({name: sum(state[name] for state in states) / 3 for name in states[0]})
    return [model]


def energy_model_sampled_by_backward():
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, _ in DataLoader(dataset(), 8, shuffle=True):
        sample = x.clone().requires_grad_()
        sampler = torch.optim.SGD([sample], lr=0.1)
        for _ in range(3):
            sampler.zero_grad()
            model(sample).sum().backward()
            sampler.step()
        loss = model(x).mean() - model(sample.detach()).mean() + model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model]


def wrapped_cycled_and_chained_loaders():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    long, short = DataLoader(dataset(45), 8, shuffle=True), DataLoader(dataset(16, seed=7), 8, shuffle=True)

    def one_ahead(loader):
        batches = iter(loader)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            yield batch

    for batch in one_ahead(long):
        step(model, optimizer, *batch)
    for batch in itertools.chain(long, short):
        step(model, optimizer, *batch)
    for (x, y), (u, v) in zip(DataLoader(dataset(), 8, shuffle=True), itertools.cycle(short), strict=False):
        step(model, optimizer, torch.cat([x, u]), torch.cat([y, v]))
    return [model]


def curriculum_until_the_loss_is_low():
    samples, model = dataset(), network()
    order = samples.tensors[0].norm(dim=1).argsort().tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for size in (16, 32, 48):
        losses = [2.0]
        while sum(losses) / len(losses) > 0.6:
            losses = [step(model, optimizer, x, y) for x, y in DataLoader(Subset(samples, order[:size]), 8, shuffle=True)]
    return [model]


PROGRAMS = [
    active_learning,
    architecture_search,
    curriculum_until_the_loss_is_low,
    elastic_weight_consolidation,
    energy_model_sampled_by_backward,
    federated_averaging,
    maml,
    mean_teacher,
    pseudo_labels,
    sharpness_aware,
    wrapped_cycled_and_chained_loaders,
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_two_ranks_train_the_weights_of_one_process(program):
    torch.manual_seed(0)
    expected = [model.state_dict() for model in program()]
    torch.manual_seed(0)

    with parwrap.distributed(batch="global", uneven="join"):
        trained = [model.state_dict() for model in program()]

    for one, two in zip(expected, trained, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
