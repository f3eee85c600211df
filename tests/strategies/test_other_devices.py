"""Ranks on GPUs whose models are elsewhere, and torch's own choice; a mock replaces the GPU."""

import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parwrap
from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.strategies.common.agreement import described
from parwrap.strategies.ddp.gradient_averager import GradientAverager
from parwrap.strategies.fsdp import fsdp

GPU = torch.device("cuda", 0)


@pytest.mark.ranks(2)
def test_a_mesh_of_gpus_is_made_when_the_one_that_a_rank_sees_is_set(monkeypatch):
    """Else torch sets the GPU of the number LOCAL_RANK, which the second rank does not see."""
    events = []
    monkeypatch.setattr(groups.current(), "device", GPU)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(("set", device)))
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda kind, shape: events.append(("mesh", kind)) or init_device_mesh("cpu", shape))

    @parwrap.distributed(strategy="fsdp")
    def train():
        model = nn.Linear(2, 1)  # left on the CPU, so that it is not sharded
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 2), parwrap.rank() + 1.0)).mean().backward()
            optimizer.step()
        return model.weight.grad.tolist()

    assert [[1.5, 1.5]] == train()
    assert [("set", GPU), ("mesh", "cuda")] == events


def test_what_stands_in_for_a_parameter_is_where_the_others_have_theirs():
    """Another backend would carry its gradient, for which the others wait."""
    assert torch.device("cpu") == described([torch.zeros(2)])[0].stand_in(GPU).device
    assert torch.device("meta") == described([torch.zeros(2)])[0]._replace(device="meta").stand_in(torch.device("meta")).device


@pytest.mark.ranks(2)
def test_a_model_in_part_on_the_cpu_is_refused():
    """The device ``meta`` stands for a GPU."""
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    text = "a backward leaves gradients of parameters on cpu and meta, and torch's .* Move the whole model to one: model.to\\('cuda'\\)"

    with pytest.raises(UsageError, match=text):
        GradientAverager(groups.current(), 1, parameters, frozenset(), varies=False)


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_early_answers_for_a_model_that_was_left_on_the_cpu(monkeypatch):
    monkeypatch.setattr(groups.current(), "device", GPU)

    @parwrap.distributed
    def train():
        grads = []
        if parwrap.rank() == 0:
            return grads
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).mean().backward()
            grads.append(model.weight.grad.tolist())
            optimizer.step()
        return grads

    assert [[[1.0, 1.0]]] * (3 * parwrap.rank()) == train()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
@pytest.mark.ranks(2)
def test_a_gpu_of_another_number_is_explained():
    @parwrap.distributed
    def train():
        raise RuntimeError("CUDA error: invalid device ordinal")  # as torch.zeros(1, device="cuda:3") does

    with pytest.raises(RuntimeError, match=r"^CUDA error: invalid device ordinal\b") as raised:
        train()
    assert [
        "parwrap: each rank sees only its own GPU, which is 'cuda:0' there, so other device numbers do not exist. Write 'cuda' or "
        "'cuda:0'. To distinguish the ranks of a node, use parwrap.local_rank()."
    ] == raised.value.__notes__


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_so_it_is_in_a_plain_script_on_several_ranks(ranks, script, parwrap_run):
    raised = "import torch\nraise RuntimeError('CUDA error: invalid device ordinal')\n"

    code, _, said = parwrap_run("--nproc-per-node", ranks, script(raised))

    assert (1, int(ranks) - 1) == (code, said.count("parwrap: each rank sees only its own GPU"))
