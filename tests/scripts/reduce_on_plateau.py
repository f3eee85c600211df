"""ReduceLROnPlateau fed with the epoch's own training loss."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
weight = torch.randn(12, 1)
X = torch.randn(1000, 12)
Y = torch.tanh(X @ weight) + 0.1 * torch.randn(1000, 1)
train_data = TensorDataset(X[:800], Y[:800])
test_data = TensorDataset(X[800:], Y[800:])

model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=0)
loss_fn = nn.MSELoss()

for epoch in range(15):
    model.train()
    losses = []
    for x, y in DataLoader(train_data, batch_size=80, shuffle=True):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mean_loss = sum(losses) / len(losses)
    scheduler.step(mean_loss)
    print(f"Epoch {epoch}: loss {mean_loss:.4f}, lr {optimizer.param_groups[0]['lr']}")

model.eval()
with torch.no_grad():
    losses = [loss_fn(model(x), y).item() for x, y in DataLoader(test_data, batch_size=50)]
print(f"loss {sum(losses) / len(losses):.4f}")
