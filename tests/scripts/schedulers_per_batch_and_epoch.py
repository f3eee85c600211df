"""Two schedulers on one optimizer: a warm-up stepped every batch and a decay stepped every epoch."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR
from torch.utils.data import DataLoader, TensorDataset


def get_data():
    x = torch.rand(900, 2) * 4 - 2
    y = torch.sin(2 * x[:, :1]) * torch.cos(x[:, 1:]) + 0.1 * torch.randn(900, 1)
    return TensorDataset(x[:600], y[:600]), TensorDataset(x[600:], y[600:])


torch.manual_seed(4)
train_set, test_set = get_data()
train_loader = DataLoader(train_set, batch_size=20, shuffle=True)
test_loader = DataLoader(test_set, batch_size=100)

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
warmup_scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=len(train_loader))
epoch_scheduler = ExponentialLR(optimizer, gamma=0.9)

for epoch in range(2):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        if epoch == 0:
            warmup_scheduler.step()
    epoch_scheduler.step()
    print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.6f}")

model.eval()
with torch.no_grad():
    test_loss = sum(loss_fn(model(x), y).item() for x, y in test_loader) / len(test_loader)
print("loss", test_loss)
