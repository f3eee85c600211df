"""Scripts that train by a library: run by one process and on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"


class Run(NamedTuple):
    """What a script has left.

    Attributes:
        results: the numbers that it has printed, one dict a line.
        read: how many samples of each training pass a rank has read.
        weights: the state dict that it has saved.
        files: the files that it has left; what their names draw or read from the clock is ``#``.
        errors: what it has written to stderr.
    """

    results: list[dict[str, Any]]
    read: list[int]
    weights: dict[str, torch.Tensor]
    files: list[str]
    errors: str


def run(command: list[str], folder: Path) -> Run:
    """Run ``command`` in ``folder``, which it makes."""
    folder.mkdir()
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line.partition(" ")[2]) for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    read = [line.pop("read") for line in lines if "read" in line]
    drawn = re.compile(r"(?<=tfevents\.).*|[0-9a-f]{32}|\d{10}\.\d+")
    files = sorted(drawn.sub("#", str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file())
    return Run(lines, read, torch.load(folder / "final.pt"), files, ended.stderr)


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., tuple[Run, Run]]:
    """A function that runs a script alone and on 2 ranks, and compares what both print, train and leave.

    Of a script that draws in its passes, ``draws=True``, it compares no weights. ``options`` are those of ``parwrap run``.
    """

    def compare(name: str, *arguments: str, options: Sequence[str] = (), draws: bool = False) -> tuple[Run, Run]:
        script = [str(SCRIPTS / f"{name}.py"), *arguments]
        alone = run([sys.executable, *script], tmp_path / "alone")
        parwrap = [sys.executable, "-m", "parwrap", "run", "--nproc-per-node", "2", "--batch", "global", *options]
        together = run([*parwrap, *script], tmp_path / "together")

        assert alone.results
        assert [list(each) for each in together.results] == [list(each) for each in alone.results]
        for one, other in zip(together.results, alone.results, strict=True):
            for key, value in other.items():
                assert one[key] == (pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, (float, list)) else value), key
        assert list(together.weights) == list(alone.weights)
        for key, weight in alone.weights.items():
            assert draws or torch.allclose(together.weights[key], weight, rtol=1e-5, atol=1e-5), key
        assert together.files == alone.files
        return alone, together

    return compare
