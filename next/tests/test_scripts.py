"""Plain scripts that have never heard of parwrap, on 1, 2 and 3 ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def run(script, scope):
    """What the script leaves behind and what it prints, on its own arguments."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, [str(script)]
    try:
        with contextlib.redirect_stdout(printed), scope:
            left = runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return left, printed.getvalue()


def state(left):
    model = left["model"]
    return model if isinstance(model, dict) else model.state_dict()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_probe(script, tmp_path, monkeypatch):
    import torch

    import parwrap
    from parwrap.decorators.distributed import _HiddenGroup, script_scope
    from parwrap.intercept.torch_calls import intercepting
    from parwrap.ranks.group import alone

    (tmp_path / f"o{parwrap.rank()}").mkdir()
    monkeypatch.chdir(tmp_path / f"o{parwrap.rank()}")
    os.environ.get("PB")
    import random, numpy as np
    rng = torch.get_rng_state(), np.random.get_state(), random.getstate()
    left, printed = run(script, script_scope(batch=os.environ.get("PB", "global")))
    mine = {k: v for k, v in state(left).items() if not k.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    others = parwrap.gather(mine)
    same = max(float((a.double() - b.double()).abs().max()) if a.numel() else 0 for a, b in zip(others[0].values(), others[1].values(), strict=True))
    if parwrap.rank() == 0:
        (tmp_path / "by").mkdir()
        monkeypatch.chdir(tmp_path / "by")
        torch.set_rng_state(rng[0]); np.random.set_state(rng[1]); random.setstate(rng[2])
        with alone():
            ref, rp = run(script, intercepting([_HiddenGroup()]))
        try:
            d = max(float((a.double() - b.double()).abs().max()) if a.numel() else 0 for a, b in ((v, state(ref)[k]) for k, v in mine.items()))
        except Exception as e:
            d = -1.0
        with open("/tmp/probe.txt", "a") as f:
            f.write(json.dumps([script.stem, "vs1", d, "ranks", same, printed.strip().splitlines()[-1:], rp.strip().splitlines()[-1:]]) + "\n")
