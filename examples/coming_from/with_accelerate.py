"""The same with accelerate.

accelerate launch --num-processes 2 examples/coming_from/with_accelerate.py
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/coming_from/with_accelerate.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    device = accelerator.device
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, test_set = torch.utils.data.Subset(dataset, range(1400)), dataset[1400:]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_set, batch_size=20, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        loss = accelerator.reduce(loss.detach(), "mean")
        x, y = (each.to(device) for each in test_set)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.6f}, test accuracy {accuracy:.3f}")

    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")


if __name__ == "__main__":
    main()
