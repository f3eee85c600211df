"""Warnings point at the script's own line, as in ``train.py:12: UserWarning``."""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parwrap
from parwrap.coordination import call_site

TRAINING = """
import torch, parwrap
from torch import nn
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def shown(stderr):
    """The warnings of ``stderr``: where, the first words after ``parwrap:`` or of torch's own, and the line of the script below."""
    found = re.findall(r"^(.*?): \w*Warning: (?:parwrap: )?(.*)\n(  .*)?", stderr, re.MULTILINE)
    return [(place.rpartition("/")[2], words, line.strip()) for place, words, line in found]


SCRIPTS = {
    "parameters that were built apart": (
        TRAINING.replace("model =", "torch.manual_seed(parwrap.rank())\nmodel =")
        + "def step():\n    model(torch.ones(2, 4)).sum().backward()\nstep()\n",
        "    model(torch.ones(2, 4)).sum().backward()",
        "2 of 2 parameters have different values on different ranks",
    ),
    "a rank that breaks off": (
        TRAINING
        + """
for epoch in range(2):
    for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 4)), batch_size=4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if epoch == 0 and parwrap.rank() == 0:
            break
""",
        "    for (x,) in",
        "rank 0 is at training loader",
    ),
    "weights that differ at the end": (
        TRAINING + "model(torch.ones(2, 4)).sum().backward()\nif parwrap.rank() == 0:\n    optimizer.step()\nprint('end')\n",
        "print('end')",
        "2 parameters have different values on different ranks at the end",
    ),
    "a warning of torch's own": (
        TRAINING
        + """
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
optimizer.step()
plateau.step(1.0, 3)
""",
        "plateau.step(1.0, 3)",
        "The epoch parameter in `scheduler.step()`",
    ),
    "a warning of the script's own": (
        "import warnings\ndef helper():\n    warnings.warn('mine', DeprecationWarning, stacklevel=2)\nhelper()\n",
        "helper()",
        "mine",
    ),
}


@pytest.mark.parametrize(("source", "line", "words"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_warning_points_to_the_line_of_the_script(parwrap_run, script, source, line, words):
    code, _, stderr = parwrap_run("--nproc-per-node", "2", script(source))
    number = max(number for number, each in enumerate(source.splitlines(), 1) if each.startswith(line))

    assert 0 == code, stderr
    assert [(f"train.py:{number}", source.splitlines()[number - 1].strip())] == [
        (place, text) for place, told, text in shown(stderr) if told.startswith(words)
    ], stderr


def test_a_filter_for_the_script_alone_makes_it_an_error(parwrap_run, script):
    source = "import warnings\nwarnings.filterwarnings('error', module='__main__')\n" + SCRIPTS["parameters that were built apart"][0]
    code, _, stderr = parwrap_run("--nproc-per-node", "2", script(source))

    assert 0 != code
    assert "UserWarning: parwrap: 2 of 2 parameters have different values" in stderr


def test_values_that_differ_by_rounding_are_made_the_same_without_a_word(parwrap_run, script):
    source = (
        TRAINING.replace("lr=0.1)\n", "lr=0.1)\ntorch.manual_seed(0)\n")
        + """
with torch.no_grad():
    solution = torch.linalg.lstsq(torch.randn(20, 4), torch.randn(20, 1)).solution.T
    model.weight.copy_(solution * (1 + 3e-7 * parwrap.rank()))
    rank0 = parwrap.broadcast(model.weight)
model(torch.ones(2, 4)).sum().backward()
print([torch.equal(rank0, each) for each in parwrap.gather(model.weight)])
"""
    )
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", script(source))

    assert (0, "[True, True]\n", []) == (code, stdout, shown(stderr))


def test_the_line_is_the_scripts_also_behind_torch_and_in_another_thread():
    class Warning_(nn.Module):
        def forward(self):
            return None

    module = Warning_()
    module.register_forward_pre_hook(lambda *args: call_site.warn("in a hook"))
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        module()
        pool.submit(call_site.warn, "in a thread").result()

    assert [("in a hook", UserWarning, __file__), ("in a thread", UserWarning, __file__)] == [
        (str(each.message), each.category, each.filename) for each in caught
    ]


def test_the_same_text_at_the_same_line_is_shown_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            call_site.warn("again")

    assert 1 == len(caught)


@pytest.mark.ranks(2)
def test_warn_is_put_back_and_takes_all_of_its_arguments():
    import parwrap

    before = warnings.warn
    with parwrap.distributed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(message=UserWarning("by name"), stacklevel=1, source=torch)

    assert (before, [("by name", __file__)]) == (warnings.warn, [(str(each.message), each.filename) for each in caught])


@pytest.mark.parametrize(
    "replaced",
    ["warnings.warn = lambda *args, **kwargs: None", "logging.captureWarnings(True)", "warnings.showwarning = print"],
)
def test_a_script_may_put_functions_of_its_own_in_place_of_those_of_warnings(replaced, parwrap_run, script):
    source = f"{TRAINING}import logging, warnings\n{replaced}\nmodel(torch.ones(2, 4)).sum().backward()\nprint('trained')"

    assert (0, "trained\n") == parwrap_run("--nproc-per-node", "2", script(source))[:2]


@pytest.mark.ranks(2)
def test_torchscript_compiles_functions_of_torch_that_warn():
    def script(logits, weights):
        @torch.jit.script
        def loss(logits, labels, weights):
            return F.cross_entropy(logits, labels, weight=weights)

        return loss(logits, torch.tensor([0, 1, 2, 0]), weights)

    logits, weights = torch.arange(12.0).reshape(4, 3), torch.tensor([1.0, 2.0, 3.0])
    with parwrap.distributed():
        inside = script(logits, weights)

    assert torch.equal(F.cross_entropy(logits, torch.tensor([0, 1, 2, 0]), weight=weights), inside)
    assert torch.equal(script(logits, weights), inside)
