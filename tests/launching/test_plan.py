"""What a command line means, in a table; no process is started."""

from dataclasses import replace

import pytest
from torch.distributed.run import get_args_parser

from parwrap.launching.agent import _config
from parwrap.launching.plan import Script, describe
from parwrap.launching.training_options import DECORATORS, OF_DECORATORS, SCOPE_OPTIONS, Given
from planning import plan

pytestmark = pytest.mark.usefixtures("scripts")


COMMAND_LINES = [
    (["train.py"], Script("train.py", scope={})),
    (["train.py", "--seed", "3"], Script("train.py", ("--seed", "3"), scope={})),
    (["--seed", "3", "train.py", "--lr=1"], Script("train.py", ("--lr=1",), scope={"seed": 3})),
    (["--batch=global", "--bucket_cap_mb", "5", "train.py"], Script("train.py", scope={"batch": "global", "bucket_cap_mb": 5.0})),
    (
        ["--uneven", "join", "--lr=sqrt", "--loss", "sum", "train.py", "--lr", "1"],
        Script("train.py", args=("--lr", "1"), scope={"uneven": "join", "lr": "sqrt", "loss": "sum"}),
    ),
    (["--timeout", "9", "--backend", "gloo", "train.py"], Script("train.py", scope={"timeout": 9.0, "backend": "gloo"})),
    (["--draws", "per-rank", "--strategy=none", "train.py"], Script("train.py", scope={"draws": "per_rank", "strategy": "none"})),
    (
        ["--strategy", "local-sgd", "--every=4", "--outer", "nesterov", "--outer-lr", "0.5", "train.py"],
        Script("train.py", scope={"strategy": "local_sgd", "every": 4, "outer": "nesterov", "outer_lr": 0.5}),
    ),
    (
        ["--strategy", "zero1", "--compress", "powersgd", "--powersgd-rank", "3", "train.py"],
        Script("train.py", scope={"strategy": "zero1", "compress": "powersgd", "powersgd_rank": 3}),
    ),
    (["--gradient-as-bucket-view", "train.py"], Script("train.py", scope={"gradient_as_bucket_view": True})),
    (
        ["--strategy=local_sgd", "--warmup", "9", "--outer=nesterov", "--outer-momentum", "0.5", "train.py"],
        Script("train.py", scope={"strategy": "local_sgd", "warmup": 9, "outer": "nesterov", "outer_momentum": 0.5}),
    ),
    (["--strategy", "fsdp", "--wrap", "Block,Head", "train.py"], Script("train.py", scope={"strategy": "fsdp", "wrap": ("Block", "Head")})),
    (
        ["--strategy", "fsdp", "--shard-within-node", "train.py"],
        Script("train.py", scope={"strategy": "fsdp", "shard_within_node": True}),
    ),
    (["--strategy", "hogwild", "--lock", "train.py"], Script("train.py", scope={"strategy": "hogwild", "lock": True})),
    (
        ["--strategy", "parameter-server", "--servers", "2", "--staleness=0", "train.py"],
        Script("train.py", scope={"strategy": "parameter_server", "servers": 2, "staleness": 0}),
    ),
    (["--amp", "bf16", "train.py", "--amp"], Script("train.py", ("--amp",), scope={}, decorators={"amp": Given(("bf16",))})),
    (
        ["--accumulate", "4", "--amp=O2", "train.py"],
        Script("train.py", scope={}, decorators={"accumulate": Given((4,)), "amp": Given(("O2",))}),
    ),
    (["--sync-bn", "train.py"], Script("train.py", scope={}, decorators={"sync_bn": Given()})),
    (["--progress", "train.py"], Script("train.py", scope={}, decorators={"progress": Given()})),
    (["--explain", "--html", "x.html", "train.py"], Script("train.py", scope={}, decorators={"explain": Given((), {"html": "x.html"})})),
    (["--explain", "--report=x.json", "train.py"], Script("train.py", scope={}, decorators={"explain": Given((), {"report": "x.json"})})),
    (
        ["--data-parallel", "0,1", "--no-gather", "--loss", "sum", "train.py"],
        Script("train.py", scope={"loss": "sum"}, decorators={"data_parallel": Given(([0, 1],), {"gather": False, "loss": "sum"})}),
    ),
    (
        ["--uniform-length", "--pad-value", "0", "train.py"],
        Script("train.py", scope={}, decorators={"uniform_length": Given((), {"pad_value": 0.0})}),
    ),
    (
        ["--uniform-length", "--max-tokens", "100", "--multiple-of=8", "train.py"],
        Script("train.py", scope={}, decorators={"uniform_length": Given((), {"max_tokens": 100, "multiple_of": 8})}),
    ),
    (["-m", "recipes.digits", "x"], Script("recipes.digits", ("x",), "module", scope={})),
    (["--plain", "train.py"], Script("train.py", scope=None, hand_local_rank=True)),
    (["--plain", "--use_env", "train.py"], Script("train.py", scope=None)),
    (["--plain", "--no_python", "ls", "-l"], Script("ls", ("-l",), "program", scope=None)),
    (["-m", "parwrap.doctor", "--json"], Script("parwrap.doctor", ("--json",), "module", scope=None)),
]


