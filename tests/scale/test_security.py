"""Another user of the machine, or of the network, cannot take part in a job: nothing has an effect, or it is refused."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore

import parwrap
from parwrap.errors import LaunchError
from parwrap.ranks.store import SignedStore

PACKAGE = Path(parwrap.__file__).parent
NOBODY = 65534
WITHIN = 60
"""Seconds, far above what a job takes on a busy machine."""

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")

TRAINING = """
import os, time, parwrap, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
step = 0
while not parwrap.any_rank(step >= 30 and os.path.exists(LEFT)):
    optimizer.zero_grad()
    model(torch.full((2, 3), 1.0 + parwrap.rank())).square().mean().backward()
    optimizer.step()
    step += 1
    if step == 5:
        print("up", flush=True)
    time.sleep(0.01)
print("trained")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like ``/tmp``, in which every user may write, as the folder for temporary files."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(attack: Callable[[], object]) -> str:
    """Run ``attack`` in a process of another user, which has no rights. Returns the text of the error, if it raises one."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        text = ""
        try:
            os.chdir("/")
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attack()
        except BaseException as error:
            text = repr(error)
        os.write(writing, text.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    os.waitpid(process, 0)
    with os.fdopen(reading, errors="replace") as pipe:
        return pipe.read()


def start(folder: Path, shared: Path, left: Path) -> subprocess.Popen:
    """Start a job of two ranks, which trains until ``left`` exists."""
    (folder / "train.py").write_text(TRAINING.replace("LEFT", repr(str(left))))
    return subprocess.Popen(
        [sys.executable, "-m", "parwrap.run", "--nproc-per-node", "2", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "TMPDIR": str(shared), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def job(tmp_path, shared) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A job that trains, and the file whose existence ends it."""
    process = start(tmp_path, shared, tmp_path / "enough")
    try:
        assert "up\n" == process.stdout.readline()
        yield process, tmp_path / "enough"
    finally:
        process.kill()
        process.communicate()


def assert_unharmed(process: subprocess.Popen, enough: Path) -> None:
    """The job trains on and ends well."""
    enough.touch()
    stdout, stderr = process.communicate(timeout=WITHIN)

    assert (0, "trained\n") == (process.returncode, stdout), stderr
    assert "Traceback" not in stderr


def processes_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def listening(process: subprocess.Popen) -> set[tuple[str, int]]:
    """The addresses at which the job listens."""
    sockets = (each for one in processes_of(process) for each in one.net_connections("inet") if each.status == psutil.CONN_LISTEN)
    return {(each.laddr.ip, each.laddr.port) for each in sockets}


def modes(folder: Path) -> dict[str, str]:
    return {path.name: stat.filemode(path.lstat().st_mode) for path in folder.rglob("*")}


@needs_root
def test_another_user_can_neither_read_nor_change_nor_stop_a_job(job, shared):
    process, enough = job
    folder = shared / f"parwrap-{os.getuid()}"
    paths = [folder, *folder.rglob("*")]
    before = modes(folder)

    assert {"lock", "store"} < {path.name for path in paths}
    attacks = (
        lambda path: os.listdir(path) if path.is_dir() else path.read_bytes(),
        lambda path: (path / "store" if path.is_dir() else path).write_bytes(b"{}"),
        lambda path: path.unlink(),
        lambda path: path.rename(shared / "moved"),
        lambda path: path.chmod(0o777),
    )

    def attack_all() -> None:
        for attack, path in itertools.product(attacks, paths):
            with pytest.raises(PermissionError):
                attack(path)

    assert "" == as_nobody(attack_all)
    assert before == modes(folder)
    for pid in [each.pid for each in processes_of(process)]:
        assert as_nobody(lambda pid=pid: os.kill(pid, 15)).startswith("PermissionError(")
        assert as_nobody(lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes()).startswith("PermissionError(")
    assert_unharmed(process, enough)


@needs_root
@pytest.mark.parametrize("kind", ["folder", *(pytest.param(each, marks=pytest.mark.slow) for each in ("link", "file"))])
def test_what_another_user_has_put_at_the_place_of_the_folder_is_refused(tmp_path, shared, kind):
    place = shared / f"parwrap-{os.getuid()}"
    make = {"folder": place.mkdir, "link": lambda: place.symlink_to(tmp_path), "file": place.touch}[kind]

    assert "" == as_nobody(make)
    (tmp_path / "enough").touch()
    process = start(tmp_path, shared, tmp_path / "enough")
    _, stderr = process.communicate(timeout=WITHIN)

    assert process.returncode
    assert f"the ranks of this node share {place}, which is not a directory that only this user can access: remove it" in stderr


def send(addresses: set[tuple[str, int]], texts: list[bytes]) -> None:
    """Connect to each address, and send each of the texts; some connections stay open."""
    kept = []
    for address in addresses:
        for text in texts:
            kept.append(socket.create_connection(address, timeout=5))
            with suppress(OSError):
                kept[-1].sendall(text)
    time.sleep(0.5)
    for connection in kept[::2]:
        connection.close()
    time.sleep(0.5)


JUNK = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x00" * 4096,
    b"\xff" * 4096,
    os.urandom(65536),
    (3).to_bytes(4, "little") + b"\x00" + (1).to_bytes(8, "little") + b"x",
    *(number.to_bytes(8, "little") for number in range(4)),
]
"""Also a request that begins like one to torch's store, and small numbers, with which gloo's connections begin."""


