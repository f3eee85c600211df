"""The command itself, on two ranks: real processes, so each run carries several statements."""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile

import psutil
import pytest

from launched import WITHIN, left_in
from parwrap.errors import LaunchError
from parwrap.launching.agent import launch
from parwrap.launching.plan import plan_launch
from parwrap.run import _modules_needed, main

SEES = """
import json, sys, near, psutil, torch, parwrap
from parwrap.ranks.group import current
group = current()
launcher = psutil.Process().parent().parent()
everyone = {process.pid: process for process in (launcher, *launcher.children(recursive=True))}
sockets = [(pid, socket) for pid, process in everyone.items() for socket in process.net_connections()]
listening = [(pid, socket.laddr.ip) for pid, socket in sockets if socket.status == psutil.CONN_LISTEN]
seen = {"argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "sum": parwrap.reduce_sum(1.0)}
seen |= {"listens": sorted({address for _, address in listening}), "launcher listens": launcher.pid in dict(listening)}
seen |= {"folder": str(group.folder), "modes": [oct(path.stat().st_mode) for path in (group.folder, *group.folder.parents[:2])]}
seen |= {"hash": hash("parwrap"), "backend": group.backend}
everywhere = parwrap.gather(seen)
if parwrap.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(everywhere, file)
"""


@pytest.mark.slow
def test_two_jobs_at_once_meet_in_private_folders_and_open_no_port_but_gloos_on_the_loopback(tmp_path, started, environ, script):
    script("raise ImportError('taken from where the command runs')", "tarfile.py")  # which torch imports
    script("", "scripts/near.py")
    path = script(SEES, "scripts/train.py")
    jobs = [started("-m", "parwrap.run", "--nproc-per-node", "2", path, out, "--lr=1") for out in ("a", "b")]
    assert [("", "")] * 2 == [job.communicate(timeout=WITHIN) for job in jobs]

    seen = {out: json.loads((tmp_path / out).read_text()) for out in ("a", "b")}
    for out, ranks in seen.items():
        for rank in ranks:
            assert ([path, out, "--lr=1"], "__main__") == (rank["argv"], rank["name"])
            assert (str(tmp_path / "scripts"), str(tmp_path / path)) == (rank["path"], rank["file"])
            assert (2.0, "gloo", ["127.0.0.1"], False) == (rank["sum"], rank["backend"], rank["listens"], rank["launcher listens"])
            assert ["0o40700"] * 3 == rank["modes"]
    assert 2 == len({rank["folder"] for ranks in seen.values() for rank in ranks})
    assert 1 == len({rank["hash"] for ranks in seen.values() for rank in ranks})
    assert [] == left_in(environ)


def test_a_module_runs_inside_the_scope(tmp_path, started, parwrap_run, script):
    script(
        "import sys\nwith open('x.txt', 'w') as file: file.write(f'{sys.argv} {sys.path[0]} {__name__} {__package__}')", "recipes/digits.py"
    )
    started("-m", "recipes.digits", "x").communicate(timeout=WITHIN)
    expected = (tmp_path / "x.txt").read_text()
    (tmp_path / "x.txt").unlink()

    assert parwrap_run("--nproc-per-node", "2", "--seed", "1", "-m", "recipes.digits", "x") == (0, "", "")
    assert expected == (tmp_path / "x.txt").read_text()


def test_a_decorator_is_around_the_script(tmp_path, parwrap_run, script):
    name = script("import torch\nwith open('x.txt', 'w') as file: file.write(str(torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype))")

    for ranks in ("1", "2"):
        assert parwrap_run("--nproc-per-node", ranks, "--amp", "bf16", name) == (0, "", "")
        assert "torch.bfloat16" == (tmp_path / "x.txt").read_text()
        (tmp_path / "x.txt").unlink()


PLAIN = """
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
facts |= {"starts processes by": multiprocessing.util.spawnv_passfds.__qualname__}
facts |= {"drawn": [random.random(), numpy.random.rand()], "dev": sys.flags.dev_mode}
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
facts |= {"sum": int(total)}
json.dump(facts, open(f"facts-{facts['RANK']}", "w"))
def local_rank_option(): return "--local_rank"
"""


