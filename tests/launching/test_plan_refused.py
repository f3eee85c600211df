"""A command line that cannot be carried out is refused, with what to do."""

import pytest

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command.plan import AMP_VALUES, describe, plan_launch
from planning import plan

pytestmark = pytest.mark.usefixtures("scripts")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--sed", "1", "train.py"], "no option is called --sed; did you mean --seed?"),
        (["--nproc-per-node=2", "--batsh=global", "train.py"], "no option is called --batsh; did you mean --batch?"),
        (
            ["--xyzzy", "train.py"],
            "no option is called --xyzzy; `python -m parwrap.run --help` lists the options; those of the script come after it.",
        ),
        ([], "no script to run: name it after the options, then its own arguments."),
        (["--seed", "one", "train.py"], "argument --seed: 'one' is not a whole number."),
        (["--seed", "-1", "train.py"], "seed=-1 is not a whole number from 0 to 2**64 - 1. Your script's own options go after its name."),
        (["--timeout", "soon", "train.py"], "argument --timeout: 'soon' is not a number."),
        (["--max-restarts", "x", "train.py"], "argument --max-restarts/--max_restarts: invalid int value: 'x'"),
        (
            ["--nproc-per-node", "0", "train.py"],
            "--nproc-per-node 0 is not a number of ranks: give one above 0, or gpu (0 here), cpu (8 here), auto (8 here).",
        ),
        (
            ["--nproc-per-node", "two", "train.py"],
            "--nproc-per-node two is not a number of ranks: give one above 0, or gpu (0 here), cpu (8 here), auto (8 here).",
        ),
        (["--nnodes", "a:b", "train.py"], "--nnodes a:b is not a number of nodes: give one above 0, or MIN:MAX for a job that can grow."),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master-addr", "there", "train.py"],
            "--node-rank 2 is not below --nnodes 2: nodes are counted from 0.",
        ),
        *(
            (
                ["--nnodes", "2", *options, "train.py"],
                "--nnodes 2 needs a rendezvous: give every node the address of the first by --master-addr, and a different "
                "--node-rank from 0; or give every node the same --rdzv-endpoint HOST:PORT, on any one of them.",
            )
            for options in ([], ["--node-rank", "1"], ["--master-port", "29501"])
        ),
        *(
            (
                ["--nnodes", "2", "--rdzv-backend", "c10d", *options, "train.py"],
                "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, on any one of the nodes: give it to all of them.",
            )
            for options in ([], ["--master-addr", "there"])
        ),
        (["--node-rank", "1", "train.py"], "--node-rank 1 is not below --nnodes 1: nodes are counted from 0."),
        (["--nprocs", "2", "train.py"], "no option is called --nprocs; did you mean --nproc-per-node?"),
        (["-np", "2", "train.py"], "no option is called -np; did you mean --nproc-per-node?"),
        (["--nnodes", "3:2", "train.py"], "--nnodes 3:2 is not a number of nodes: give one above 0, or MIN:MAX for a job that can grow."),
        (
            ["--nnodes", "1:2", "--master-addr", "there", "train.py"],
            "--nnodes 1:2 lets nodes join and leave: use --rdzv-endpoint HOST:PORT, not --master-addr.",
        ),
        (
            ["--all-ranks", "--tee", "3", "train.py"],
            "--all-ranks shows what ranks write, and so do --redirects, --tee and --local-ranks-filter: remove it or them.",
        ),
        (
            ["--standalone", "--nnodes", "2", "train.py"],
            "--standalone is for one node, and --nnodes 2 asks for more: remove one of them.",
        ),
        (
            ["--plain", "--seed", "1", "--bucket-cap-mb", "5", "train.py"],
            "--plain opens no scope, so --seed, --bucket-cap-mb has no effect: remove one of them.",
        ),
        (
            ["--backend", "gloo", "-m", "parwrap.doctor"],
            "parwrap.doctor opens no scope, so --backend has no effect: remove one of them.",
        ),
        (
            ["--pad-value", "0", "train.py"],
            "--pad-value has no effect without --uniform-length: add it. The script's own options come after its name.",
        ),
        (
            ["--data-parallel", "cpu,cpu", "--nproc-per-node", "2", "train.py"],
            "--data-parallel runs one process on several devices, and the options ask for more ranks: remove one of them.",
        ),
        (
            ["--data-parallel", "all", "--nnodes", "2", "--master-addr", "there", "train.py"],
            "--data-parallel runs one process on several devices, and the options ask for more ranks: remove one of them.",
        ),
        (
            ["--data-parallel", "gpu", "train.py"],
            "device_ids names 'gpu', which is not a device: give numbers of GPUs, 'cuda:0' or 'cpu'. Your script's own options go after "
            "its name.",
        ),
        (
            ["--uniform-length", "--max-tokens", "0", "train.py"],
            "max_tokens=0 is not a whole number above 0. Your script's own options go after its name.",
        ),
        (
            ["--lr", "0.1", "train.py"],
            "lr='0.1' is not one of its values. 'keep': learning rates stay as they are; 'linear': they are multiplied by the number of "
            "ranks, as the global batch is; 'sqrt': they are multiplied by its square root. Your script's own options go after its name.",
        ),
        (
            ["--no", "train.py"],
            "--no is ambiguous: --no-gather, --no-python or --node-rank. Your script's own options go after its name.",
        ),
        (["--no-python", "-m", "ls"], "--no-python runs a program and --module a Python module: remove one of them."),
        (
            ["--no-python", "ls"],
            "--no-python runs a program that is not Python, in which parwrap can change nothing: add --plain to only launch it.",
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
        (["no/such.py"], 0, "no script no/such.py: its path is relative to the directory that the command runs in."),
        (["."], 0, ". is a directory without a __main__.py, so it cannot run: name the script in it."),
        (
            ["recipes.digits"],
            0,
            "no script recipes.digits: its path is relative to the directory that the command runs in. To run a module, put -m "
            "before its name.",
        ),
        (
            ["--amp", "fp17", "train.py"],
            0,
            f"no script fp17: its path is relative to the directory that the command runs in. To run a module, put -m before its "
            f"name. If it is the value of --amp: that takes {', '.join(AMP_VALUES)}.",
        ),
        (
            ["-m", "no.such"],
            0,
            "no module no.such: it is searched in the directory that the command runs in and among installed packages.",
        ),
        (["--plain", "--no-python", "no-such"], 0, "no program no-such to run: give its path, or the name of one on the PATH."),
        (
            ["--nproc-per-node", "gpu", "train.py"],
            0,
            "--nproc-per-node gpu starts a rank on each GPU, but torch can use none here: give a number to train on the CPU.",
        ),
        (
            ["--nproc-per-node", "3", "train.py"],
            2,
            "--nproc-per-node 3 is more than the GPUs that torch can use on this node (2). "
            "Start at most 2 ranks there, or add --backend gloo to let ranks share GPUs.",
        ),
    ],
)
def test_what_is_not_there_is_named(argv, gpus, text):
    with pytest.raises(LaunchError) as refusal:
        plan(*argv, gpus=gpus)

    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("value", "text"), [("fp8", "dtype='fp8' is not a dtype for mixed precision"), ("O4", "level='O4' is not one of Apex's levels")]
)
def test_options_of_other_decorators_are_checked_by_them(value, text):
    with pytest.raises(UsageError, match=text):
        plan(f"--amp={value}", "train.py")


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            "0",
            "accumulate(steps=0): steps is the number of batches of one optimizer step, a whole number from 1, or 'auto' for a loop that "
            "accumulates by hand. Your script's own options go after its name.",
        ),
        ("some", "argument --accumulate: 'some' is not a whole number."),
    ],
)
def test_batches_of_a_step_are_a_whole_number(steps, text):
    with pytest.raises(UsageError) as refusal:
        plan("--accumulate", steps, "train.py")

    assert text == str(refusal.value)


def test_options_of_the_scope_are_checked_by_the_scope():
    with pytest.raises(UsageError, match="batch='globe' is not one of its values"):
        plan("--batch", "globe", "train.py")


def test_data_parallel_is_one_process_however_many_gpus_there_are():
    planned = plan_launch(["--data-parallel", "all", "train.py"], {}, 4, 8)

    assert (1, True) == (planned.ranks, planned.in_this_process)
    assert "inside     parwrap.distributed() data_parallel(device_ids=None)" in describe(planned)
