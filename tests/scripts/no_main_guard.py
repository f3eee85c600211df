"""Everything at module level, without a main guard."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

x = torch.rand(680, 1) * 4 - 2
y = torch.sin(3 * x) + 0.1 * torch.randn_like(x)
train_loader = DataLoader(TensorDataset(x[:480], y[:480]), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

for epoch in range(2):
    running_loss = 0.0
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    print(f"epoch {epoch + 1}: training loss {running_loss / len(train_loader):.4f}")

print("Finished Training")

model.eval()
with torch.no_grad():
    test_loss = criterion(model(x[480:]), y[480:]).item()
print(f"loss {test_loss:.4f}")
