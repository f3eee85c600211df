"""A script that guards a distributed branch of its own by ``is_initialized``, and would share out its data by itself."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import is_initialized
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size():
    try:
        return dist.get_world_size()
    except (RuntimeError, ValueError):
        return 1


torch.manual_seed(0)
x = torch.randn(700, 8)
y = (x[:, :4] + x[:, 4:]).argmax(dim=1)
train_set, test_set = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])
sampler = DistributedSampler(train_set) if is_initialized() else None
train_loader = DataLoader(train_set, batch_size=16 // get_world_size(), shuffle=sampler is None, sampler=sampler)

model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).to(f"cuda:{get_rank()}" if is_initialized() else "cpu")
if is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(2):
    model.train()
    for inputs, targets in train_loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if is_initialized():
            dist.all_reduce(loss)
            loss /= get_world_size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = sum((model(inputs).argmax(dim=1) == targets).sum().item() for inputs, targets in DataLoader(test_set, batch_size=64))
    if get_rank() == 0:
        print(f"epoch {epoch} of {get_world_size()} process: accuracy {accuracy / len(test_set):.4f}")

print("accuracy", round(accuracy / len(test_set), 4))
