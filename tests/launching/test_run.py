"""The command itself, on two ranks: real processes, so each run carries several statements."""

import ast
import json
import os
import subprocess
import sys
import tempfile

import pytest

from command_line import WITHIN, assert_nothing_left
from parwrap.errors import LaunchError
from parwrap.launching.command.plan import plan_launch
from parwrap.launching.elastic.agent import launch


def test_inside_the_scope_a_script_speaks_once_and_as_under_plain_python(tmp_path, started, parwrap_run, script):
    script("raise ImportError('taken from where the command runs')", "tarfile.py")  # which torch imports
    path = script("import helper, os, sys\nprint(sys.argv, sys.path[0], __file__, __name__, os.environ.get('RANK'))", "scripts/train.py")
    script("", "scripts/helper.py")
    expected = started(path, "--lr", "0.1").communicate(timeout=WITHIN)[0]

    assert parwrap_run("--nproc-per-node", "2", path, "--lr", "0.1") == (0, expected, "")


def test_a_module_runs_inside_the_scope(tmp_path, started, parwrap_run, script):
    script("import sys\nprint(sys.argv, sys.path[0], __name__, __package__)", "recipes/digits.py")
    expected = started("-m", "recipes.digits", "x").communicate(timeout=WITHIN)[0]

    assert parwrap_run("--nproc-per-node", "2", "--seed", "1", "-m", "recipes.digits", "x") == (0, expected, "")


