"""The same decorated script under the real launchers that there are; each run carries several statements."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parwrap.world.world import launch_variables

ROOT = Path(__file__).parents[2]
WITHIN = 120
"""Seconds, far above what any of these takes."""

SCRIPT = """
import json, os, sys
import psutil, torch, parwrap
from parwrap.group.group import current

def listening():
    return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}

hook = sys.excepthook
before = listening()  # a launcher may leave its own open to its ranks

@parwrap.distributed(seed=1)
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(24, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print("trained")
    facts = {"weights": model.weight.flatten().tolist(), "world": [parwrap.rank(), parwrap.world_size(), parwrap.local_rank()]}
    if current() is not None:
        world = current().world
        facts |= {"node": [world.local_size, world.node_rank], "hosts": sorted({each.ip for each in listening() - before})}
    return facts

first, second = train(), train()
assert first["weights"] == second["weights"]
assert sys.excepthook is hook
with open(os.path.join(sys.argv[1], str(first["world"][0])), "w") as file:
    json.dump(first, file)
"""


@pytest.fixture
def launched(tmp_path):
    """Run the script by a command and give what its ranks say; called without a wait it gives the process."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in (*launch_variables(), "GLOO_SOCKET_IFNAME")}
    environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}

    def run(*commands: list[str]) -> list[list[dict]]:
        started = []
        for number, command in enumerate(commands):
            (tmp_path / str(number)).mkdir()
            command = [*command, str(script), str(tmp_path / str(number))]
            started.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for process in started:
            output, errors = process.communicate(timeout=WITHIN)
            assert (0, "trained\ntrained\n") == (process.returncode, output), errors
            assert 2 == errors.count("parwrap: 2 ranks, gloo on cpu, ddp, batch 4 per rank, 8 global")
        assert [] == [name for each in temporary.glob("parwrap-*") for name in os.listdir(each)]
        folders = [tmp_path / str(number) for number in range(len(commands))]
        return [[json.loads((folder / str(rank)).read_text()) for rank in range(2)] for folder in folders]

    return run


def mpirun() -> list[str]:
    program = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if program is None or "open-mpi.org" not in subprocess.run([program, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("needs mpirun, of Debian's openmpi-bin")
    return [program, "--allow-run-as-root", "--oversubscribe"]


def hydra() -> list[str]:
    program = shutil.which("mpiexec.hydra")
    if program is None:
        pytest.skip("needs mpiexec.hydra, of Debian's mpich")
    return [program]


def by_hand(variables: str) -> list[str]:
    """Two ranks that a shell starts, with their number as ``$rank``."""
    return ["sh", "-c", f'for rank in 0 1; do {variables} "$@" & done; wait', "sh", sys.executable]


OURS = "PARWRAP_RANK=$rank PARWRAP_WORLD_SIZE=2 PARWRAP_LOCAL_RANK=$rank PARWRAP_LOCAL_WORLD_SIZE=2"
SLURMS = (
    "SLURM_JOB_ID=$$ SLURM_STEP_ID=3 SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST='localhost,elsewhere[1-4]'"
)


@pytest.fixture(scope="module")
def alike():
    """The weights that the first launcher of them has come to: all come to the same."""
    return {}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(lambda: by_hand(OURS), marks=pytest.mark.slow),
        lambda: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        lambda: [sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", "--plain"],
        lambda: [*mpirun(), "-n", "2", sys.executable],
        lambda: [*hydra(), "-n", "2", "sh", "-c", '"$@"; exit', "sh", sys.executable],
        pytest.param(
            lambda: [*mpirun(), "-n", "1", sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", "--plain"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["by hand", "torchrun", "parwrap.run", "Open MPI", "MPICH with a shell around each rank", "parwrap.run in Open MPI"],
)
def test_a_decorated_script_does_the_same_under_every_launcher(launched, alike, command):
    (ranks,) = launched(command())

    assert [[0, 2, 0], [1, 2, 1]] == [rank["world"] for rank in ranks]
    assert [[2, 0]] * 2 == [rank["node"] for rank in ranks]
    assert ranks[0]["weights"] == ranks[1]["weights"] == alike.setdefault("weights", ranks[0]["weights"])
    assert [["127.0.0.1"]] == [ranks[1]["hosts"]]


def test_ranks_of_two_nodes_meet_on_the_first_of_a_step(launched, alike):
    """Both are this machine: a mock of the second node, which must not be mistaken for it."""
    (ranks,) = launched(by_hand(SLURMS))

    assert [[0, 2, 0], [1, 2, 0]] == [rank["world"] for rank in ranks]
    assert [[1, 0], [1, 1]] == [rank["node"] for rank in ranks]
    assert ranks[0]["weights"] == ranks[1]["weights"] == alike.setdefault("weights", ranks[0]["weights"])


def test_two_jobs_at_once_each_find_their_own_ranks(launched):
    command = [*hydra(), "-n", "2", sys.executable]
    jobs = launched(command, command)

    assert 1 == len({tuple(rank["weights"]) for job in jobs for rank in job})


def test_a_plain_script_under_mpirun_runs_inside_the_scope_as_a_rank(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import os, parwrap\nprint(parwrap.rank(), parwrap.world_size(), os.environ.get('OMPI_COMM_WORLD_RANK'), force=True)")
    command = [*mpirun(), "-n", "2", sys.executable, "-m", "parwrap.run", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WITHIN)

    assert (0, ["0 2 None", "1 2 None"]) == (ended.returncode, sorted(ended.stdout.splitlines())), ended.stderr
