"""The variables of every launcher, in made-up environments: complete, partial, and contradictory."""

import ast
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parwrap.errors import LaunchError
from parwrap.ranks.group import opened
from parwrap.ranks.launchers import LAUNCHERS, NODE_LAUNCHERS
from parwrap.ranks.world import INIT_METHOD, PORTS, World, detect, launch_variables

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
TORCHRUN = {**TORCH, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "727515137",
}
TWO_NODES = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PALS_APID": "a1", "PMI_RANK": "5", "PMI_SIZE": "8"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "LSB_JOBID": "77",
    "LSB_MCPU_HOSTS": "batch1 1 h41n01 42 h41n02 42",
}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in [("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")]}
HOROVOD = {
    **{f"HOROVOD_{name}": value for name, value in [("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")]},
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
}
SLURM = {  # as srun -N 3 -n 8 --ntasks-per-node 3 sets them, for a task on the second node
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "bash",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_NODELIST": "gpu[01-20]",
}
ON_ONE_NODE = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"}
ONE_A_NODE = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
BATCH_SCRIPT = {name: value for name, value in {**SLURM, "SLURM_PROCID": "0"}.items() if "STEP" not in name}
INTERACTIVE = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PTY_PORT": "42169"}
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "2", **MASTER}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0",
    "PET_MASTER_PORT": "29500",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8", "SM_TRAINING_ENV": "{}"}
AZURE = {"AZUREML_EXPERIMENT_ID": "x", "NODE_RANK": "1"}


def port(environ: dict[str, str]) -> str:
    """The port at which the ranks of a job meet, if it is derived."""
    return detect(environ).init_method.rpartition(":")[2]


def job(named: str) -> str:
    """Where ranks of one node meet, from the name of their job."""
    return f"parwrap://job/{zlib.crc32(named.encode()):08x}"


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


