"""Where ranks meet: private folders that are removed, and a store in which nothing is believed that is not signed."""

import json
import os
import subprocess
import sys

import pytest
from torch.distributed import HashStore

from launched import WITHIN, left_in
from parwrap.errors import LaunchError
from parwrap.ranks.rendezvous import _made, job_folder, private_folder
from parwrap.ranks.store import SignedStore

MEETS = """
import json, os, sys, torch
import parwrap
from parwrap.ranks import group as groups
from parwrap.ranks.world import detect
facts = []
for opening in range(2):
    with groups.opened(detect(os.environ)) as group:
        facts.append([group.world.rank, group.world.local_size, group.world.node_rank, parwrap.reduce_sum(1.0), str(group.folder)])
json.dump(facts, open(sys.argv[1] + os.environ["rank"], "w"))
"""
OURS = "PARWRAP_RANK=$rank PARWRAP_WORLD_SIZE=2 PARWRAP_LOCAL_RANK=$rank PARWRAP_LOCAL_WORLD_SIZE=2"
SLURMS = (
    "SLURM_JOB_ID=$$ SLURM_STEP_ID=3 SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST='localhost,elsewhere[1-4]'"
)
UNPLACED = "PARWRAP_RANK=$rank PARWRAP_WORLD_SIZE=2 PARWRAP_LOCAL_RANK=$rank PARWRAP_INIT_METHOD=tcp://127.0.0.1:$(($$ % 5000 + 20000))"


@pytest.mark.parametrize(
    ("variables", "nodes", "folders"),
    [
        pytest.param(OURS, [[2, 0], [2, 0]], 2, marks=pytest.mark.slow),
        pytest.param(f"{OURS} PARWRAP_INIT_METHOD=parwrap://job/mine", [[2, 0], [2, 0]], 2, marks=pytest.mark.slow),
        (SLURMS, [[1, 0], [1, 1]], 4),
    ],
    ids=["by their parent process", "by the name of the job", "on two nodes"],
)
def test_ranks_meet_twice_in_folders_that_they_remove(tmp_path, environ, variables, nodes, folders):
    assert_meet(tmp_path, environ, variables, nodes, folders)


@pytest.mark.slow
def test_ranks_that_are_not_told_which_node_they_are_on_find_out(tmp_path, environ):
    assert_meet(tmp_path, environ, UNPLACED, [[2, 0], [2, 0]], 2)


def assert_meet(tmp_path, environ, variables, nodes, folders):
    (tmp_path / "train.py").write_text(MEETS)
    command = f'for rank in 0 1; do export rank; {variables} "$@" & done; wait'
    ended = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "train.py", "facts-"],
        cwd=tmp_path,
        env=environ,
        timeout=WITHIN,
        capture_output=True,
        text=True,
    )
    facts = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in range(2)]

    assert "" == ended.stderr
    assert [[[rank, *nodes[rank], 2.0]] * 2 for rank in range(2)] == [[each[:-1] for each in openings] for openings in facts]
    assert folders == len({each[-1] for openings in facts for each in openings})
    assert [] == left_in(environ)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"parwrap-{os.getuid()}"


REFUSED = "is not a directory that only this user can access: remove it, or set TMPDIR to another directory, the same for all ranks"


@pytest.mark.parametrize(
    "make",
    [lambda path: path.mkdir(0o755), lambda path: path.symlink_to("/"), lambda path: path.touch(0o600)],
    ids=["of another mode", "a link", "a file"],
)
def test_a_folder_that_others_can_access_is_refused(temporary, make):
    make(temporary)

    with pytest.raises(LaunchError, match=REFUSED), job_folder():
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(temporary):
    temporary.mkdir(0o700)
    os.chown(temporary, 12345, -1)

    with pytest.raises(LaunchError, match=REFUSED):
        private_folder()


def test_a_start_removes_the_folders_that_no_process_uses(temporary):
    with job_folder() as used:
        left = temporary / "left"
        left.mkdir(0o700)
        (left / "scratch").touch()
        with job_folder() as mine:
            assert {used.name, mine.name, "lock"} == {*os.listdir(temporary)}
    assert ["lock"] == os.listdir(temporary)


def test_a_folder_is_in_use_until_its_last_process_ends(temporary):
    """The kernel releases the lock of a process that is killed."""
    held = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_SH); print(1, flush=True); input()"
    folder = private_folder() / "job"
    folder.mkdir(0o700)
    (folder / "lock").touch()
    other = subprocess.Popen([sys.executable, "-c", held, folder / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    with job_folder():
        assert folder.exists()
    other.kill()
    other.communicate()
    with job_folder():
        assert not folder.exists()


@pytest.mark.parametrize("name", ["..", "../elsewhere", "a/b", ".hidden", ""])
def test_the_name_of_a_job_is_no_path(temporary, name):
    with pytest.raises(LaunchError, match="is not the name of a job: use letters, digits, '_' and '-'"):
        _made(private_folder(), name)


@pytest.fixture
def store():
    return HashStore()


def test_signed_values_come_back_with_their_types(store):
    signed = SignedStore(store, "start 0", secret="s3cret")
    values = {"text": "a b\nc", "count": 3, "seconds": 0.5, "flag": True, "many": [1, {"a": None}], "facts": {"b": [2.0]}}
    for key, value in values.items():
        signed.set(key, value)

    assert values == {key: signed.get(key, type(value)) for key, value in values.items()}
    assert signed.has("text", "count")
    assert not signed.has("text", "other")
    assert ["first", "first"] == [signed.set_first("winner", each) for each in ("first", "second")]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda store, key: store.set(key, store.get(key).replace(b"there", b"where")),
        lambda store, key: store.set(key, b"\x80\x04N."),
        lambda store, key: store.set(key, json.dumps("there")),
        lambda store, key: store.set(key, store.get(key.replace("host", "other"))),
        lambda store, key: store.set(key, store.get(key.replace("start 0", "start 1"))),
        lambda store, key: SignedStore(store, "start 0", secret="guessed").set("host", "there"),
    ],
    ids=["changed", "pickled", "unsigned", "from another key", "from another start", "with another secret"],
)
def test_a_value_that_was_tampered_with_is_refused(store, tamper):
    signed = SignedStore(store, "start 0", secret="s3cret")
    SignedStore(store, "start 1", secret="s3cret").set("host", "there")
    signed.set("other", "there")
    signed.set("host", "there")
    assert "there" == signed.get("host", str)
    tamper(store, "parwrap/start 0/host")

    with pytest.raises(LaunchError) as refusal:
        signed.get("host", str)
    assert str(refusal.value) == (
        "the value of 'host' in the store of the job has a wrong signature: another job or program writes into this store, or the nodes "
        "have different secrets. Set PARWRAP_SECRET to the same text on all nodes, and choose a port that no other job uses."
    )


@pytest.mark.parametrize(("value", "kind"), [(1, str), ("1", int), (True, int), ([], dict)])
def test_a_value_of_another_type_is_refused(store, value, kind):
    signed = SignedStore(store, "start 0", secret="s3cret")
    signed.set("host", value)

    with pytest.raises(LaunchError, match=f"is {type(value).__name__}, not {kind.__name__}: start the same version of parwrap"):
        signed.get("host", kind)