def test_ranks_that_are_only_launched_are_plain_processes_with_launch_variables(tmp_path, environ, parwrap_run, script):
    path = script("""
import atexit, json, multiprocessing.util, os, random, sys, threading, time
import numpy, psutil, torch
class Report:
    def __del__(self): self.file.write("collected ")
report = Report()
report.file = open(f"report-{os.environ['RANK']}", "w")
atexit.register(lambda: report.file.write("exit "))
def late():
    time.sleep(0.1)
    report.file.write("thread ")
threading.Thread(target=late).start()
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS PYTHONHASHSEED GLOO_SOCKET_IFNAME".split()
facts = {name: os.environ.get(name) for name in names}
facts |= {"argv": sys.argv, "threads": torch.get_num_threads(), "process": multiprocessing.current_process().name}
facts |= {"set": list({"a", "b", "c", "d", "e"}), "start method": multiprocessing.get_start_method(allow_none=True)}
processes = [psutil.Process(), *psutil.Process().parents()[:2]]
facts |= {"torch": [next(each.addr for each in process.memory_maps(False) if "libtorch_cpu" in each.path) for process in processes]}
facts |= {"starts processes by": type(multiprocessing.util.spawnv_passfds).__name__}
facts |= {"drawn": [random.random(), numpy.random.rand()]}
json.dump(facts, open(f"facts-{facts['RANK']}", "w"))
def local_rank_option(): return "--local_rank"
""")
    assert parwrap_run("--nproc-per-node", "2", "--plain", path, "x") == (0, "", "")

    facts = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    shared = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, seen in enumerate(facts):
        assert [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [str(rank), str(rank), "2", "2"]
        assert (seen["OMP_NUM_THREADS"], seen["threads"]) == (shared, int(shared))
        assert (seen["PYTHONHASHSEED"], seen["GLOO_SOCKET_IFNAME"]) == ("0", "lo")
        assert (seen["process"], seen["start method"], seen["starts processes by"]) == ("MainProcess", None, "function")
        assert seen["argv"] == ["train.py", f"--local_rank={rank}", "x"]
        assert (tmp_path / f"report-{rank}").read_text() == "thread exit collected "
    printed = subprocess.check_output([sys.executable, "-c", "print([*{'a', 'b', 'c', 'd', 'e'}])"], env={**environ, "PYTHONHASHSEED": "0"})
    assert [seen["set"] for seen in facts] == [ast.literal_eval(printed.decode())] * 2
    assert not set(facts[0]["drawn"]) & set(facts[1]["drawn"])
    assert len({where for seen in facts for where in seen["torch"]}) == 1  # loaded once, for the command too


def test_two_jobs_at_once_each_find_their_own_ranks_and_listen_on_the_loopback_alone(started, environ, script):
    path = script("""
import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    launcher = psutil.Process().parent().parent()
    sockets = [socket for process in (launcher, *launcher.children(recursive=True)) for socket in process.net_connections()]
    listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    print(int(total), len(listening) > 2, set(listening), flush=True)
dist.barrier()
""")
    jobs = [started("-m", "parwrap.run", "--nproc-per-node", "2", "--plain", path) for _ in range(2)]
    for job in jobs:
        assert job.communicate(timeout=WITHIN) == ("2 True {'127.0.0.1'}\n", "")
        assert job.returncode == 0
    for job in jobs:
        assert_nothing_left(job, environ)


def test_a_program_that_is_not_python_can_be_launched_and_temporary_files_may_be_far_away(parwrap_run, environ):
    environ["TMPDIR"] = tempfile.mkdtemp(dir=environ["TMPDIR"], suffix="-far-away" * 12)
    status, stdout, _ = parwrap_run("--nproc-per-node", "2", "--plain", "--no-python", "printenv", "LOCAL_RANK")

    assert (status, sorted(stdout.split())) == (0, ["0", "1"])


def test_a_command_without_anything_says_what_is_missing(parwrap_run):
    assert (
        2,
        "",
        "parwrap.run: no script to run: put its path after the options of parwrap.run, followed by the script's own arguments.\n",
    ) == parwrap_run()


def test_one_rank_needs_no_other_process(parwrap_run, script):
    path = script(
        "import os, psutil, torch\nprint(os.getsid(0) == os.getpid(), psutil.Process().children(), torch.distributed.is_initialized())"
    )

    assert parwrap_run(path) == (0, "True [] False\n", "")


def test_options_of_python_itself_go_along_when_the_command_begins_anew(started, script):
    """It does so for ``PYTHONHASHSEED``, which is to be the same on all nodes."""
    path = script("import sys\nprint(hash('parwrap'), sys.flags.dev_mode)")
    ranks = started("-X", "dev", "-W", "ignore", "-m", "parwrap.run", "--plain", "--nproc-per-node", "2", path)
    alone = subprocess.run(
        [sys.executable, "-c", "print(hash('parwrap'), True)"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )

    assert [alone.stdout] * 2 == ranks.communicate(timeout=60)[0].splitlines(keepends=True)


def test_a_rank_that_turns_out_to_be_the_only_one_is_started_as_plain_python_is(started, parwrap_run, script):
    path = script("import os, sys\nfor name in sorted(os.environ): print(name, os.environ[name])\nprint(sys.flags)")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # as many ranks as there are
    try:
        assert parwrap_run("--nproc-per-node", "auto", path) == (0, started(path).communicate(timeout=WITHIN)[0], "")
    finally:
        os.sched_setaffinity(0, cores)


def test_a_dry_run_starts_nothing(parwrap_run, script):
    status, stdout, stderr = parwrap_run("--dry-run", "--nproc-per-node", "2", script("print('ran')"))

    assert (status, stderr) == (0, "")
    assert stdout.startswith("ranks      2 ranks on 1 node\nscript     train.py\n")


def test_what_cannot_be_run_is_refused_with_exit_code_2(parwrap_run):
    assert parwrap_run("--nproc-per-node", "2", "no-such.py") == (
        2,
        "",
        "parwrap.run: cannot find the script no-such.py: its path is relative to the current directory.\n",
    )


def test_nothing_is_forked_once_cuda_has_started(tmp_path, monkeypatch):
    """CUDA is only said to have started here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)

    with pytest.raises(LaunchError, match="--start-method fork does not work in a process that has initialized CUDA"):
        launch(plan_launch(["--start-method", "fork", "--nproc-per-node", "2", "train.py"], {}, 0, 2))


def test_values_that_torch_refuses_are_refused_likewise(parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", "2", "--redirects", "9", script(""))

    assert (status, stderr.partition(" does")[0]) == (2, "parwrap.run: 9")