SLURMS = World(4, 8, 4, 8, 0, "SLURM", job("SLURM_JOB_ID=1234/SLURM_STEP_ID=0"))


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World()),
        ({"HOME": "/", "MASTER_ADDR": "localhost"}, World()),
        (TORCHRUN, World(3, 4, 1, 2, 1, "torchrun")),
        (TORCH, World(3, 4, 1, 0, None, "torch.distributed")),
        ({**TORCH, "GROUP_WORLD_SIZE": "1"}, World(3, 4, 1, 4, 0, "torch.distributed")),
        ({**TORCH, "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0", "ACCELERATE_TORCH_DEVICE": "cpu"}, World(3, 4, 1, 4, 0, "Ray Train")),
        ({**TORCH, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}, World(3, 4, 1, 2, 1, "DeepSpeed")),
        ({**TORCH, **AZURE}, World(3, 4, 1, 0, 1, "Azure ML")),
        ({**TORCH, **AZURE, "AZUREML_NODE_COUNT": "1"}, World(3, 4, 1, 4, 0, "Azure ML")),
        ({**TORCH, **SAGEMAKER}, World(3, 4, 1, 0, None, "SageMaker")),
        ({**without(TORCH, "RANK"), "NODE_RANK": "0"}, World(1, 4, 1, 0, 0, "Lightning")),
        (HOROVOD, World(1, 2, 1, 2, 0, "Horovod", "parwrap://launcher/HOROVOD_RANK,HOROVOD_SIZE")),
        (OPEN_MPI, World(1, 4, 1, 4, 0, "Open MPI", job("PMIX_NAMESPACE=727515137"))),
        ({**OPEN_MPI, **TWO_NODES, **MASTER}, World(1, 4, 1, 2, None, "Open MPI")),
        (
            {**OPEN_MPI, **TWO_NODES, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "MASTER_PORT": "7000"},
            World(1, 4, 1, 2, None, "Open MPI", "tcp://10.0.0.4:7000"),
        ),
        ({**OPEN_MPI, **TWO_NODES, **SAGEMAKER, "MASTER_PORT": "7000"}, World(1, 4, 1, 2, None, "Open MPI", "tcp://algo-1:7000")),
        (MPICH, World(1, 4, 1, 4, 0, "MPICH or Intel MPI", "parwrap://launcher/PMI_RANK,PMI_SIZE")),
        (MVAPICH, World(1, 2, 1, 2, 0, "MVAPICH2", "parwrap://launcher/MV2_COMM_WORLD_RANK,MV2_COMM_WORLD_SIZE")),
        ({**PALS, **MASTER}, World(5, 8, 1, 0, 1, "Cray PALS")),
        ({**PALS, **MASTER, "PMI_LOCAL_SIZE": "4"}, World(5, 8, 1, 4, 1, "Cray PALS")),
        ({**JSRUN, "MASTER_PORT": "7000"}, World(7, 12, 1, 0, None, "LSF jsrun", "tcp://h41n01:7000")),
        ({**JSRUN, "LSB_MCPU_HOSTS": "", "LSB_HOSTS": "a b b c", "MASTER_PORT": "1"}, World(7, 12, 1, 0, None, "LSF jsrun", "tcp://b:1")),
        (
            {**JSRUN, **{name.replace("JSM_NAMESPACE", "OMPI_COMM_WORLD"): value for name, value in JSRUN.items()}, "MASTER_PORT": "7000"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "6"},
            World(7, 12, 1, 6, None, "LSF jsrun", "tcp://h41n01:7000"),
        ),
        ({**SLURM, "MASTER_PORT": "7000"}, World(4, 8, 1, 3, 1, "SLURM", "tcp://gpu07:7000")),
        ({**SLURM, **MASTER}, World(4, 8, 1, 3, 1, "SLURM")),
        ({**without(SLURM, "SLURM_STEP_NODELIST"), "MASTER_PORT": "7"}, World(4, 8, 1, 3, 1, "SLURM", "tcp://gpu01:7")),
        ({**SLURM, "MASTER_ADDR": "fd00::2", "MASTER_PORT": ""}, World(4, 8, 1, 3, 1, "SLURM", f"tcp://[fd00::2]:{port(SLURM)}")),
        ({**SLURM, "MASTER_ADDR": "[fd00::2]"}, World(4, 8, 1, 3, 1, "SLURM", f"tcp://[fd00::2]:{port(SLURM)}")),
        ({**SLURM, **ON_ONE_NODE}, SLURMS),
        (
            without({**SLURM, **ON_ONE_NODE}, "SLURM_STEP_TASKS_PER_NODE"),
            SLURMS,
        ),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, World(launcher="SLURM")),  # salloc's shell
        (BATCH_SCRIPT, World()),
        (INTERACTIVE, World()),
        (
            {**SLURM, **ON_ONE_NODE, "PMI_RANK": "4", "PMI_SIZE": "8"},
            SLURMS,
        ),  # --mpi=pmi2
        ({"PARWRAP_RANK": "1", "PARWRAP_WORLD_SIZE": "2", "PARWRAP_LOCAL_RANK": "1", **MASTER}, World(1, 2, 1, 0, None, "PARWRAP_*")),
        (
            {"PARWRAP_RANK": "1", "PARWRAP_WORLD_SIZE": "2", "PARWRAP_LOCAL_RANK": "1", "PARWRAP_LOCAL_WORLD_SIZE": "2"},
            World(1, 2, 1, 2, 0, "PARWRAP_*", "parwrap://launcher/PARWRAP_RANK,PARWRAP_WORLD_SIZE"),
        ),
        ({**KUBEFLOW, "RANK": "0", "WORLD_SIZE": "1"}, World(launcher="torch.distributed")),
    ],
)
def test_each_launcher_is_detected(environ, world):
    assert world == detect(environ)


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, SLURM, KUBEFLOW, TRAINER, {"RANK": "x"}], ids=lambda environ: min(environ))
def test_the_users_own_variables_come_before_any_launchers(environ):
    assert World(launcher="PARWRAP_*") == detect({**environ, "PARWRAP_WORLD_SIZE": "1"})
    ours = {"PARWRAP_RANK": "5", "PARWRAP_WORLD_SIZE": "6", "PARWRAP_LOCAL_RANK": "0", INIT_METHOD: "file:///somewhere"}
    assert World(5, 6, 0, 0, None, "PARWRAP_*", "file:///somewhere") == detect({**environ, **ours})


def test_the_rendezvous_can_be_set_for_any_launcher():
    for environ in (TORCHRUN, OPEN_MPI, SLURM):
        assert "file:///somewhere" == detect({**environ, INIT_METHOD: "file:///somewhere"}).init_method


INSIDE = [  # the launcher of the process, and the launcher of that one
    (TORCHRUN, {**SLURM, **ONE_A_NODE}, "torchrun"),
    (TORCHRUN, SLURM, "torchrun"),  # a run of its own in each task
    (TORCHRUN, OPEN_MPI, "torchrun"),
    ({**TORCH, "CROSS_SIZE": "2"}, {**SLURM, **ONE_A_NODE}, "DeepSpeed"),
    ({**TORCH, "CROSS_SIZE": "2"}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "DeepSpeed"),
    (OPEN_MPI, {**SLURM, **ONE_A_NODE}, "Open MPI"),  # mpirun starts its daemons by srun
    (MPICH, {**SLURM, **ONE_A_NODE}, "MPICH or Intel MPI"),
    (OPEN_MPI, BATCH_SCRIPT, "Open MPI"),
    (OPEN_MPI, {**KUBEFLOW, "RANK": "0", "WORLD_SIZE": "1"}, "Open MPI"),
    ({**TORCH, "RANK": "4", "WORLD_SIZE": "8"}, SLURM, "torch.distributed"),  # exported from SLURM's, which says the same
    (SLURM, {"WORLD_SIZE": "8"}, "SLURM"),
    (SLURM, {"RANK": "4", "WORLD_SIZE": "8"}, "SLURM"),
]


