"""Options of the command train a plain script as its decorators would."""

import pytest

PRECISION = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(12):
    for inputs, targets in DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(outputs.dtype, next(model.parameters()).dtype, loss.item() < 0.1)
"""


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        pytest.param(["--amp"], "torch.bfloat16 torch.float32 True", marks=pytest.mark.slow),
        pytest.param(["--amp", "fp16"], "torch.float16 torch.float32 True", marks=pytest.mark.slow),
        (["--amp", "O2", "--nproc-per-node", "2"], "torch.float32 torch.float32 True"),
        (["--amp", "fp16", "--nproc-per-node", "2"], "torch.float16 torch.float32 True"),
    ],
)
def test_a_plain_script_trains_in_mixed_precision(parwrap_run, script, options, printed):
    status, stdout, _ = parwrap_run(*options, script(PRECISION))

    assert (0, f"{printed}\n") == (status, stdout)


ACCUMULATING = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(60, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(5):
    for inputs, targets in DataLoader(TensorDataset(x, x[:, :1]), batch_size=int(sys.argv[1])):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(f"loss {nn.functional.mse_loss(model(x), x[:, :1]).item():.6f}")
"""


def test_a_plain_script_accumulates_over_batches(parwrap_run, script):
    larger = parwrap_run(script(ACCUMULATING), "24")
    on_one = parwrap_run("--accumulate", "3", script(ACCUMULATING), "8")
    on_two = parwrap_run("--accumulate", "3", "--batch", "global", "--nproc-per-node", "2", script(ACCUMULATING), "8")

    assert 0 == larger[0]
    assert larger[:2] == on_one[:2] == on_two[:2]


def test_a_script_that_accumulates_already_is_told_so(parwrap_run, script):
    decorated = script("import parwrap\nwith parwrap.accumulate(4):\n    print('inside')\n")
    status, stdout, stderr = parwrap_run("--accumulate", "2", decorated)

    assert (1, "") == (status, stdout)
    assert "parwrap.accumulate(4) cannot be opened inside parwrap.accumulate(2), because a batch belongs to only one window." in stderr
    assert (0, "inside\n") == parwrap_run("--accumulate", "4", decorated)[:2]
