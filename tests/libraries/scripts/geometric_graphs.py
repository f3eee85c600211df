import json

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

torch.manual_seed(0)


def graph():
    n = int(torch.randint(3, 8, ()))
    x = torch.randn(n, 4)
    ring = torch.arange(n)
    edges = torch.stack([torch.cat([ring, ring.roll(1)]), torch.cat([ring.roll(1), ring])])
    return Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = GCNConv(4, 8), GCNConv(8, 8), nn.Linear(8, 2)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(self.second(x, data.edge_index), data.batch))


graphs = [graph() for _ in range(96)]
train, val = DataLoader(graphs[:64], batch_size=8, shuffle=True), DataLoader(graphs[64:], batch_size=8)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-4)
for epoch in range(3):
    model.train()
    read = total = right = 0
    for data in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), data.y)
        loss.backward()
        optimizer.step()
        read += data.num_graphs
        total += loss.item()
    model.eval()
    with torch.no_grad():
        for data in val:
            right += int((model(data).argmax(1) == data.y).sum())
    print("RESULT", json.dumps({"read": read, "loss": total / len(train), "accuracy": right / len(val.dataset)}))
torch.save(model.state_dict(), "final.pt")
