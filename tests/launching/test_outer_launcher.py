"""What another launcher, which has started the command, says of the nodes and ranks."""

import pytest

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.plan import describe
from planning import plan

pytestmark = pytest.mark.usefixtures("scripts")


KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TRAINER = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0-0", "PET_MASTER_PORT": "29500"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "4"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
ONE_A_NODE = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_PORT": "7000"}
TWO_A_NODE = {**STEP, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "MASTER_PORT": "7000"}


@pytest.mark.parametrize(
    ("argv", "environ", "gpus", "said"),
    [
        ([], KUBEFLOW, 8, ("8 ranks on each of 2 nodes", "static at job-master-0:23456", 1)),
        ([], KUBEFLOW, 0, ("1 rank on each of 2 nodes", "static at job-master-0:23456", 1)),
        ([], {**KUBEFLOW, "NPROC_PER_NODE": "3"}, 8, ("3 ranks on each of 2 nodes", "static at job-master-0:23456", 1)),
        ([], {**KUBEFLOW, "PET_NNODES": "4"}, 0, ("1 rank on each of 4 nodes", "static at job-master-0:23456", 1)),
        (
            ["--nproc-per-node=2", "--node-rank=0", "--master-addr=here", "--master-port=5"],
            KUBEFLOW,
            8,
            ("2 ranks on each of 2 nodes", "static at here:5", 0),
        ),
        (["--nnodes", "1"], {**KUBEFLOW, "NPROC_PER_NODE": "2"}, 0, ("2 ranks on 1 node", "in a private folder of this machine", 0)),
        (["--standalone"], {**KUBEFLOW, "NPROC_PER_NODE": "2"}, 8, ("8 ranks on 1 node", "in a private folder of this machine", 0)),
        ([], {"RANK": "0", "WORLD_SIZE": "1", "NPROC_PER_NODE": "2"}, 0, ("2 ranks on 1 node", "in a private folder of this machine", 0)),
        ([], TRAINER, 0, ("4 ranks on each of 2 nodes", "static at job-0-0:29500", 1)),
        ([], SAGEMAKER, 4, ("4 ranks on each of 2 nodes", "static at algo-1:7777", 1)),
        ([], {**SAGEMAKER, "SM_NUM_GPUS": "0"}, 0, ("1 rank on each of 2 nodes", "static at algo-1:7777", 1)),
        ([], ONE_A_NODE, 4, ("4 ranks on each of 2 nodes", "static at n1:7000", 1)),
        (["--nproc-per-node", "2"], ONE_A_NODE, 0, ("2 ranks on each of 2 nodes", "static at n1:7000", 1)),
        (["--nnodes", "2", "--nproc-per-node", "2"], ONE_A_NODE, 0, ("2 ranks on each of 2 nodes", "static at n1:7000", 1)),
        (["--nproc-per-node", "2"], {**ONE_A_NODE, "MASTER_ADDR": "n9"}, 0, ("2 ranks on each of 2 nodes", "static at n9:7000", 1)),
        (["--nproc-per-node", "2", "--standalone"], TWO_A_NODE, 0, ("2 ranks on 1 node", "in a private folder of this machine", 0)),
    ],
)
def test_a_launcher_that_starts_a_process_on_each_node_tells_which(argv, environ, gpus, said):
    started = plan(*argv, "train.py", gpus=gpus, **environ)
    many, rendezvous, node_rank = said

    assert f"ranks      {many}" in describe(started)
    assert rendezvous in describe(started)
    assert (node_rank, None) == (started.torchrun.node_rank, started.outer)


@pytest.mark.parametrize(
    ("environ", "gpus", "said"),
    [
        (ONE_A_NODE, 1, "rank 1 of 2, started by SLURM"),
        (TWO_A_NODE, 8, "rank 2 of 4, started by SLURM"),
        ({"PARWRAP_WORLD_SIZE": "1", **KUBEFLOW}, 8, "rank 0 of 1, started by PARWRAP_*"),
        ({**KUBEFLOW, "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "7"}, 8, "rank 1 of 2, started by torchrun"),
    ],
)
def test_a_process_that_a_launcher_has_started_as_a_rank_is_one(environ, gpus, said):
    started = plan("train.py", gpus=gpus, **environ)

    assert started.in_this_process
    assert f"ranks      {said}" in describe(started)


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (
            ["--nproc-per-node", "2"],
            TWO_A_NODE,
            "--nproc-per-node 2 would start ranks here, but SLURM started this process as rank 2 of 4. Remove --nproc-per-node, "
            "start one process per node, or add",
        ),
        (["--nproc-per-node", "2"], {"PARWRAP_WORLD_SIZE": "1"}, r"PARWRAP_\* started this process as rank 0 of 1"),
        (
            ["--plain"],
            TWO_A_NODE,
            "SLURM started this process as rank 2 of 4, but only a parwrap run that starts ranks can use --plain: remove --plain, or add",
        ),
        (["--max-restarts", "2"], TWO_A_NODE, "only a parwrap run that starts ranks can use --max-restarts: remove --max-restarts, or add"),
    ],
)
def test_a_rank_starts_no_ranks(argv, environ, text):
    with pytest.raises(UsageError, match=text):
        plan(*argv, "train.py", **environ)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({**KUBEFLOW, "RANK": "one"}, "the environment sets --node-rank to 'one', which is not an integer: correct the variable"),
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE and LOCAL_RANK are not"),
    ],
)
def test_what_launchers_tell_must_make_sense(environ, text):
    with pytest.raises(LaunchError, match=text):
        plan("train.py", **environ)
