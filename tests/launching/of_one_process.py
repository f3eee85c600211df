"""A plain training loop for scripts that launchers start, and its weights after one process: this one, which has loaded torch."""

from pathlib import Path

import torch

__all__ = ["TRAINING", "assert_trained_as_one_process"]

TRAINING = """
import torch
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = torch.nn.Linear(3, 1)
sgd = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        sgd.zero_grad()
        (model(x) - y).square().mean().backward()
        sgd.step()
torch.save(model.state_dict(), "weights.pt")
"""
"""For ``--batch global``."""


def assert_trained_as_one_process(directory: Path, monkeypatch) -> None:
    """The weights that ``TRAINING`` has saved in ``directory`` are those of one process."""
    trained = torch.load(directory / "weights.pt")
    (directory / "alone").mkdir()
    monkeypatch.chdir(directory / "alone")
    with torch.random.fork_rng():
        exec(TRAINING, {})
    alone = torch.load("weights.pt")

    assert alone.keys() == trained.keys()
    for name in alone:
        torch.testing.assert_close(trained[name], alone[name])
