"""The same with Lightning Fabric.

fabric run --devices 2 --accelerator cpu examples/coming_from/with_fabric.py
"""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric()
    torch.manual_seed(0)
    device = fabric.device
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, test_set = torch.utils.data.Subset(dataset, range(1400)), dataset[1400:]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(train_set, batch_size=20, shuffle=True))

    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        loss = fabric.all_reduce(loss.detach())
        x, y = (each.to(device) for each in test_set)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        fabric.print(f"epoch {epoch + 1}: loss {loss.item():.6f}, test accuracy {accuracy:.3f}")

    fabric.save("model.pt", model.state_dict())


if __name__ == "__main__":
    main()
