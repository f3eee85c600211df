"""The batch script, and the state of a job from what SLURM prints, as text; nothing is started."""

import itertools
import os
import subprocess
import sys

import pytest

from parwrap.launching import slurm
from parwrap.launching.jobs import requested_job
from parwrap.launching.slurm import batch_script, read_status
from parwrap.ranks.launchers import LOOPBACK
from parwrap.run import main

PYTHON = "my env/bin/python"


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def text(*argv: str) -> str:
    job = requested_job(["--launcher", "slurm", *argv], {}, cores=8)
    written = batch_script(job, PYTHON, "my work")
    subprocess.run(["bash", "-n"], input=os.fsencode(written), check=True)
    return written


def test_one_node():
    assert (
        text("--gpus-per-node", "8", "--time", "1:00:00", "--seed", "1", "train.py", "--lr", "0.1")
        == """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --job-name=train
#SBATCH --time=1:00:00
#SBATCH --chdir='my work'
#SBATCH --requeue
#SBATCH --open-mode=append

srun --export=ALL --ntasks=1 'my env/bin/python' -m parwrap.run \\
    --nproc-per-node 8 --seed 1 train.py --lr 0.1
"""
    )


def test_many_nodes():
    options = [
        "--partition",
        "gpu",
        "--cpus-per-task",
        "16",
        "--job-name",
        "two words",
        "--sbatch=-C a100",
        "--sbatch",
        "comment=it is",
        "--sbatch",
        "exclusive",
        "--sbatch=--admin-comment=it's",
    ]

    assert (
        text("--nodes", "2", "--nproc-per-node", "4", *options, "train.py", "it's", "$HOME", "a  b")
        == """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --job-name='two words'
#SBATCH --partition=gpu
#SBATCH --cpus-per-task=16
#SBATCH --chdir='my work'
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH -C a100
#SBATCH '--comment=it is'
#SBATCH --exclusive
#SBATCH '--admin-comment=it'"'"'s'

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export PARWRAP_SECRET="${PARWRAP_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}"  # srun passes it to all nodes, by --export
# nodes that srun ends because one has failed exit with 143, which is not to hide that one's exit code
srun --export=ALL --ntasks-per-node=1 --cpus-per-task=16 --kill-on-bad-exit=1 bash -c '
    trap : TERM USR1 USR2
    "$3" -m parwrap.run --nnodes 2 --node-rank "$SLURM_NODEID" --master-addr "$1" --master-port "$2" "${@:4}"
    status=$?
    exit $((status == 143 ? 1 : status))
' bash "$host" "$port" 'my env/bin/python' \\
    --nproc-per-node 4 train.py 'it'"'"'s' '$HOME' 'a  b'
"""
    )


def test_any_argument_reaches_the_script(programs):
    programs(srun="""printf '%s\\n' "$@" """)
    given = ["two\r\nlines", "caf\udce9", "$HOME 'a' \\r", ""]
    written = os.fsencode(text("train.py", *given))

    assert b"\r" not in written
    printed = subprocess.run(["bash"], input=written, capture_output=True, check=True).stdout
    assert printed.endswith("\n".join(["train.py", *given, ""]).encode(errors="surrogateescape"))


def test_nodes_that_start_again_together_meet_by_c10d():
    meeting = (
        '-m parwrap.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$1:$2" --rdzv-id "$SLURM_JOB_ID" '
        '--rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "$SLURMD_NODENAME" "${@:4}"\n'
    )

    assert meeting in text("--nodes", "2", "--max-restarts", "1", "train.py")


SHOWN = """\
JobId=7 JobName=JobState=odd ExitCode=9:9
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:00:01 TimeLimit=UNLIMITED TimeMin=N/A
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n1
   BatchHost=n1.cluster
   WorkDir=my work
   StdErr=my work/slurm-7.out
   StdIn=/dev/null
   StdOut=my work/slurm-7.out
   Power=
"""


@pytest.mark.parametrize(
    ("state", "code", "ended", "exit_code"),
    [
        ("RUNNING", "0:0", False, 1),
        ("COMPLETED", "0:0", True, 0),
        ("FAILED", "3:0", True, 3),
        ("FAILED", "0:9", True, 137),
        ("TIMEOUT", "0:0", True, 1),
        ("OUT_OF_MEMORY", "0:125", True, 253),
        ("COMPLETING", "3:0", False, 3),
    ],
)
def test_how_a_job_stands(state, code, ended, exit_code):
    status = read_status(SHOWN.format(state=state, reason="Resources", restarts=2, code=code))

    assert (state, "Resources", 2, exit_code) == (status.state, status.reason, status.restarts, status.code)
    assert ended == status.ended
    assert ("my work/slurm-7.out", True) == (status.log, status.ran)


