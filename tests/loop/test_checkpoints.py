"""Which saved objects are checkpoints."""

import copy
import io

import pytest
import torch
from torch import nn

import parwrap
from parwrap.loop.checkpoints import is_checkpoint

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 2))
OPTIMIZER = torch.optim.Adam(MODEL.parameters())
MODEL[2](torch.ones(1, 8)).sum().backward()
OPTIMIZER.step()
LATENT = torch.zeros(5, requires_grad=True)
BARE = torch.optim.SGD([LATENT])


class Trainer:
    def __init__(self):
        self.model, self.history = copy.deepcopy(MODEL), [1.0, 2.0]


def cast(state):
    return {f"module.{name}": each.to(torch.float64, copy=True) for name, each in state.items()}


CASES = {
    "state dict": (MODEL.state_dict(), True),
    "copied, renamed and cast": (cast(MODEL.state_dict()), True),
    "nested, with a small history": ({"epoch": 3, "nets": [{"g": MODEL.state_dict()}], "losses": torch.zeros(9)}, True),
    "whole module": (MODEL, True),
    "with the states of random streams": ({"m": MODEL.state_dict(), "draws": [torch.get_rng_state(), torch.Generator().get_state()]}, True),
    "states of random streams alone": ({"draws": torch.get_rng_state()}, False),
    "a copy, as of an average of weights": (copy.deepcopy(MODEL), True),
    "part of a model": (MODEL[2].state_dict(), True),
    "buffers": (dict(MODEL.named_buffers()), True),
    "state of an optimizer": (OPTIMIZER.state_dict(), True),
    "list of parameters": ([p.detach() for p in MODEL.parameters()], True),
    "bare tensor of an optimizer": (LATENT.detach(), True),
    "object with a model": (Trainer(), True),
    "traced": (torch.jit.script(MODEL[2]), True),
    "sample": ({"x": torch.zeros(3, 8), "y": 1}, False),
    "sample of the shape of a weight": ({"x": torch.zeros(2, 8)}, False),
    "row of a weight": ({"row": MODEL[2].weight[0].detach()}, False),
    "no tensors": ({"epoch": 3, "best": 0.5}, False),
    "mostly a replay buffer": ({"model": MODEL.state_dict(), "replay": torch.zeros(10_000)}, False),
    "sparse": (torch.eye(3).to_sparse(), False),
}


@pytest.mark.parametrize("case", CASES)
def test_which_objects_are_checkpoints(case):
    thing, expected = CASES[case]

    assert expected == is_checkpoint(thing, [MODEL, OPTIMIZER, BARE])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.ranks(2)
def test_a_checkpoint_is_rank_zeros_and_another_file_each_ranks(tmp_path, strategy):
    with parwrap.distributed(strategy=strategy):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3) + parwrap.rank()).sum().backward()
            optimizer.step()
        state = model.state_dict()
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "by": parwrap.rank()}, tmp_path / "last.pt")
        torch.save(model, tmp_path / "whole.pt")
        torch.save({"x": torch.ones(3), "by": parwrap.rank()}, tmp_path / "sample.pt")
        buffer = io.BytesIO()
        torch.save({"model": state, "by": parwrap.rank()}, buffer)
        buffer.seek(0)
        saved = [torch.load(each)["by"] for each in (tmp_path / "last.pt", tmp_path / "sample.pt", buffer)]
        whole = torch.load(tmp_path / "whole.pt", weights_only=False)

    assert [0, parwrap.rank(), parwrap.rank()] == saved
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), model.parameters(), strict=True))
