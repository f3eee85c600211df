"""A model that went through torch.compile."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 64)
        self.fc2 = nn.Linear(64, 3)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


x = torch.randn(900, 6)
y = (x[:, :3] + x[:, 3:]).argmax(dim=1)
train_loader = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=16, shuffle=True, drop_last=True)

model = MLP()
model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

for _epoch in range(2):
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(x[500:]).argmax(1) == y[500:]).float().mean().item()
print(f"accuracy {accuracy:.4f}")
