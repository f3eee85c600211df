"""A folder of .npy files for each class, made on the first run and listed by os.listdir."""

import os

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

ROOT = "spectra"
CLASSES = {"low": 2, "mid": 5, "high": 9}


def make_files():
    for name, frequency in CLASSES.items():
        os.makedirs(os.path.join(ROOT, name), exist_ok=True)
        for number in range(60):
            path = os.path.join(ROOT, name, f"{number:03d}.npy")
            if not os.path.exists(path):
                noise = np.random.RandomState(1000 * frequency + number).randn(32)
                wave = np.sin(frequency * np.linspace(0, 2 * np.pi, 32) + number)
                # beside and then renamed: an interrupted run leaves no half of a file
                temporary = f"{path}.{os.getpid()}.npy"
                np.save(temporary, (wave + 0.3 * noise).astype(np.float32))
                os.replace(temporary, path)


class SpectraFolder(Dataset):
    def __init__(self, root):
        self.classes = sorted(CLASSES)
        self.samples = []
        for label, name in enumerate(self.classes):
            folder = os.path.join(root, name)
            self.samples += [(os.path.join(folder, file), label) for file in os.listdir(folder) if file.count(".") == 1]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        path, label = self.samples[idx]
        return np.abs(np.fft.rfft(np.load(path))).astype(np.float32), label


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)


make_files()
torch.manual_seed(0)
dataset = SpectraFolder(ROOT)
loader = DataLoader(dataset, batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, len(CLASSES)))
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
for epoch in range(8):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    print(f"Epoch {epoch + 1}: accuracy {accuracy(model, loader):.3f}")
print(f"accuracy {accuracy(model, loader):.3f}")
