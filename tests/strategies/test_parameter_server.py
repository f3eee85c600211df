"""Workers and parameter servers, against synchronous SGD of one process and by what each worker must see."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError

X = torch.linspace(-1, 1, 32).view(16, 2)
Y = X.sum(1, keepdim=True).sin()


def train(build=lambda p: torch.optim.SGD(p, lr=0.1), samples=16, batch_size=4, epochs=2, schedule=False, clip=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = build(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    loader = DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=batch_size)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if scheduler:
                scheduler.step()
        model.eval()
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.01),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("which", [0, 1])
def test_with_staleness_0_two_workers_come_to_the_weights_of_one_process_with_the_whole_batch(which):
    alone = train(OPTIMIZERS[which], schedule=True)
    together = parwrap.distributed(strategy="parameter_server", staleness=0, batch="global")(train)(OPTIMIZERS[which], schedule=True)

    torch.testing.assert_close(flat(alone), flat(together), atol=1e-5, rtol=0)
