"""wrapt without its C extension, whose frames stand between a wrapper and its caller."""

import json
import os
import subprocess
import sys

SCRIPT = """
import torch

def train(p, q):
    p.sum().backward()
    q.sum().backward()

optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2)]
for _ in range(2):
    train(*(each.param_groups[0]["params"][0] for each in optimizers))
with open("written", "w") as file:
    print("said", file=file)
"""


def test_lines_of_the_script_are_found_without_the_c_extension_of_wrapt(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "parwrap", "explain", "--nproc-per-node", "2", "--report", "report.json", "train.py"]
    environ = {**os.environ, "WRAPT_DISABLE_EXTENSIONS": "1"}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=120, capture_output=True)

    rows = [(row["place"], row["call"], row["what"]) for row in json.loads((tmp_path / "report.json").read_text())["rows"]]
    assert ["train.py:5", "train.py:6", "train.py:11", "train.py:12"] == [place for place, _, _ in rows]
    assert ["backward", "backward", "open", "print"] == [call for _, call, _ in rows]
    assert all(what.startswith("averaged 1 parameter,") for _, call, what in rows if call == "backward")