@pytest.mark.parametrize(("inner", "outer", "launcher"), INSIDE)
def test_the_inner_of_two_launchers_counts(inner, outer, launcher):
    assert launcher == detect({**outer, **inner}).launcher


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {**SLURM, **TORCH, "RANK": "1", "WORLD_SIZE": "2"},
            r"two launchers disagree about this process: torch.distributed says RANK=1 and WORLD_SIZE=2, but SLURM says SLURM_PROCID=4 "
            r"and SLURM_STEP_NUM_TASKS=8. Unset the variables of the wrong one, or set PARWRAP_RANK, PARWRAP_WORLD_SIZE and",
        ),
        ({**SLURM, "WORLD_SIZE": "2"}, "disagree .* SLURM says SLURM_PROCID=4 .* but torch.distributed says WORLD_SIZE=2. Unset"),
        ({**SLURM, **TORCH, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "disagree"),
        ({**SLURM, **ONE_A_NODE, **TORCH, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "disagree"),
        ({**SLURM, **OPEN_MPI}, "disagree .*: Open MPI says OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=4, but SLURM says"),
        ({**OPEN_MPI, **KUBEFLOW}, "disagree .*: Open MPI says .* but torch.distributed says RANK=1 and WORLD_SIZE=2"),
        ({**OPEN_MPI, **MPICH, "PMI_RANK": "2", "MPI_LOCALRANKID": "2"}, "disagree .*: Open MPI says .* but MPICH or Intel MPI says"),
    ],
)
def test_launchers_that_disagree_are_both_shown(environ, text):
    with pytest.raises(LaunchError, match=text):
        detect(environ)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"RANK": "0"},
            "^RANK is set but WORLD_SIZE and LOCAL_RANK are not, so the ranks cannot be identified. If no launcher started this process, "
            "unset RANK: the process then runs as one rank. To start several ranks, use `parwrap run`. Otherwise set WORLD_SIZE "
            "and LOCAL_RANK too, as torch.distributed does, or set PARWRAP_RANK, PARWRAP_WORLD_SIZE and PARWRAP_LOCAL_RANK to the right "
            "values, or PARWRAP_WORLD_SIZE=1 to run on one rank.$",
        ),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE and LOCAL_RANK are set but RANK is not"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "1"}, "WORLD_SIZE and LOCAL_RANK are set but RANK is not"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": ""}, "WORLD_SIZE and LOCAL_RANK are set but RANK is not"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not an integer"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4: ranks start at 0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not fit the 2 ranks of this node"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 does not fit"),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
            "LOCAL_WORLD_SIZE=9 ranks on this node are more than WORLD_SIZE=4 ranks in all. Correct one of the two, or set",
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 must be at least 1"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port: use a number from 1 to 65535"),
        ({**OPEN_MPI, **TWO_NODES, "SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a JSON list of names"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07"}, r"cannot parse the node list 'gpu\[07': it has an unmatched \["),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"},
            "cannot parse the list of tasks per node 'many': it has 'many', which is not a number",
        ),
        ({"PARWRAP_RANK": "1", **KUBEFLOW}, "PARWRAP_RANK is set but PARWRAP_WORLD_SIZE and PARWRAP_LOCAL_RANK are not"),
        ({"PARWRAP_RANK": "1", **TORCHRUN}, "Otherwise set PARWRAP_WORLD_SIZE and PARWRAP_LOCAL_RANK too.$"),
        (
            KUBEFLOW,
            "RANK=1 and WORLD_SIZE=2 number the nodes of a job .as Kubeflow or PAI does., not its ranks: start the ranks of this node "
            "with `parwrap run train.py`, which reads these variables, or set PARWRAP_RANK, PARWRAP_WORLD_SIZE and "
            "PARWRAP_LOCAL_RANK",
        ),
        (TRAINER, r"PET_NODE_RANK=1 and PET_NNODES=2 number the nodes of a job \(as Kubeflow Trainer"),
        ({**TRAINER, "PET_NNODES": "1:4"}, "PET_NODE_RANK=1 and PET_NNODES=1:4 number the nodes"),
        (SAGEMAKER, r"SM_CURRENT_HOST=algo-2 and SM_HOSTS=\[.*\] number the nodes of a job \(as SageMaker does\)"),
    ],
)
def test_half_set_or_senseless_variables_are_refused(environ, text):
    with pytest.raises(LaunchError, match=text):
        detect(environ)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [({**OPEN_MPI, **TWO_NODES}, "Open MPI"), (without(TORCHRUN, "MASTER_PORT"), "torchrun"), (PALS, "Cray PALS")],
)
def test_a_missing_rendezvous_is_an_error_when_the_group_opens(environ, launcher):
    world = detect(environ)
    text = (
        rf"{launcher} does not say where rank 0 of {world.size} can be reached, and MASTER_ADDR and MASTER_PORT are not both set: set .*"
        r"\(`mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`; with MPICH and Intel MPI `mpiexec -genv MASTER_ADDR ..."
    )
    with pytest.raises(LaunchError, match=text), opened(world):
        pass