def test_where_the_log_is_if_its_name_has_the_nodes():
    shown = SHOWN.format(state="RUNNING", reason="None", restarts=0, code="0:0").replace(
        "StdOut=my work/slurm-7", "StdOut=%N/%n-%s-%t-100%"
    )

    assert "n1/0-batch-0-100%.out" == read_status(shown).log
    assert "%N/0-batch-0-100%.out" == read_status(shown.replace("   BatchHost=n1.cluster\n", "")).log


def test_a_job_that_never_had_nodes_has_not_run():
    assert not read_status(SHOWN.format(state="CANCELLED", reason="None", restarts=0, code="0:0").replace("NodeList=n1", "NodeList=")).ran


def test_a_dry_run_prints_the_batch_script_where_there_is_no_slurm(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert 0 == main(["--launcher", "slurm", "--dry-run", "train.py"])
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --nodes=1\n")
    assert 2 == main(["--launcher", "slurm", "train.py"])
    assert (
        "parwrap run: cannot find sbatch: run --launcher slurm on a node from which you can submit jobs. To print the batch script "
        "instead, add --dry-run.\n" == capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["array=0-3", "-a 0-3", "-a0-3", "--array=0-3", "arr=0-3"])
def test_a_job_array_is_not_followed(option, programs, capsys):
    programs(sbatch="exit 9")

    assert 2 == main(["--launcher", "slurm", f"--sbatch={option}", "train.py"])
    assert capsys.readouterr().err == (
        f"parwrap run: --sbatch {option} creates several jobs, but only one can be followed: remove it, or print the batch script with "
        "--dry-run, and submit it with sbatch.\n"
    )
    assert 0 == main(["--launcher", "slurm", f"--sbatch={option}", "--dry-run", "train.py"])


NO_FOLDER = (
    "--output logs/%j.out needs the folder logs, which SLURM does not create: create it with `mkdir -p logs`. If only the nodes have it, "
    "use --sbatch output=PATH."
)
NODES = "--sbatch {}: parwrap run sets the number of nodes, and starts ranks on each: use --nodes N instead."


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--output", "logs/%j.out"], NO_FOLDER),
        (["--output", "."], "--output . is a folder: add the name of a file, as in ./%j.out."),
        (["--sbatch", "nodes=2"], NODES.format("nodes=2")),
        (["--sbatch=-N2"], NODES.format("-N2")),
        (
            ["--sbatch=-C it's"],
            "--sbatch -C it's has a quote without an end: write --sbatch NAME=VALUE, where a value needs no quotes.",
        ),
        (
            ["--sbatch", "test-only"],
            "sbatch printed no number of a job, but '', so no job can be followed: remove options such as --sbatch test-only. "
            "`squeue --me` lists your jobs.",
        ),
    ],
)
def test_what_would_submit_another_job_or_none(options, refused, programs, capsys):
    programs(sbatch="echo 'sbatch: Job 7 to start' >&2", scontrol="exit 9")

    assert 2 == main(["--launcher", "slurm", *options, "train.py"])
    assert f"parwrap run: {refused}\n" == capsys.readouterr().err