@pytest.mark.parametrize(("argv", "script"), COMMAND_LINES)
def test_what_every_rank_runs(argv, script):
    assert plan(*argv).script == script


def test_each_option_of_parwrap_is_among_these_command_lines():
    given = {word.split("=")[0].removeprefix("--").replace("-", "_") for argv, _ in COMMAND_LINES for word in argv}

    assert set() == {*SCOPE_OPTIONS, *DECORATORS, *OF_DECORATORS} - given


@pytest.mark.parametrize(
    ("argv", "environ", "gpus", "ranks"),
    [
        ([], {}, 0, 1),
        ([], {}, 4, 4),
        ([], {"PET_NPROC_PER_NODE": "3"}, 0, 3),
        (["--nproc-per-node", "2"], {}, 0, 2),
        (["--nproc_per_node=2"], {}, 4, 2),
        (["--nproc-per-node", "gpu"], {}, 4, 4),
        (["--nproc-per-node", "cpu", "--backend", "gloo"], {}, 4, 8),
        (["--nproc-per-node", "auto"], {}, 4, 4),
        (["--nproc-per-node", "auto"], {}, 0, 8),
        (["--nproc-per-node", "6", "--plain"], {}, 4, 6),
        (["--data-parallel", "all"], {}, 4, 1),
        (["--explain"], {}, 0, 2),
        (["--explain"], {}, 4, 4),
        (["--explain"], {}, 1, 2),
        (["--explain", "--nproc-per-node", "1"], {}, 0, 1),
    ],
)
def test_how_many_ranks(argv, environ, gpus, ranks):
    assert plan(*argv, "train.py", gpus=gpus, **environ).ranks == ranks


def test_ranks_share_gpus_over_gloo_where_there_are_too_few():
    shared = plan("--nproc-per-node", "3", "train.py", gpus=2)
    asked = plan("--nproc-per-node", "3", "--backend", "gloo", "train.py", gpus=2)
    enough = plan("--nproc-per-node", "2", "train.py", gpus=2)

    assert "gloo" == shared.variables["PARWRAP_BACKEND"]
    assert shared.notice == (
        "3 ranks share 2 GPUs over gloo, because nccl needs a GPU for each. This shows what 3 ranks train, but is no faster than 2 ranks. "
        "Add --backend gloo to hide this message."
    )
    assert ("", "") == (asked.notice, enough.notice)
    assert "PARWRAP_BACKEND" not in {**asked.variables, **enough.variables}


def test_ranks_share_out_the_cores():
    shared = plan("--nproc-per-node", "3", "train.py", cores=8)
    crowded = plan("--nproc-per-node", "8", "train.py", cores=2)

    assert (shared.threads, shared.variables["OMP_NUM_THREADS"]) == (2, "2")
    assert crowded.threads == 1


def test_variables_that_the_user_has_set_stay_unless_they_are_empty():
    chosen = plan("--nproc-per-node", "2", "train.py", OMP_NUM_THREADS="7", PYTHONHASHSEED="1", GLOO_SOCKET_IFNAME="eth0")

    empty = plan("--nproc-per-node", "2", "train.py", OMP_NUM_THREADS="", PYTHONHASHSEED="", GLOO_SOCKET_IFNAME="")

    assert (4, plan("--nproc-per-node", "2", "train.py").variables) == (empty.threads, empty.variables)
    assert chosen.threads is None
    assert not chosen.variables.keys() & {"OMP_NUM_THREADS", "PYTHONHASHSEED", "GLOO_SOCKET_IFNAME"}


@pytest.mark.parametrize("argv", [["--standalone"], ["--nnodes", "1"], ["--rdzv-id", "job"], ["--max-restarts", "2"]])
def test_one_node_meets_on_its_loopback(argv):
    alone = plan("--nproc-per-node", "2", *argv, "train.py")

    assert alone.torchrun.rdzv_backend == "parwrap"
    assert "GLOO_SOCKET_IFNAME" in alone.variables


