"""``parwrap.launch`` in the kernel of a notebook, and at Python's prompt."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel

ROOT = Path(__file__).parents[2]

FIRST_CELL = """
import os, psutil, torch, parwrap
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from parwrap.loop import interrupts

interrupts.LONGEST = 0.3  # what is interrupted reaches no backward
torch.set_num_threads(2)
a = torch.randn(600, 600, requires_grad=True)
(a @ a).sum().backward()  # starts threads that no fork has
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

class Unlucky(Exception):
    pass

data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

def step(x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

def train(epochs):
    for epoch in range(epochs):
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            step(x, y)
        print("epoch", epoch, "of", __name__)
    print("a word of rank", parwrap.rank(), force=True)
    return Net, parwrap.world_size()

def steps():
    return int(optimizer.state[model.layer.weight]["step"]) if optimizer.state else 0

class Trainer(parwrap.DistributedMixin, uneven="drop"):
    def fit(self, epochs):
        return train(epochs)

def left():
    return dist.is_initialized(), sorted(os.environ) == names, psutil.Process().children()

names = sorted(os.environ)
"""


class Kernel:
    """A notebook's kernel, in which cells are run."""

    def __init__(self, environ):
        self._manager, self._client = start_new_kernel(env=environ)

    def run(self, code, interrupt_at=None):
        """What a cell shows, by kind; the kernel is interrupted when its stdout has ``interrupt_at``."""
        shown = {"stdout": "", "stderr": "", "result": "", "displayed": [], "error": "", "traceback": ""}

        def show(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown[content["name"]] += content["text"]
                if interrupt_at is not None and interrupt_at in shown["stdout"]:
                    self._manager.interrupt_kernel()
            elif kind == "execute_result":
                shown["result"] = content["data"]["text/plain"]
            elif kind == "display_data":
                shown["displayed"].append(content["data"]["text/plain"])
            elif kind == "error":
                shown.update(error=f"{content['ename']}: {content['evalue']}", traceback="\n".join(content["traceback"]))

        self._client.execute_interactive(code, output_hook=show, timeout=60)
        return shown

    def close(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    kernel = Kernel({**environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"})
    try:
        assert "" == kernel.run(FIRST_CELL)["error"]
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_the_cells_define_is_trained_and_shown(kernel, start_method):
    begin = int(kernel.run("weight = model.layer.weight; kept = weight.detach().clone(); steps()")["result"])
    shown = kernel.run(f"kind, size = parwrap.launch(Trainer().fit, epochs=2, nprocs=2, start_method={start_method!r})")

    assert "" == shown["error"]
    assert ["a word of rank 0", "a word of rank 1", "epoch 0 of __main__", "epoch 1 of __main__"] == sorted(shown["stdout"].splitlines())
    facts = "kind is Net, size, model.layer.weight is weight, torch.equal(weight, kept), steps()"
    assert f"(True, 2, True, False, {begin + 8})" == kernel.run(facts)["result"]
    assert "(False, True, [])" == kernel.run("left()")["result"]
    assert "(2, 1)" == kernel.run("step(*data[:]); torch.get_num_threads(), parwrap.world_size()")["result"]  # and it goes on here


def test_what_rank_zero_displays_is_shown(kernel):
    shown = kernel.run("from IPython.display import display\nparwrap.launch(lambda: display({'rank': parwrap.rank()}), nprocs=2)")

    assert ["{'rank': 0}"] == shown["displayed"]
    assert "" == shown["error"] == shown["stderr"]


def test_a_loop_in_a_library_is_at_the_line_of_the_cell(kernel):
    shown = kernel.run("""
from tqdm import tqdm

def through_tqdm():
    read = []
    for epoch in range(2):
        for x, y in tqdm(DataLoader(data, batch_size=4, shuffle=True), disable=True):
            step(x, y)
            read.append(len(x))
    return sum(read)

parwrap.launch(through_tqdm, nprocs=2)
""")

    assert ("32", "") == (shown["result"], shown["error"])
    assert re.search(r"parwrap: In\[\d+\]:6 read 16 of 32 samples on each of 2 ranks", shown["stderr"]), shown["stderr"]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_error_is_the_class_of_the_notebook_and_shows_the_line_of_the_cell(kernel, start_method):
    shown = kernel.run(f"""
@parwrap.distributed(nprocs=2, start_method={start_method!r})
def unlucky():
    print("begun")
    parwrap.barrier()
    if parwrap.rank() == 1:
        raise Unlucky("here")
    parwrap.barrier()

try:
    unlucky()
except Unlucky as error:
    caught = error
raise caught
""")

    assert "begun\n" == shown["stdout"]
    assert "Unlucky: here" == shown["error"]
    assert "rank 1 of 2 failed:" in shown["traceback"]
    assert '    raise Unlucky("here")' in shown["traceback"]
    assert "launching.py" not in shown["traceback"]
    assert "(False, True, [])" == kernel.run("left()")["result"]


def test_interrupting_the_kernel_ends_the_ranks_and_keeps_what_was_trained(kernel):
    shown = kernel.run(
        """
trained = torch.zeros(1)

def waits():
    import threading
    trained.add_(1)
    parwrap.barrier()
    print("ready")
    threading.Event().wait()

parwrap.launch(waits, nprocs=2)
""",
        interrupt_at="ready",
    )

    assert shown["error"].startswith("KeyboardInterrupt")
    assert "((False, True, []), tensor([1.]))" == kernel.run("left(), trained")["result"]
    assert "2" == kernel.run("parwrap.launch(parwrap.world_size, nprocs=2)")["result"]


PROMPT = """
import parwrap, torch
weight = torch.zeros(2)
class Own:
    pass

def train(k):
    weight.add_(k + parwrap.rank())
    print("training")
    return Own, parwrap.reduce_sum(1)

for method in METHODS:
    own, size = parwrap.launch(train, k=1, nprocs=2, start_method=method)
    print(own is Own, size, weight)

"""


@pytest.mark.slow
@pytest.mark.parametrize("methods", [("fork",), ("spawn",)])
def test_functions_of_the_prompt(methods):
    code = PROMPT.replace("METHODS", repr(methods))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    prompt = subprocess.run([sys.executable, "-i", "-q"], input=code, env=environ, capture_output=True, text=True, timeout=100)

    assert "training\nTrue 2 tensor([1., 1.])\n" == prompt.stdout
    assert "Traceback" not in prompt.stderr
