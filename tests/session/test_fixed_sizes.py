"""A batch size that is fixed in the code: the error says which batch this rank had, and what to try."""

import pytest

SOURCE = """
import torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(data, batch_size=12):
    out = model(x)
    {line}
    out.sum().backward()
    optimizer.step()
"""
NOTE = (
    "parwrap: with batch='global' this rank had 6 of the 12 samples of a batch. If a batch size is fixed in the code, read it from the "
    "tensors (x.shape[0]), or try batch='per_rank'."
)
LINES = {
    "a view": "out = out.view(12, 3)",
    "an index": "out = out[torch.arange(12), y]",
    "a loop": "out = torch.stack([out[i] for i in range(12)])",
    "an assertion": "assert x.shape[0] == 12",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_the_error_of_a_script_ends_with_the_batch_and_a_remedy(parwrap_run, script, line):
    code, _, stderr = parwrap_run("--nproc-per-node", "2", "--batch", "global", script(SOURCE.format(line=line)))

    assert 0 != code
    assert stderr.rstrip().endswith(NOTE)
    assert 1 == stderr.count(NOTE)


def test_other_errors_and_batches_of_whole_size_have_no_such_line(parwrap_run, script):
    for options, line in ((("--batch", "global"), "assert out.sum() == 'text'"), ((), "out = out.view(13, 3)")):
        code, _, stderr = parwrap_run("--nproc-per-node", "2", *options, script(SOURCE.format(line=line)))

        assert 0 != code
        assert "parwrap: with batch" not in stderr