@needs_root
def test_junk_from_another_user_does_not_disturb_a_job(job):
    process, enough = job
    addresses = listening(process)
    socket.getaddrinfo("127.0.0.1", 0)  # imports a codec, which the other user may not read

    assert addresses
    assert all(host.startswith("127.") or host == "::1" for host, _ in addresses), addresses
    assert "" == as_nobody(lambda: send(addresses, JUNK))
    assert process.poll() is None
    assert_unharmed(process, enough)


# several nodes


@pytest.fixture
def stores():
    """Torch's store, and what parwrap signs in it."""
    store = HashStore()
    return store, SignedStore(store, "start 0", secret="s3cret")


WRONG = r"the value of 'address' in the store of the job has a wrong signature: .* Set PARWRAP_SECRET to the same text on all nodes"


@pytest.mark.parametrize(
    "tamper",
    [
        lambda value: b"",
        lambda value: b"{}",
        lambda value: value.replace(b"10.0.0.1", b"10.6.6.6"),
        lambda value: value + b" ",
        lambda value: value[64:],
        lambda value: b"\xff\xfe" + value,
        lambda value: b"0" * 64 + value[64:],
    ],
)
def test_a_tampered_value_is_refused(stores, tamper):
    store, signed = stores
    signed.set("address", "10.0.0.1")
    assert "10.0.0.1" == signed.get("address", str)
    store.set("parwrap/start 0/address", tamper(store.get("parwrap/start 0/address")))

    with pytest.raises(LaunchError, match=WRONG):
        signed.get("address", str)


@pytest.mark.parametrize(
    "original",
    [
        lambda store: SignedStore(store, "start 0", secret="another"),
        lambda store: SignedStore(store, "start 0", secret=""),
        lambda store: SignedStore(store, "start 1", secret="s3cret"),
    ],
    ids=["with another secret", "without the secret", "of another start"],
)
def test_a_replayed_value_is_refused(stores, original):
    store, signed = stores
    other = HashStore()
    original(other).set("address", "10.6.6.6")
    prefix = "start 1" if other.check(["parwrap/start 1/address"]) else "start 0"
    store.set("parwrap/start 0/address", other.get(f"parwrap/{prefix}/address"))

    with pytest.raises(LaunchError, match=WRONG):
        signed.get("address", str)


def test_the_value_of_another_key_is_refused(stores):
    store, signed = stores
    signed.set("host", "10.0.0.2")
    store.set("parwrap/start 0/address", store.get("parwrap/start 0/host"))

    with pytest.raises(LaunchError, match=WRONG):
        signed.get("address", str)


def test_whoever_writes_first_does_not_decide(stores):
    store, signed = stores
    store.set("parwrap/start 0/address", "../../etc")

    with pytest.raises(LaunchError, match=WRONG):
        signed.set_first("address", "10.0.0.1")


def test_a_value_of_another_type_is_refused(stores):
    _, signed = stores
    signed.set("address", ["10.0.0.1"])

    with pytest.raises(LaunchError, match="the value of 'address' in the store of the job is list, not str: start the same version"):
        signed.get("address", str)


# the source


@cache
def all_calls() -> dict[str, list[tuple[str, ast.Call]]]:
    """The calls in the package, each with its file, by the name of the function or method."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                found[getattr(node.func, "attr", getattr(node.func, "id", ""))].append((str(path.relative_to(PACKAGE)), node))
    return found


def calls(name: str) -> list[tuple[str, ast.Call]]:
    return all_calls()[name]


UNPICKLING = {
    "inline/remote_exception.py": "an error or a result of this rank, to see whether it can be sent",
    "inline/returned.py": "states of models from a rank, on their way back to the caller",
    "insight/recording.py": "tensors and numbers only, from the folder of this command",
    "inline/spawning.py": "the job of a spawned rank, from the folder that only this user can enter",
    "ranks/collectives.py": "what ranks send over their process group",
    "strategies/parameter_server.py": "states of optimizers, over the process group",
    "strategies/ps_server.py": "optimizers, over the process group",
    "testing/plugin.py": "the class of a test's error, from a rank of this test",
    "testing/rank_process.py": "tests, from the fork server",
}
"""The files that unpickle, and what; never a value of a store."""


def test_only_objects_of_the_users_own_ranks_and_tests_are_unpickled():
    for name in ("loads", "load", "Unpickler"):
        found = {path for path, call in calls(name) if ast.unparse(call.func).startswith(("pickle.", "marshal.", "torch."))}
        assert found <= UNPICKLING.keys(), name


def test_only_one_file_reads_a_store_without_a_signature():
    """A signed value is read with its type, so with two arguments. An error note shows who failed first: as text, and nothing else."""

    def is_raw(call: ast.Call) -> bool:
        owner = ast.unparse(call.func).rpartition(".")[0].lower()
        return owner.endswith("store") and len(call.args) == 1

    assert {"ranks/store.py"} == {path for path, call in calls("get") if is_raw(call)}
    assert {"ranks/store.py", "ranks/group.py"} == {path for path, _ in calls("compare_set")}
    assert set() == {path for path, _ in calls("multi_get")}


def test_no_path_is_made_of_a_value_from_a_store():
    for name in ("Path", "open", "joinpath", "join", "mkdir", "unlink", "rmtree", "import_module", "exec", "eval"):
        made = [(path, text) for path, call in calls(name) for text in map(ast.unparse, call.args) if "store.get(" in text.lower()]
        assert [] == made, name


def test_a_number_from_a_store_names_a_folder_and_nothing_else(tmp_path, monkeypatch):
    """Also signed, a value cannot lead out of the private folder."""
    from parwrap.ranks import rendezvous

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("..", "../x", "/etc", "a/b", ".hidden", "", "a\0b"):
        with pytest.raises(LaunchError, match="is not the name of a job"):
            rendezvous._made(tmp_path, name)
