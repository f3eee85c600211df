"""Epochs are logged to a CSV file; arrays and a figure are saved at the end, and read back."""

import csv
import logging
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OUT = Path("results")
OUT.mkdir()
logging.basicConfig(filename=OUT / "train.log", level=logging.INFO, format="%(message)s", force=True)

torch.manual_seed(0)
X = torch.rand(1000, 3)
Y = (X.sum(1, keepdim=True) > 1.5).float()
np.save(OUT / "inputs.npy", X.numpy())
X = torch.from_numpy(np.load(OUT / "inputs.npy"))

loader = DataLoader(TensorDataset(X[:800], Y[:800]), batch_size=40, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.02)

with open(OUT / "log.csv", "w", newline="") as f:
    csv.writer(f).writerow(["epoch", "val_loss"])

for epoch in range(6):
    for x, y in loader:
        opt.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        opt.step()
    with torch.no_grad():
        val_loss = nn.functional.binary_cross_entropy_with_logits(model(X[800:]), Y[800:]).item()
    with open(OUT / "log.csv", "a", newline="") as f:
        csv.writer(f).writerow([epoch, f"{val_loss:.6f}"])
    logging.info("epoch %d val_loss %.6f", epoch, val_loss)

with open(OUT / "log.csv", newline="") as f:
    rows = list(csv.DictReader(f))
assert [int(row["epoch"]) for row in rows] == list(range(6)), rows
assert rows[-1]["val_loss"] == f"{val_loss:.6f}"
logging.shutdown()
assert len((OUT / "train.log").read_text().splitlines()) == 6

plt.plot([float(row["val_loss"]) for row in rows])
plt.savefig(OUT / "loss.png")
assert plt.imread(OUT / "loss.png").shape[2] == 4
np.savez(OUT / "final.npz", loss=val_loss, weight=model[0].weight.detach().numpy())
with np.load(OUT / "final.npz") as final:
    assert final["weight"].shape == (16, 3)
assert sorted(path.name for path in OUT.iterdir()) == ["final.npz", "inputs.npy", "log.csv", "loss.png", "train.log"]

with torch.no_grad():
    accuracy = ((model(X[800:]) > 0).float() == Y[800:]).float().mean().item()
print(f"accuracy {accuracy:.4f}")
