"""A command line that cannot be carried out is refused, with what to do."""

import os

import pytest

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.agent import _config
from planning import plan

pytestmark = pytest.mark.usefixtures("scripts")

BEHIND = "The script's own options come after its name: `parwrap run"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--sed", "1", "train.py"],
            f"there is no option --sed; did you mean --seed? {BEHIND} train.py --sed 1`",
        ),
        (
            ["--seed", "1", "--batch-size", "32", "--fast", "-m", "recipes.digits", "--lr", "0.1"],
            f"there is no option --batch-size; did you mean --batch? {BEHIND} --seed 1 -m recipes.digits --batch-size 32 --fast --lr 0.1`",
        ),
        (
            ["--nproc-per-node=2", "--batsh=global", "train.py"],
            f"there is no option --batsh; did you mean --batch? {BEHIND} --nproc-per-node=2 train.py --batsh=global`",
        ),
        (
            ["--xyzzy", "train.py"],
            f"there is no option --xyzzy; `parwrap run --help-all` lists the options. {BEHIND} train.py --xyzzy`",
        ),
        ([], "no script to run: put its path after the options of parwrap run, followed by the script's own arguments."),
        (["--seed", "one", "train.py"], "argument --seed: 'one' is not an integer."),
        (["--seed", "-1", "train.py"], "seed=-1 is not an integer from 0 to 2**64 - 1. Your script's own options go after its name."),
        (["--timeout", "soon", "train.py"], "argument --timeout: 'soon' is not a number."),
        (["--max-restarts", "x", "train.py"], "argument --max-restarts/--max_restarts: invalid int value: 'x'"),
        (
            ["--nproc-per-node", "0", "train.py"],
            "--nproc-per-node 0 is not a positive number of ranks, nor gpu (0 here), cpu (8 here), auto (8 here).",
        ),
        (
            ["--nproc-per-node", "two", "train.py"],
            "--nproc-per-node two is not a positive number of ranks, nor gpu (0 here), cpu (8 here), auto (8 here).",
        ),
        (["--nnodes", "a:b", "train.py"], "--nnodes a:b is not a positive number of nodes, nor MIN:MAX for a job that can grow."),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master-addr", "there", "train.py"],
            "--node-rank 2 does not fit --nnodes 2: node ranks start at 0, and the last is 1.",
        ),
        *(
            (
                ["--nnodes", "2", *options, "train.py"],
                "--nnodes 2 needs a rendezvous: on every node, set --master-addr to the address of the first node, and --node-rank to a "
                "different number, starting from 0. Or set the same --rdzv-endpoint HOST:PORT on every node, with HOST any one of them.",
            )
            for options in ([], ["--node-rank", "1"], ["--master-port", "29501"])
        ),
        *(
            (
                ["--nnodes", "2", "--rdzv-backend", "c10d", *options, "train.py"],
                "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, with HOST any one of the nodes: set the same value on all nodes.",
            )
            for options in ([], ["--master-addr", "there"])
        ),
        (["--node-rank", "1", "train.py"], "--node-rank 1 does not fit --nnodes 1: node ranks start at 0, and the last is 0."),
        (["--node-rank", "-1", "train.py"], "--node-rank -1 does not fit --nnodes 1: node ranks start at 0, and the last is 0."),
        (
            ["--bogus", "train"],
            "there is no option --bogus; `parwrap run --help-all` lists the options. The script's own options come after its name.",
        ),
        (["--nprocs", "2", "train.py"], f"there is no option --nprocs; did you mean --nproc-per-node? {BEHIND} train.py --nprocs 2`"),
        (["-np", "2", "train.py"], f"there is no option -np; did you mean --nproc-per-node? {BEHIND} train.py -np 2`"),
        (["--nnodes", "3:2", "train.py"], "--nnodes 3:2 is not a positive number of nodes, nor MIN:MAX for a job that can grow."),
        (
            ["--nnodes", "1:2", "--master-addr", "there", "train.py"],
            "--nnodes 1:2 lets nodes join and leave, which --master-addr does not allow: use --rdzv-endpoint HOST:PORT.",
        ),
        (
            ["--nproc-per-node", "2", "--local-ranks-filter", "1", "train.py"],
            "--local-ranks-filter 1 shows ranks that print nothing, because only rank 0 does: add --log-dir DIR instead, for a file of "
            "what each rank prints.",
        ),
        (["--monitor-interval", "-1", "train.py"], "--monitor-interval -1 is not a positive number of seconds: pass a number above 0."),
        (
            ["--all-ranks", "--tee", "3", "train.py"],
            "--all-ranks and --tee control what ranks print in different ways: remove --all-ranks or --tee.",
        ),
        (
            ["--standalone", "--nnodes", "2", "train.py"],
            "--standalone is for one node, but --nnodes 2 asks for more: remove one of the two.",
        ),
        (
            ["--plain", "--seed", "1", "--bucket-cap-mb", "5", "train.py"],
            "--plain does not change how a script trains, so it cannot be combined with --seed, --bucket-cap-mb: remove --seed, "
            "--bucket-cap-mb, or --plain.",
        ),
        (
            ["--backend", "gloo", "-m", "parwrap.doctor"],
            "parwrap.doctor does not change how a script trains, so it cannot be combined with --backend: remove --backend.",
        ),
        (
            ["--lr", "0.1", "train.py"],
            "lr='0.1' is not a valid value. Choose one of: 'keep': learning rates are unchanged; 'linear': they are multiplied by the "
            "number of ranks, like the global batch; 'sqrt': they are multiplied by the square root of the number of ranks. Your "
            "script's own options go after its name.",
        ),
        (
            ["--no", "train.py"],
            "--no is ambiguous: it may mean --no-defaults, --no-gather, --no-python or --node-rank. Write it in full. Your script's "
            "own options go after its name.",
        ),
        (["--no-python", "-m", "ls"], "--no-python runs a program, and --module runs a Python module: remove one of them."),
        (
            ["--no-python", "ls"],
            "--no-python runs a program that is not Python, so parwrap cannot change anything in it: add --plain to only launch it.",
        ),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(argv, text):
    with pytest.raises(UsageError) as refusal:
        plan(*argv)

    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("argv", "gpus", "text"),
    [
        (
            ["no/such.py"],
            0,
            "cannot find the script no/such.py in HERE. Correct the path, or change to the directory it is relative to.",
        ),
        (["/no/such.py"], 0, "cannot find the script /no/such.py. Correct the path."),
        (["."], 0, ". is a directory without a __main__.py, so it cannot run: pass the path of a script in it."),
        (
            ["recipes.digits"],
            0,
            "cannot find the script recipes.digits in HERE. Correct the path, or change to the directory it is relative to. To run "
            "a module, put -m before its name.",
        ),
        (
            ["-m", "no.such"],
            0,
            "cannot find the module no.such, neither in the current directory nor among the installed packages: change to the directory "
            "that contains the module, or install it.",
        ),
        (["--plain", "--no-python", "no-such"], 0, "cannot find the program no-such: pass its path, or the name of a program on the PATH."),
        (
            ["--nproc-per-node", "gpu", "train.py"],
            0,
            "--nproc-per-node gpu starts a rank on each GPU, but torch cannot use a GPU here: set a number of ranks to train on the CPU.",
        ),
        (
            ["--nproc-per-node", "3", "--nnodes", "2", "--rdzv-endpoint", "first:29400", "train.py"],  # nodes may have unlike GPUs
            2,
            "3 ranks are more than the GPUs that torch can use on this node (2). Set --nproc-per-node to at most 2, or use --backend gloo "
            "to let ranks share GPUs.",
        ),
    ],
)
def test_what_is_not_there_is_named(argv, gpus, text):
    with pytest.raises(LaunchError) as refusal:
        plan(*argv, gpus=gpus)

    assert str(refusal.value) == text.replace("HERE", os.getcwd())


