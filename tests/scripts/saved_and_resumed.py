"""Training that stops, then resumes in new objects from the checkpoint if the file is there."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CHECKPOINT = "checkpoint.pth.tar"


def save_checkpoint(state, filename):
    torch.save(state, filename)


def train(total_epochs, train_set):
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.3)
    start_epoch = 0

    if os.path.isfile(CHECKPOINT):
        checkpoint = torch.load(CHECKPOINT)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{CHECKPOINT}' (epoch {start_epoch})")
    else:
        print(f"=> no checkpoint found at '{CHECKPOINT}'")

    loader = DataLoader(train_set, batch_size=16, shuffle=True)
    for epoch in range(start_epoch, total_epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        save_checkpoint(state, CHECKPOINT)
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    return model


def main():
    torch.manual_seed(0)
    x = torch.randn(600, 3)
    y = torch.sin(x[:, :1]) + torch.relu(x[:, 1:2] - x[:, 2:]) + 0.2 * torch.randn(600, 1)

    train(total_epochs=2, train_set=TensorDataset(x[:400], y[:400]))
    model = train(total_epochs=4, train_set=TensorDataset(x[:400], y[:400]))

    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x[400:]), y[400:])
    print(f"loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    model = main()
