"""``@progress`` on a terminal, which is a pseudo-terminal here, and without one."""

import re

import pytest

import parwrap
from terminal import shown

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=4)
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for (x,) in loader:
            model(x)
"""


@pytest.mark.parametrize(("ranks", "batches"), [pytest.param(1, 6, marks=pytest.mark.slow), (2, 3)])
def test_each_training_pass_has_a_bar_with_the_batches_of_the_share(ranks, batches, tmp_path, warm_python):
    text = shown(warm_python, SCRIPT, tmp_path, "run", "--nproc-per-node", str(ranks), "--quiet", "--progress")

    assert ["1", "2"] == sorted(set(re.findall(r"epoch (\d)", text)))
    last = text.replace("\r", "\n").rstrip().splitlines()[-1]
    assert re.search(rf"epoch 2: 100%\|.*\| {batches}/{batches} \[.*loss \d\.\d+, [\d,]+ samples/s\]", last)


def test_a_loop_with_a_bar_of_its_own_gets_no_other(tmp_path, warm_python):
    own = SCRIPT.replace("in loader:\n        optimizer", "in tqdm(loader, desc='own'):\n        optimizer")

    text = shown(warm_python, "from tqdm import tqdm\n" + own, tmp_path, "run", "--nproc-per-node", "2", "--quiet", "--progress")

    assert (True, False) == ("own: " in text, "epoch" in text)


def test_what_parwrap_says_is_not_on_the_line_of_the_scripts_bar(tmp_path, warm_python):
    own = SCRIPT.replace("in loader:\n        optimizer", "in tqdm(loader):\n        optimizer")
    text = shown(warm_python, "from tqdm import tqdm\n" + own, tmp_path, "run", "--nproc-per-node", "2")

    assert re.search(r"[\r\n]parwrap: \S+ read 12 of 24 samples on each of 2 ranks", text), text


def test_without_a_terminal_there_is_no_bar(capfd):
    with parwrap.progress():
        exec(SCRIPT, {"__name__": "script"})

    assert "" == capfd.readouterr().err


def test_without_tqdm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("parwrap.decorators.progress.find_spec", lambda name: None)

    with pytest.raises(
        parwrap.UsageError, match=r"progress shows a bar of tqdm, which is not installed: pip install 'parwrap\[progress\]'\."
    ):
        parwrap.progress()
