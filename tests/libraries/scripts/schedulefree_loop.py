import json

import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x.sum(1) > 0).long()
train, val = DataLoader(TensorDataset(x[:64], y[:64]), 8, shuffle=True), DataLoader(TensorDataset(x[64:], y[64:]), 8)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=4, eps=1e-4)
for epoch in range(4):
    model.train()
    optimizer.train()
    read = total = right = 0
    for inputs, labels in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        read += len(inputs)
        total += loss.item()
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        for inputs, labels in val:
            right += (model(inputs).argmax(1) == labels).sum().item()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    print("RESULT", json.dumps({"read": read, "loss": total / len(train), "accuracy": right / len(val.dataset)}))
torch.save(model.state_dict(), "final.pt")
