"""What a command line with ``--launcher`` asks for, in tables; nothing is started."""

import os

import pytest

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.job_launchers import HOMES
from parwrap.launching.jobs import Job, requested_job
from parwrap.launching.plan import plan_launch
from parwrap.run import main


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def job(*argv: str) -> Job:
    asked = requested_job(argv, {}, cores=8)
    assert asked
    return asked


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["--launcher", "slurm", "train.py"], ["train.py"]),
        (["--launcher=slurm", "--nodes", "2", "train.py", "--nodes", "3"], ["train.py", "--nodes", "3"]),
        (["--nodes=2", "--seed", "1", "--launcher", "slurm", "--batch=global", "train.py"], ["--seed", "1", "--batch=global", "train.py"]),
        (["--launcher", "slurm", "--plain", "-m", "json", "--launcher", "slurm"], ["--plain", "-m", "json", "--launcher", "slurm"]),
        (["--launcher", "slurm", "--gpus-per-node", "4", "train.py"], ["--nproc-per-node", "4", "train.py"]),
        (["--launcher", "slurm", "--gpus-per-node=4", "--nproc-per-node=2", "train.py"], ["--nproc-per-node=2", "train.py"]),
        (["--launcher", "slurm", "--amp", "bf16", "train.py", "--amp"], ["--amp", "bf16", "train.py", "--amp"]),
        (["--launcher", "slurm", "--dry-run", "-r", "3", "train.py", "--dry-run"], ["-r", "3", "train.py", "--dry-run"]),
        (["--launcher", "kubeflow", "--name", "n", "not_here.py"], ["not_here.py"]),
        (["--launcher", "ray", "--num-workers", "2", "--use-gpu", "train.py"], ["--nproc-per-node", "1", "train.py"]),
    ],
)
def test_what_each_node_runs(argv, command):
    assert tuple(command) == job(*argv).command


def test_what_a_launcher_gets():
    given = job("--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "8", "--max-restarts", "3", "--partition", "p", "train.py")

    assert (given.launcher, given.nodes, given.gpus_per_node, given.ranks_per_node) == ("slurm", 2, 8, "8")
    assert (given.max_restarts, given.plan.script.target, given.dry_run, given.options.partition) == (3, "train.py", False, "p")


@pytest.mark.parametrize("name", ["pytorch", *HOMES])
def test_a_launcher_of_the_script_is_left_to_it(name):
    argv = ["--nproc-per-node", "2", "train.py", "--launcher", name, "--nodes", "2"]

    assert requested_job(argv, {}, cores=8) is None
    assert ("--launcher", name, "--nodes", "2") == plan_launch(argv, {}, 0, 8).script.args


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--launcher", "slrum", "--partition", "p", "train.py"],
            "there is no launcher slrum. Did you mean slurm? The launchers are slurm, kubeflow and ray.",
        ),
        (["--launcher", "mpi", "train.py"], "there is no launcher mpi. The launchers are slurm, kubeflow and ray."),
        (["--launcher"], "argument --launcher: expected one argument"),
        (
            ["--launcher", "slurm"],
            "no script to run: put its path after the options of parwrap run, followed by the script's own arguments.",
        ),
        (
            ["--launcher", "slurm", "--image=i", "train.py"],
            "--image=i is an option of --launcher kubeflow, not of slurm: remove it, or choose that launcher.",
        ),
        (
            ["--launcher", "slurm", "--partitoin", "p", "train.py"],
            "there is no option --partitoin; did you mean --partition? "
            "The script's own options come after its name: `parwrap run --launcher slurm train.py --partitoin p`",
        ),
        (["--launcher", "slurm", "--nodes", "0", "train.py"], "argument --nodes: '0' is not a positive integer."),
        (
            ["--launcher", "slurm", "--nnodes", "2", "train.py"],
            "--nnodes is set by --launcher slurm, which connects the nodes: set their number with --nodes N.",
        ),
        (
            ["--launcher", "ray", "--nnodes", "2", "train.py"],
            "--nnodes is set by --launcher ray, which connects the nodes: set their number with --num-workers N.",
        ),
        (
            ["--launcher", "ray", "--nodes", "2", "train.py"],
            "--nodes is an option of --launcher slurm and kubeflow, not of ray: remove it, or choose that launcher.",
        ),
        (
            ["--launcher", "slurm", "--node-rank", "0", "train.py"],
            "--node-rank is set by --launcher slurm, which connects the nodes: remove it.",
        ),
        (
            ["--launcher", "slurm", "--rdzv-backend=c10d", "train.py"],
            "--rdzv-backend is set by --launcher slurm, which connects the nodes: remove it.",
        ),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_submitted(argv, text):
    with pytest.raises(UsageError) as refusal:
        job(*argv)

    assert text == str(refusal.value)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["no.py"], "cannot find the script no.py in HERE. Correct the path, or change to the directory it is relative to."),
        (
            ["--gpus-per-node", "2", "--nproc-per-node", "4", "train.py"],
            "4 ranks are more than the GPUs that torch can use on this node (2). Set --nproc-per-node to at most 2, or use --backend gloo "
            "to let ranks share GPUs.",
        ),
    ],
)
def test_what_no_node_can_do_is_said_before_anything_is_submitted(argv, text):
    with pytest.raises(LaunchError) as refusal:
        job("--launcher", "slurm", *argv)

    assert text.replace("HERE", os.getcwd()) == str(refusal.value)


def test_only_a_node_can_know_how_many_gpus_it_has():
    assert "gpu" == job("--launcher", "slurm", "--nproc-per-node", "gpu", "train.py").ranks_per_node


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--partition", "p", "train.py"],
            "--partition is an option of --launcher slurm: add the launcher, or remove --partition. "
            "The script's own options come after its name: `parwrap run train.py --partition p`",
        ),
        (
            ["--nodes=2", "train.py"],
            "--nodes is an option of --launcher slurm and kubeflow: add the launcher, or remove --nodes. "
            "The script's own options come after its name: `parwrap run train.py --nodes=2`",
        ),
        (["--launch", "slurm", "train.py"], "--launcher must be written in full, not abbreviated."),
    ],
)
def test_options_of_launchers_without_one(argv, text):
    with pytest.raises(UsageError) as refusal:
        plan_launch(argv, {}, 0, 8)

    assert text == str(refusal.value)


@pytest.mark.parametrize("name", HOMES)
def test_help_lists_the_options_of_the_launcher(name, capsys):
    with pytest.raises(SystemExit):
        main(["--launcher", name, "--help"])
    given = capsys.readouterr().out

    assert f"--launcher {name}:" in given
    assert ("--gpus-per-node" in given) is (name != "ray")
    assert ("--partition" in given) is (name == "slurm")


def test_errors_end_the_command_with_2(capsys):
    assert 2 == main(["--launcher", "slurm", "--nodes", "none", "train.py"])
    assert "parwrap run: argument --nodes: 'none' is not a positive integer.\n" == capsys.readouterr().err
