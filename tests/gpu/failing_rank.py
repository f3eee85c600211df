"""A rank that fails in a training as on a GPU, for ``tests/launching/test_what_is_saved.py``.

``python failing_rank.py RANK HOW WHERE BACKWARD``
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import parwrap
from lagging_backend import as_on_gpus
from parwrap.checks import watchdog
from parwrap.ranks import group as groups
from parwrap.ranks.world import detect


def fail() -> None:
    time.sleep(0.1)  # the other rank waits for its GPU by now
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"raises": ValueError, "has no memory": torch.OutOfMemoryError}[how]("the cause")


class Failing:
    def __reduce__(self) -> Any:
        fail()


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    now = ""

    def reached(place: str) -> None:
        if now == place:
            fail()

    model[1].register_forward_hook(lambda *_: reached("forward"))
    model[0].weight.register_hook(lambda grad: reached("backward"))
    optimizer.register_step_post_hook(lambda *_: reached("step"))
    try:
        for step in range(1, 30):
            now = where if (step, parwrap.rank()) == (number, failing) else ""
            loss = model(torch.full((2, 4), 1.0 + parwrap.rank())).square().mean()
            loss.backward()
            try:
                loss.item()
                optimizer.step()
            except parwrap.LockstepError:
                optimizer.step()  # a script that goes on
            optimizer.zero_grad()
            torch.save({"step": step, "model": model.state_dict(), "more": Failing() if now == "save" else None}, "model.pt")
    finally:
        torch.save(model.state_dict(), "last.pt")


if __name__ == "__main__":
    failing, how, where, number = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    watchdog.INTERVAL, watchdog.PATIENCE, watchdog.UNHEARD = 0.01, 0.05, 0.4
    with groups.opened(detect(os.environ)), as_on_gpus():
        parwrap.distributed(train)()
