"""The GPUs, as torch finds them in a child process: CUDA must not start in a process that forks or hides GPUs, and may hang."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from parwrap.doctor.facts import Gpu, Gpus

__all__ = ["find_gpus"]

PATIENCE = 30
"""Seconds for a driver to answer."""


def find_gpus(environ: Mapping[str, str]) -> Gpus:
    """The GPUs that this process would see with the environment variables ``environ``."""
    answer: dict[str, Any] = {}
    if torch.version.cuda or getattr(torch.version, "hip", None):
        answer = _asked()
    return Gpus(
        **answer,
        present=_is_present(),
        driver=_driver(),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        topology=_topology() if len(answer.get("seen", [])) > 1 else None,
    )


def _asked() -> dict[str, Any]:
    """Torch's answer from a child process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs,), daemon=True)
    with theirs:
        process.start()
    try:
        if not ours.poll(PATIENCE):
            return {"error": f"the driver does not answer in {PATIENCE} s"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"error": f"the process that started CUDA ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join(1)
        ours.close()


def _tell(answer: Connection) -> None:
    try:
        torch.cuda.init()
        numbers = range(torch.cuda.device_count())
        properties = [torch.cuda.get_device_properties(number) for number in numbers]
        apart = [(one, other) for one, other in combinations(numbers, 2) if not torch.cuda.can_device_access_peer(one, other)]
        answer.send({"seen": [Gpu(each.name, each.total_memory) for each in properties], "apart": apart})
    except Exception as error:
        answer.send({"error": str(error).strip().partition("\n")[0]})


def _is_present() -> bool:
    """Whether an NVIDIA display controller is on the bus."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            if (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
    return False


def _driver() -> str | None:
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else "of an unknown version"
    return None


def _topology() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=PATIENCE, check=True)
        return re.sub(r"\x1b\[\d*m", "", told.stdout).partition("\n\nLegend")[0].strip("\n")  # underlined in a terminal
    return None