def test_variables_that_another_tool_has_left_are_named():
    with pytest.raises(LaunchError) as refusal:
        plan("train.py", RANK="0", WORLD_SIZE="4")

    assert str(refusal.value) == (
        "RANK=0 and WORLD_SIZE=4 in the environment make this one of 4 nodes, but do not say where the first node can be reached. If "
        "another tool has left these variables, unset them. Otherwise set MASTER_ADDR to the address of the first node, on all nodes."
    )
    with pytest.raises(UsageError, match="--nnodes 2 needs a rendezvous"):
        plan("--nnodes", "2", "train.py", RANK="0", WORLD_SIZE="4")


def test_options_of_the_scope_are_checked_by_the_scope():
    with pytest.raises(UsageError, match="batch='globe' is not a valid value"):
        plan("--batch", "globe", "train.py")


def test_other_decorators_are_checked_by_themselves():
    with pytest.raises(UsageError, match="dtype='fp8' is not a dtype for mixed precision: use"):
        plan("--amp", "fp8", "train.py")
    with pytest.raises(UsageError, match=r"accumulate\(steps=0\): steps must be a positive integer"):
        plan("--accumulate", "0", "train.py")
    with pytest.raises(UsageError, match=r"--plain does not change how a script trains, .* combined with --amp: remove --amp, or --plain"):
        plan("--plain", "--amp", "bf16", "train.py")
    with pytest.raises(UsageError, match="--pad-value has no effect without --uniform-length: add it"):
        plan("--pad-value", "0", "train.py")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            ["--nproc-per-node", "2"],
            "--data-parallel runs one process on several devices, but --nproc-per-node or --nnodes asks for several",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1"],
            "but --nproc-per-node or --nnodes asks for several ranks. Remove --data-parallel, because ranks are faster, or",
        ),
        (["--strategy", "zero1"], "--data-parallel runs one process, and --strategy says how several ranks train together: remove one of"),
        (["--data-parallel", "gpu"], "device_ids names 'gpu', which is not a device"),
        (["--loss", "max"], "loss='max'"),
    ],
)
def test_one_process_on_several_devices_is_no_launch_of_ranks(others, message):
    with pytest.raises(UsageError, match=message):
        plan("--data-parallel", "all", *others, "train.py")


def test_an_option_of_data_parallel_needs_it():
    with pytest.raises(UsageError, match="--no-gather has no effect without --data-parallel: add it"):
        plan("--no-gather", "train.py")


@pytest.mark.needs_torch(2, 10, why="torchrun has no such option")
def test_a_signal_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"^--signals-to-handle TERM: there is no signal 'TERM'\. Write names such as SIGTERM,SIGINT\.$"):
        _config(plan("--nproc-per-node", "2", "--signals-to-handle", "TERM", "train.py"), tmp_path)


@pytest.mark.slow
def test_a_rendezvous_that_torch_does_not_have_is_refused(parwrap_run, script):
    ended = parwrap_run("--rdzv-backend", "etdc", script("raise SystemExit(3)"))

    assert (2, "", "parwrap run: --rdzv-backend etdc: torch has no rendezvous of this name.\n") == ended
