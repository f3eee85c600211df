"""A real SLURM of two nodes on this machine, for the length of a block: munge, a controller and two daemons in a temporary directory.

Needs Debian's ``slurm-wlm`` and ``munge`` and the rights of root; ``NotHere`` says what is missing.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["NotHere", "slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue", "unshare")
WITHIN = 30.0
"""Seconds, far above what it takes to start."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=10
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=debug Nodes=n[1-2] Default=YES OverSubscribe=FORCE:4 MaxTime=INFINITE
"""


class NotHere(Exception):
    """Why SLURM cannot be started on this machine."""


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Start it; gives the variables by which its commands find it."""
    if missing := [name for name in PROGRAMS if not _path(name)]:
        raise NotHere(f"there is no {', '.join(missing)}; on Debian: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        raise NotHere("its daemons need the rights of root")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        raise NotHere("unshare -m is not allowed, so its nodes cannot be given names")
    with ExitStack() as undo:
        directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)  # munge asks for it, and of the folders above it
        (directory / "state").mkdir()
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o600)
        (directory / "hosts").write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 n1 n2\n")
        controller, first, second = _free_ports(3)
        configuration = directory / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(host=socket.gethostname(), directory=directory, controller=controller, first=first, second=second)
        )
        environ = {**os.environ, "SLURM_CONF": str(configuration)}

        def start(name: str, *arguments: str, log: str = "", among_names: bool = False) -> None:
            command = [_path(name), *arguments]
            if among_names:  # else ranks would look for nodes that no name server knows
                command = ["unshare", "-m", "sh", "-c", f'mount --bind {directory}/hosts /etc/hosts && exec "$@"', "sh", *command]
            with (directory / f"{log or name}.log").open("w") as file:
                process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)
            undo.callback(_end, process)

        files = ("key", "socket", "pid", "log", "seed")
        options = [f"--{name if name == 'socket' else f'{name}-file'}={directory}/munge.{name}" for name in files]
        start("munged", "--foreground", *options)
        _wait((directory / "munge.socket").exists, directory)
        start("slurmctld", "-D")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node, log=node, among_names=True)
        _wait(lambda: _output_of(environ, "sinfo", "-hNo", "%T").split() == ["idle", "idle"], directory)
        undo.callback(_wait, lambda: not _output_of(environ, "squeue", "-h"), directory)
        undo.callback(_output_of, environ, "scancel", "--user=root")
        yield {"SLURM_CONF": str(configuration)}


def _path(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(number: int) -> list[int]:
    with ExitStack() as undo:
        listeners = [undo.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in listeners]


def _output_of(environ: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout


def _wait(ready, directory: Path) -> None:
    until = time.monotonic() + WITHIN
    while not ready():
        if time.monotonic() > until:
            last = {log.name: log.read_text().splitlines()[-1:] for log in sorted(directory.glob("*.log"))}
            raise NotHere(f"it did not come up; the last lines of its logs: {last}")
        time.sleep(0.1)


def _end(process: subprocess.Popen) -> None:
    """With all that it has started."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
