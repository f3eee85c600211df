"""DataLoader workers that augment at random, with the global random state of each worker."""

import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class StripesDataset(Dataset):
    """8x8 pictures: horizontal, vertical or diagonal stripes, shifted and flipped at random when training."""

    def __init__(self, length, train):
        self.targets = [i % 3 for i in range(length)]
        self.train = train
        rows, cols = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
        phases = torch.stack([rows, cols, rows + cols]).float()
        self.images = torch.sin(phases * 6.28 / 4)[:, None]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        target = self.targets[index]
        image = self.images[target]
        if self.train:
            image = image.roll(random.randrange(4), dims=-1)
            if random.random() < 0.5:
                image = -image
        return image + 0.5 * torch.randn(1, 8, 8), target


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def main():
    torch.manual_seed(0)
    random.seed(0)
    train_loader = DataLoader(StripesDataset(600, train=True), batch_size=20, shuffle=True, num_workers=2, persistent_workers=True)
    test_loader = DataLoader(StripesDataset(300, train=False), batch_size=100, num_workers=2)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    for epoch in range(3):
        model.train()
        for images, targets in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} done, loss {loss.item():.3f}")

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, targets in test_loader:
            correct += (model(images).argmax(1) == targets).sum().item()
    print(f"accuracy {correct / 300:.4f}")
    return model


if __name__ == "__main__":
    model = main()