@pytest.mark.parametrize("environ", [HOROVOD, JSRUN, OPEN_MPI, MVAPICH, MPICH, SLURM], ids=lambda environ: next(iter(environ)))
def test_a_missing_variable_is_named(environ):
    (row,) = (row for row in LAUNCHERS if row.name == detect({**environ, **MASTER}).launcher)
    for names in (row.rank, row.size, row.local_rank):
        with pytest.raises(LaunchError, match=f" are set but {names[0]} is not, so the ranks cannot be identified"):
            detect(without(environ, *names))


def test_ports_are_those_of_the_job_and_the_step():
    steps = [{**SLURM, "SLURM_STEP_ID": str(step), "SLURM_JOB_ID": str(job)} for step in range(4) for job in (1234, 1235, 99999)]

    assert all(int(port(step)) in PORTS for step in steps)
    assert len(steps) == len({port(step) for step in steps})
    assert port(SLURM) == port({**SLURM, "SLURM_PROCID": "5", "SLURM_LOCALID": "2", "SLURM_STEP_LAUNCHER_PORT": "1"})


def test_every_variable_that_shows_a_launch_is_listed():
    names = {name for environ in (TORCHRUN, OPEN_MPI, MPICH, PALS, MVAPICH, HOROVOD, JSRUN, KUBEFLOW, TRAINER) for name in environ}
    of_job = {"PMIX_RANK", "PMIX_NAMESPACE", "PMI_FD", "PALS_APID", "LSB_JOBID", "LSB_MCPU_HOSTS", "HOROVOD_CROSS_SIZE"}

    assert names - of_job | {INIT_METHOD, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= set(launch_variables())
    assert not (of_job | {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SM_HOSTS"}) & set(launch_variables())


@pytest.mark.parametrize("environ", [environ for inner, outer, _ in INSIDE for environ in [{**outer, **inner}]])
def test_without_launch_variables_a_process_is_the_only_rank(environ):
    assert World() == detect(without(environ, *launch_variables()))


def test_launchers_have_different_names():
    assert len(LAUNCHERS) == len({launcher.name for launcher in LAUNCHERS})


def all_names() -> list[str]:
    """Every variable that is written down in the files that read them."""
    package = Path(detect.__code__.co_filename).parent
    nodes = [node for name in ("launchers", "world", "node_lists") for node in ast.walk(ast.parse((package / f"{name}.py").read_text()))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(word for word in words if word.replace("_", "").isalnum() and word.isupper())


values = st.one_of(
    st.integers(-1, 9).map(str),
    st.sampled_from(["", "2(x3),1", "n[1-3]", "1:2", '["a", "b"]', "a 1 b 2", str(0xFFFFFFFA), "٣", "a", "[" * 9]),
    st.text("0123456789[](),-:/x \0\udce9é", max_size=8),
)


@given(st.dictionaries(st.sampled_from(all_names()), values))
def test_whatever_is_set_only_our_own_errors_come_out(environ):
    try:
        world = detect(environ)
    except LaunchError:
        return
    assert 0 <= world.rank < world.size
    assert 0 <= world.local_rank < (world.local_size or world.size) <= world.size


@given(st.data())
def test_whatever_part_of_launchers_is_set_only_our_own_errors_come_out(data):
    every = [TORCHRUN, OPEN_MPI, MPICH, PALS, JSRUN, MVAPICH, HOROVOD, SLURM, KUBEFLOW, TRAINER, SAGEMAKER]
    two = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=2))
    whole = {name: value for environ in two for name, value in environ.items()}
    part = data.draw(st.dictionaries(st.sampled_from(sorted(whole)), st.none()))
    text = "."
    try:
        detect(without(whole, *part))
    except LaunchError as error:
        text = str(error)
    assert text.endswith(".")


def test_node_launchers_are_hidden_too():
    assert {name for row in NODE_LAUNCHERS for name in row[1:]} <= set(launch_variables())