@pytest.mark.parametrize(
    ("argv", "rendezvous"),
    [
        (["--nnodes", "2", "--node-rank", "1", "--master_addr", "there"], "static at there:29500"),
        (["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "there:29400"], "c10d at there:29400"),
        (["--nnodes", "1:4", "--rdzv-endpoint", "there:29400"], "c10d at there:29400"),
        (["--rdzv-backend", "static", "--rdzv-endpoint", "there:29400"], "static at there:29400"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], "c10d at localhost:0"),
        (["--master-port", "29501"], "static at 127.0.0.1:29501"),
    ],
)
def test_a_rendezvous_of_the_users_is_torchruns(argv, rendezvous):
    met = plan("--nproc-per-node", "2", *argv, "train.py")

    assert f"rendezvous {rendezvous}" in describe(met)
    assert "GLOO_SOCKET_IFNAME" not in met.variables


def test_torchruns_options_are_kept():
    torchrun = plan("--max-restarts", "3", "--monitor_interval", "0.5", "--tee", "3", "--role", "trainer", "train.py").torchrun

    assert (torchrun.max_restarts, torchrun.monitor_interval, torchrun.tee, torchrun.role) == (3, 0.5, "3", "trainer")
    assert plan("train.py").torchrun.start_method == "forkserver"
    assert plan("--start-method", "spawn", "train.py").torchrun.start_method == "spawn"
    assert plan("train.py", PET_START_METHOD="fork").torchrun.start_method == "fork"


def test_torchruns_options_reach_its_agent(tmp_path):
    known = get_args_parser().parse_args(["train.py"])
    newer = {"shutdown_timeout": 7, "signals_to_handle": "SIGTERM,SIGUSR1", "virtual_local_rank": True}  # not all are in torch 2.9
    newer = {name: value for name, value in newer.items() if name in known}
    times = ["--max-restarts", "3", "--monitor-interval", "0.5"]
    times += [f"--{name}" if value is True else f"--{name}={value}" for name, value in newer.items()]
    others = ["--role", "trainer", "--rdzv-id", "job", "--local-addr", "here"]
    config = _config(plan("--nproc-per-node", "2", *times, *others, "train.py"), tmp_path)

    assert (2, 3, 0.5) == (config.nproc_per_node, config.max_restarts, config.monitor_interval)
    assert ("trainer", "job", "here") == (config.role, config.run_id, config.local_addr)
    assert newer == {name: getattr(config, name) for name in newer}


@pytest.mark.parametrize(
    ("argv", "here"),
    [
        (["train.py"], True),
        (["--standalone", "train.py"], True),
        (["--nproc-per-node", "2", "train.py"], False),
        (["--plain", "train.py"], False),
        (["--max-restarts", "1", "train.py"], False),
        (["--tee", "3", "train.py"], False),
        (["--log-dir", "logs", "train.py"], False),
        (["--all-ranks", "train.py"], True),
        (["--nnodes", "2", "--master-addr", "there", "train.py"], False),
    ],
)
def test_one_rank_that_needs_no_agent_runs_in_this_process(argv, here):
    assert plan(*argv).in_this_process is here


def test_what_ranks_say_and_where():
    ours = plan("--all-ranks", "--log-dir", "logs", "train.py")
    torchruns = plan("--redirects", "3", "--log-dir", "logs", "train.py")

    assert (True, "logs") == (ours.everyone, ours.log_dir)
    assert (False, None) == (torchruns.everyone, torchruns.log_dir)


def test_show_two_ranks():
    shown = plan("--dry-run", "--nproc-per-node", "2", "--batch", "global", "--seed=1", "train.py", "--lr", "0.1", "two words", cores=2)

    assert shown.dry_run
    assert (
        describe(replace(shown, variables={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}))
        == """\
ranks      2 ranks on 1 node
script     train.py --lr 0.1 'two words'
inside     parwrap.distributed(seed=1, batch='global')
started    by forkserver
rendezvous in a private folder of this machine
variables  OMP_NUM_THREADS=1 PYTHONHASHSEED=0"""
    )


def test_show_one_rank():
    assert (
        describe(plan("-m", "recipes.digits"))
        == """\
ranks      1 rank on 1 node
module     recipes.digits
inside     parwrap.distributed()
started    in this process"""
    )


def test_show_many_nodes():
    argv = ["--nnodes", "2:4", "--nproc-per-node", "8", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "there"]

    assert (
        describe(plan(*argv, "--plain", "train.py", OMP_NUM_THREADS="1", PYTHONHASHSEED="0"))
        == """\
ranks      8 ranks on each of 2-4 nodes
script     train.py
inside     none: only launched
started    by forkserver, restarted up to 3 times after a failure
rendezvous c10d at there
variables  as they are"""
    )
