"""Records the pictures of runs, which ``verify.rst``, ``scaling.rst`` and ``explain.rst`` show: ``python docs/runs.py [NAME ...]``.

They are in ``docs/runs``. ``explain`` needs Chromium, which takes a photograph of its page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.randn(256, 8)
labels = (points.sum(1) > 0).long()
loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(5):
    correct = 0
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        correct += (output.argmax(1) == y).sum().item()
    print(f"epoch {epoch}: {correct} of {len(points)} correct")
    if correct > 0.9 * len(points):
        optimizer.param_groups[0]["lr"] *= 0.1
    torch.save(model.state_dict(), "model.pt")
"""

COMMANDS = {
    "verify.svg": ["verify", "--steps", "40", "--plot", "verify.svg", "train.py"],
    "explain.png": ["explain", "--nproc-per-node", "2", "--html", "explain.html", "train.py"],
    "scaling.svg": ["scaling", "--ranks", "1,2", "--steps", "40", "--plot", "scaling.svg", "gpt.py"],
}


def main(names: list[str]) -> None:
    (HERE / "runs").mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        if names and Path(name).stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(SCRIPT, "utf-8")
            shutil.copy(HERE.parent / "examples" / "gpt.py", folder)
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-m", "parwrap", *command], cwd=folder, env=environ, timeout=300)
            if name.endswith(".png"):
                page = Path(folder, name).with_suffix(".html").as_uri()
                chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,960"]
                subprocess.run([*chromium, f"--screenshot={Path(folder, name)}", page], check=True, timeout=60)
            shutil.copy(Path(folder, name), HERE / "runs" / name)


if __name__ == "__main__":
    main(sys.argv[1:])
