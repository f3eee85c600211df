"""The best model so far is saved by path, and loaded again for the final test."""

import os

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT_DIR = "checkpoints"
BEST_MODEL_PATH = os.path.join(CHECKPOINT_DIR, "best_model_params.pt")


def make_loader(means, count, **kwargs):
    labels = torch.randint(len(means), (count,))
    return DataLoader(TensorDataset(means[labels] + torch.randn(count, 6), labels), batch_size=24, **kwargs)


def accuracy_of(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in loader:
            correct += (model(inputs).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    torch.manual_seed(8)
    means = 2.5 * torch.randn(4, 6)
    train_loader = make_loader(means, 600, shuffle=True)
    val_loader, test_loader = make_loader(means, 300), make_loader(means, 300)
    os.makedirs(CHECKPOINT_DIR, exist_ok=True)

    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    best_acc = 0.0
    for epoch in range(2):
        model.train()
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()

        acc = accuracy_of(model, val_loader)
        print(f"Epoch {epoch}: val accuracy {acc:.4f}")
        if acc > best_acc:
            best_acc = acc
            torch.save(model.state_dict(), BEST_MODEL_PATH)

    model.load_state_dict(torch.load(BEST_MODEL_PATH))
    print(f"accuracy {accuracy_of(model, test_loader):.4f}")
    return model


if __name__ == "__main__":
    model = main()
