"""OneCycleLR whose length comes from len(loader)."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_dataset(num_samples, centers):
    labels = torch.randint(len(centers), (num_samples,))
    return TensorDataset(centers[labels] + torch.randn(num_samples, centers.shape[1]), labels)


def run(args):
    torch.manual_seed(args.seed)
    centers = 2 * torch.randn(5, 10)
    train_loader = DataLoader(build_dataset(660, centers), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(build_dataset(400, centers), batch_size=args.batch_size)

    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.max_lr / 25, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.max_lr, epochs=args.epochs, steps_per_epoch=len(train_loader))

    for _epoch in range(args.epochs):
        model.train()
        for inputs, labels in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

    print(f"learning rate at the end: {scheduler.get_last_lr()[0]:.2e}")
    model.eval()
    with torch.inference_mode():
        correct = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in test_loader)
    print(f"accuracy {correct / len(test_loader.dataset):.4f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--max-lr", default=0.1, type=float)
    parser.add_argument("--seed", default=0, type=int)
    model = run(parser.parse_args())
