"""Training that goes on where it was stopped, in the midst of an epoch too, written for one device.

parwrap run --nproc-per-node 2 examples/resume.py
parwrap run --nproc-per-node 2 --max-restarts 1 examples/resume.py --fail-at 30
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

CHECKPOINT = Path("resume.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-at", type=int, help="raise an error at this step, unless the run has been resumed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters())
    loader = StatefulDataLoader(dataset, batch_size=40, shuffle=True)
    begin = step = 0
    resumed = CHECKPOINT.exists()
    if resumed:
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["draws"])
        begin, step = state["epoch"], state["step"]
        print(f"resumed at step {step}")

    for epoch in range(begin, 3):
        draws = torch.get_rng_state()  # outside of the pass, where all ranks draw alike
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
                torch.save({**parts, "draws": draws, "epoch": epoch, "step": step}, CHECKPOINT)
            if step == arguments.fail_at and not resumed:
                raise RuntimeError(f"as asked for, at step {step}")
        print(f"epoch {epoch + 1}: loss {loss.item():.6f}")
    CHECKPOINT.unlink()


if __name__ == "__main__":
    main()
