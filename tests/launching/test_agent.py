"""Several nodes, which are all on this machine: what the agents of two ``parwrap run`` do together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHIN = 60
"""Seconds, far above what it takes."""


@pytest.fixture
def on_two_nodes(tmp_path):
    """Run a script on two nodes that meet by c10d; gives the exit code and output of each."""
    processes = []

    def run(source: str, *options: str) -> list[tuple[int, str]]:
        (tmp_path / "train.py").write_text(source)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1", "--local-addr", "127.0.0.1"]
        for is_host in (1, 0):
            command = [
                sys.executable,
                "-m",
                "parwrap.run",
                "--nnodes",
                "2",
                *meeting,
                "--rdzv-conf",
                f"is_host={is_host}",
                *options,
                "train.py",
            ]
            environ = {**os.environ, "PYTHONPATH": str(ROOT)}
            processes.append(
                subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        outputs = [process.communicate(timeout=WITHIN)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_when_a_rank_fails_on_one_node_the_ranks_of_all_start_again(on_two_nodes):
    """They must not find in the store what the first ones have left there, such as addresses."""
    ends = on_two_nodes(
        """
import os, sys, parwrap
first = not os.path.exists("started")
parwrap.barrier()
open("started", "w").close()
print("first" if first else "again", parwrap.reduce_sum(1.0))
if first and parwrap.rank() == 1:
    sys.exit(3)
parwrap.barrier()
""",
        *("--nproc-per-node", "1", "--max-restarts", "1"),
    )

    assert [0, 0] == [status for status, _ in ends], ends
    speaking = max(ends, key=lambda end: "first" in end[1])[1]
    assert ["first 2.0", "again 2.0"] == [line for line in speaking.splitlines() if line.endswith("2.0")]