def test_a_job_is_no_array_and_has_not_the_memory_of_the_job_that_submits_it(programs, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    programs(sbatch="env | grep SLURM_MEM_; exit 0")
    assert 2 == main(["--launcher", "slurm", "train.py"])
    assert "no number of a job, but ''" in capsys.readouterr().err

    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-3")
    assert 2 == main(["--launcher", "slurm", "train.py"])
    assert capsys.readouterr().err.startswith("parwrap run: the environment variable SBATCH_ARRAY_INX creates several jobs")


def test_a_job_runs_on_when_nobody_reads_its_output(programs, capsys, monkeypatch, tmp_path):
    """As with ``| head``."""
    monkeypatch.setattr("parwrap.launching.slurm.LOOK", 0)
    monkeypatch.setattr("parwrap.launching.slurm.os.path.getmtime", lambda path: float("inf"))
    shown = SHOWN.format(state="RUNNING", reason="None", restarts=0, code="0:0").replace("my work/", "")
    programs(sbatch=f"echo 7; echo said > {tmp_path}/slurm-7.out", scontrol=f"cat <<'END'\n{shown}END")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert "parwrap run: job 7 is running; its log is slurm-7.out\n" + (
            "parwrap run: nobody reads this command's output any longer, but job 7 is running; its log is slurm-7.out. Cancel it with "
            "`scancel 7`\n"
        ) == followed(capsys, 141)


def test_a_loopback_of_this_machine_does_not_go_along_with_a_job_on_several(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    loopback = LOOPBACK["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)

    assert 2 == main(["--launcher", "slurm", "--nodes", "2", "train.py"])
    assert (
        f"parwrap run: GLOO_SOCKET_IFNAME={loopback} is set here and passed to the job, but the job's nodes cannot reach each other "
        "through a loopback interface: unset the variable.\n" == capsys.readouterr().err
    )


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Put stand-ins in the place of SLURM's programs, for what a real one does after minutes, or not here."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def written(**programs: str) -> None:
        for name, does in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)

    return written


def followed(capsys, status: int) -> str:
    """What is said when a job is launched, after that it was."""
    assert status == main(["--launcher", "slurm", "train.py"])
    return capsys.readouterr().err.partition("submitted job 7; Ctrl-C cancels it\n")[2]


def test_a_job_that_slurm_has_forgotten_is_followed_no_further(programs, capsys):
    programs(sbatch="echo 7", scontrol='echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')

    assert (
        "parwrap run: cannot follow job 7 any longer. See whether it still runs with `squeue -j 7`. scontrol printed: "
        "slurm_load_jobs error: Invalid job id specified\n"
    ) == followed(capsys, 2)


def test_what_sbatch_says_where_no_cluster_answers_comes_with_what_to_do(programs, capsys):
    programs(sbatch="echo 'sbatch: error: no record' >&2; echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")

    assert 2 == main(["--launcher", "slurm", "train.py"])
    assert capsys.readouterr().err == (
        "parwrap run: SLURM rejected the job; sbatch printed:\n"
        "sbatch: error: no record\n"
        "sbatch: fatal: Could not establish a configuration source\n"
        "If an option is wrong, change it. If no cluster answers, run this on a node from which you can submit jobs and where `sinfo` "
        "lists partitions. To print the batch script instead, add --dry-run.\n"
    )


def test_a_log_that_this_machine_cannot_read(programs, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("parwrap.launching.slurm.LOOK", 0)
    printed = SHOWN.format(state="FAILED", reason="None", restarts=0, code="0:53")
    programs(sbatch="echo 7", scontrol=f"cat <<'END'\n{printed}END")

    assert (
        "parwrap run: job 7 ended: FAILED, exit code 181\n"
        "parwrap run: cannot read the log of job 7 from here: the log is my work/slurm-7.out on the first node of the job. Set --output "
        "to a path that all nodes share\n"
    ) == followed(capsys, 181)
    programs(scontrol=f"cat <<'END'\n{printed.replace('NodeList=n1', 'NodeList=(null)')}END")
    assert "parwrap run: job 7 ended: FAILED, exit code 181\n" == followed(capsys, 181)


def test_a_job_that_cannot_be_cancelled_goes_on_and_that_is_said(programs, capsys, monkeypatch):
    programs(sbatch="echo '7;far'", scontrol="kill -INT $PPID; sleep 1", scancel="echo 'scancel: error: Access denied' >&2; exit 1")

    assert (
        "parwrap run: job 7 is still running, because scancel failed: scancel: error: Access denied. Try again with "
        "`scancel --clusters=far 7`.\n"
    ) == followed(capsys, 2)


def test_a_job_of_which_there_is_nothing_new_is_asked_after_less_and_less(programs, capsys, monkeypatch, tmp_path):
    """With a clock that goes by leaps: what is new after a second is asked for in a second, after a minute in six."""
    now, asked = [0.0], []
    monkeypatch.setattr(slurm.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def status(number, where):
        asked.append(now[0])
        return slurm.Status("RUNNING" if now[0] < 200 else "COMPLETED", "None", 0, 0, "log", True)

    monkeypatch.setattr(slurm, "_status", status)
    programs(sbatch="echo 7")
    followed(capsys, 0)

    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert [1.0, 1.0, 10.0] == [*pauses[:2], max(pauses)]
    assert pauses == sorted(pauses)
    assert all(pause <= max(1, asked[number] / 10) + slurm.LOOK for number, pause in enumerate(pauses))
