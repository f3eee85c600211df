"""A Trainer class that owns model, optimizer and loaders, with fit() and evaluate()."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class TrainerConfig:
    max_epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-3
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class Trainer:
    def __init__(self, model, train_dataset, test_dataset, config):
        self.config = config
        self.model = model.to(config.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.criterion = nn.CrossEntropyLoss()
        self.train_loader = DataLoader(train_dataset, batch_size=config.batch_size, shuffle=True)
        self.test_loader = DataLoader(test_dataset, batch_size=config.batch_size)
        self.history = []

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.model.train()
        losses = [self._run_batch(source.to(self.config.device), targets.to(self.config.device)) for source, targets in self.train_loader]
        self.history.append(sum(losses) / len(losses))
        print(f"Epoch {epoch} | Batchsize: {self.config.batch_size} | Steps: {len(self.train_loader)} | Loss: {self.history[-1]:.4f}")

    def fit(self):
        for epoch in range(self.config.max_epochs):
            self._run_epoch(epoch)
        return self

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct = total = 0
        for source, targets in self.test_loader:
            output = self.model(source.to(self.config.device))
            correct += (output.argmax(dim=1).cpu() == targets).sum().item()
            total += len(targets)
        return correct / total


def spirals(count, generator):
    """Three arms of a spiral, one class each."""
    labels = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + labels * 2.094 + 0.15 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1) * 2, labels)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    trainer = Trainer(model, spirals(800, generator), spirals(500, generator), TrainerConfig())
    print(f"accuracy {trainer.fit().evaluate():.4f}")
