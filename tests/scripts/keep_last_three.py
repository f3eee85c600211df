"""A new run directory for each run; only the last three checkpoints are kept, `latest` is written and then renamed."""

import json
import os

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def new_run_dir():
    i = 0
    while os.path.exists(f"run{i}"):
        i += 1
    run_dir = f"run{i}"
    os.makedirs(run_dir)
    return run_dir


def save(run_dir, model, epoch, keep=3):
    torch.save(model.state_dict(), os.path.join(run_dir, f"ckpt_{epoch:03d}.pt"))
    names = sorted(name for name in os.listdir(run_dir) if name.startswith("ckpt_"))
    for name in names[:-keep]:
        os.remove(os.path.join(run_dir, name))
    tmp = os.path.join(run_dir, "latest.json.tmp")
    with open(tmp, "w") as f:
        json.dump({"epoch": epoch, "checkpoints": names[-keep:]}, f)
    os.rename(tmp, os.path.join(run_dir, "latest.json"))


def train(run_dir, x, y, epochs=8):
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=200, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(xb), yb).backward()
            optimizer.step()
        save(run_dir, model, epoch)
    return model


torch.manual_seed(3)
x = torch.randn(1200, 4)
y = x[:, :1] * x[:, 1:2] + 0.5 * x[:, 2:3]
for expected in ("run0", "run1"):
    run_dir = new_run_dir()
    assert run_dir == expected, run_dir
    model = train(run_dir, x[:1000], y[:1000])

with open(os.path.join(run_dir, "latest.json")) as f:
    latest = json.load(f)
assert latest == {"epoch": 7, "checkpoints": ["ckpt_005.pt", "ckpt_006.pt", "ckpt_007.pt"]}, latest
assert sorted(os.listdir(run_dir)) == latest["checkpoints"] + ["latest.json"]
for name in latest["checkpoints"]:
    model.load_state_dict(torch.load(os.path.join(run_dir, name)))
with torch.no_grad():
    print("loss", nn.functional.mse_loss(model(x[1000:]), y[1000:]).item())