def test_ranks_that_are_only_launched_are_plain_processes_with_launch_variables(tmp_path, environ, started, script):
    """Options of the interpreter go along when the command begins anew, which it does for ``PYTHONHASHSEED``."""
    options = ("-X", "dev", "-W", "ignore", "-m", "parwrap.run", "--nproc-per-node", "2", "--plain")
    process = started(*options, script(PLAIN), "x")
    stdout, stderr = process.communicate(timeout=WITHIN)
    assert ("", "") == (re.sub(r"\[Gloo\] Rank .*\n", "", stdout), stderr)  # which older torches print for the script's process group

    facts = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    shared = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, seen in enumerate(facts):
        assert [str(rank), str(rank), "2", "2"] == [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        assert (shared, int(shared)) == (seen["OMP_NUM_THREADS"], seen["threads"])
        assert ("0", "lo", True, 2) == (seen["PYTHONHASHSEED"], seen["GLOO_SOCKET_IFNAME"], seen["dev"], seen["sum"])
        assert ("MainProcess", None, "spawnv_passfds") == (seen["process"], seen["start method"], seen["starts processes by"])
        assert ["train.py", f"--local_rank={rank}", "x"] == seen["argv"]
        assert (tmp_path / f"report-{rank}").read_text() == "thread exit collected "
    printed = subprocess.check_output([sys.executable, "-c", "print([*{'a', 'b', 'c', 'd', 'e'}])"], env={**environ, "PYTHONHASHSEED": "0"})
    assert [ast.literal_eval(printed.decode())] * 2 == [seen["set"] for seen in facts]
    assert not set(facts[0]["drawn"]) & set(facts[1]["drawn"])
    assert 1 == len({where for seen in facts for where in seen["torch"]})  # loaded once, for the command too


def test_a_program_that_is_not_python_can_be_launched_and_temporary_files_may_be_far_away(parwrap_run, environ):
    environ["TMPDIR"] = tempfile.mkdtemp(dir=environ["TMPDIR"], suffix="-far-away" * 12)
    status, stdout, _ = parwrap_run("--nproc-per-node", "2", "--plain", "--no-python", "printenv", "LOCAL_RANK")

    assert (status, sorted(stdout.split())) == (0, ["0", "1"])


@pytest.mark.parametrize("folder", ["", "code"])
def test_a_script_that_changes_its_directory_keeps_the_modules_beside_it(tmp_path, parwrap_run, folder):
    """A module of the script sees no process group; Hydra changes the directory before it calls the script's function."""
    for each in ("code", "outputs"):
        (tmp_path / each).mkdir()
    (tmp_path / folder / "helper.py").write_text("import torch.distributed as dist\ndef sees(): return dist.is_initialized()")
    (tmp_path / folder / "train.py").write_text("import os\nos.chdir('outputs')\nimport helper\nprint(helper.sees())")

    assert (0, "False\n", "") == parwrap_run("--nproc-per-node", "2", os.path.join(folder, "train.py"))


@pytest.mark.needs_torch(2, 10, why="torchrun has no such option")
def test_each_rank_may_believe_that_it_is_alone_on_its_node(parwrap_run, environ):
    environ.pop("CUDA_VISIBLE_DEVICES")  # torch would choose one of the GPUs in it for each rank
    options = ("--virtual-local-rank", "--role", "trainer", "--plain", "--no-python")
    status, stdout, _ = parwrap_run("--nproc-per-node", "2", *options, "printenv", "LOCAL_RANK", "ROLE_NAME")

    assert (0, ["0", "0", "trainer", "trainer"]) == (status, sorted(stdout.split()))


ON_GPUS = """
import sys, torch
from parwrap.ranks import device
from parwrap.run import main
if __name__ == "__main__":  # in the launcher alone; ranks see no GPU
    gpus, *argv = sys.argv[1:]
    device.gpu_count = lambda: int(gpus)
    torch.cuda.is_available = lambda: sys.exit("this starts the driver in the launcher")
    sys.exit(main(argv))
"""


@pytest.mark.parametrize(
    ("options", "visible", "seen"),
    [
        ("", "5,GPU-7", ["5", "GPU-7"]),
        ("--start-method spawn", "MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        ("--start-method fork", None, ["0", "1"]),
        ("--plain", "5,GPU-7", ["5,GPU-7", "5,GPU-7"]),  # its script chooses
        ("--backend gloo --nproc-per-node 2", "4", ["4", "4"]),
        ("--max-restarts 1 --nproc-per-node 1", "4,5", ["4,5"]),  # a single rank may use them all
    ],
)
def test_each_rank_starts_with_its_own_gpu(started, environ, script, options, visible, seen):
    environ.pop("CUDA_VISIBLE_DEVICES")
    if visible:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    gpus = str(len((visible or "0,1").split(",")))
    source = (
        "import os, sys, parwrap; visible = 'CUDA_VISIBLE_DEVICES'; sys.stdout.write(f'{parwrap.rank()} sees {os.environ.get(visible)}\\n')"
    )
    command = started(script(ON_GPUS, "on_gpus.py"), gpus, "--all-ranks", *options.split(), script(source))
    stdout, stderr = command.communicate(timeout=WITHIN)

    assert [f"{rank} sees {gpu}" for rank, gpu in enumerate(seen)] == sorted(re.findall(r"\d sees \S+", stdout)), stderr


def test_one_rank_needs_no_other_process_and_begins_as_plain_python_does(started, script):
    path = script("""
import os, sys, psutil
torch = sys.modules.get("torch")
print(os.getsid(0) == os.getpid(), psutil.Process().children(), torch is not None and torch.distributed.is_initialized())
for name in sorted(os.environ): print(name, os.environ[name])
print(sys.flags)
""")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # as many ranks as there are
    try:
        run, alone = started("-m", "parwrap.run", "--nproc-per-node", "auto", path), started(path)

        assert (alone.communicate(timeout=WITHIN)[0], "") == run.communicate(timeout=WITHIN)
        assert 0 == run.returncode
    finally:
        os.sched_setaffinity(0, cores)


def test_a_dry_run_starts_nothing(tmp_path, monkeypatch, capfd, script):
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    status = main(["--dry-run", "--nproc-per-node", "2", script("print('ran')")])
    stdout, stderr = capfd.readouterr()

    assert (status, stderr) == (0, "")
    assert before == psutil.Process().children()
    assert stdout.startswith("ranks      2 ranks on 1 node\nscript     train.py\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        pytest.param(
            ["--nproc-per-node", "2", "no-such.py"],
            "parwrap run: cannot find the script no-such.py in HERE. Correct the path, or change to the directory it is relative to.\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [],
            "parwrap run: no script to run: put its path after the options of parwrap run, followed by the script's own arguments.\n",
            marks=pytest.mark.slow,
        ),
        (["--nproc-per-node", "2", "--redirects", "9", "train.py"], "parwrap run: 9 does"),
        (
            ["--nproc-per-node", "2", "--log-dir", "train.py", "train.py"],
            "parwrap run: --log-dir train.py cannot be created: File exists. Choose another directory.\n",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_exit_code_2(parwrap_run, script, tmp_path, argv, said):
    script("")
    status, stdout, stderr = parwrap_run(*argv)

    said = said.replace("HERE", str(tmp_path))
    assert (2, "", said) == (status, stdout, stderr[: len(said)])


def test_nothing_is_forked_once_cuda_has_started(tmp_path, monkeypatch):
    """CUDA is only said to have started here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)

    with pytest.raises(LaunchError, match="--start-method fork does not work in a process that has initialized CUDA"):
        launch(plan_launch(["--start-method", "fork", "--nproc-per-node", "2", "train.py"], {}, 0, 2))


@pytest.mark.slow
def test_a_process_that_the_script_forks_ends_by_itself(parwrap_run, script):
    forks = script("""
import os, sys
child = os.fork()
if not child:
    raise ValueError("of the child")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise RuntimeError("of the rank")
""")
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", forks)

    assert (1, "1\n") == (status, stdout)
    assert "ValueError: of the child" in stderr
    assert "RuntimeError: of the rank" in stderr
    assert "ValueError" not in stderr[stderr.index(" of 2 failed:") :]


def test_an_application_in_a_folder_may_be_named_like_a_script(tmp_path):
    (tmp_path / "train.py").mkdir()
    (tmp_path / "train.py" / "__main__.py").touch()

    assert _modules_needed([]) == _modules_needed([str(tmp_path / "train.py")])
