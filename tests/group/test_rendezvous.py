"""Where ranks of one node meet, and what they find out about nodes there."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import parwrap
from parwrap.errors import LaunchError
from parwrap.group.group import current, opened
from parwrap.group.rendezvous import on_loopback, placed
from parwrap.world.world import World


def started_again(world: World, launchers_word: str):
    """The process group of the ranks of a test, opened once more as under another launcher."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return opened(World(world.rank, world.size, world.rank, world.size, 0, "test", launchers_word), "gloo")


@pytest.mark.ranks(2)
def test_ranks_of_one_node_meet_without_a_port_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    world = current().world
    for _ in range(2):
        with started_again(world, "parwrap://job/7") as group:
            assert {0: 0, 1: 10} == group.exchange("test", world.rank * 10)
            listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
            assert {"127.0.0.1"} == {*listening}
            assert "lo" == os.environ["GLOO_SOCKET_IFNAME"]
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        with started_again(world, f"file://{tmp_path}/other"):
            parwrap.barrier()  # both have left the one before
            (directory,) = tmp_path.glob("parwrap-*")
            assert [] == os.listdir(directory)
            assert 0o700 == directory.stat().st_mode & 0o777


def test_a_directory_that_is_not_ours_alone_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"parwrap-{os.getuid()}"
    text = f"the ranks of this node share {directory}, but that is not a directory that only this user can access: remove it, or set TMPDIR"
    directory.mkdir(mode=0o755)
    with pytest.raises(LaunchError, match=text):
        next(dist.rendezvous("parwrap://job/7", 0, 2))
    directory.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=text):
        next(dist.rendezvous("parwrap://job/7", 0, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_rank_below_a_shell_of_its_own_sees_the_launcher_above():
    shown = "from parwrap.group.rendezvous import _launcher_process as p; print(p(['PMI_RANK', 'PMI_SIZE']))"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PMI_SIZE": "3", "PMI_RANK": "1"}
    command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", shown]
    seen = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=60).stdout

    assert str(os.getpid()) == seen.partition("-")[0]


class FilledStore(dict):
    """A store in which all other ranks have written already."""

    def set(self, key, value):
        self.setdefault(key, value)

    get = dict.__getitem__


def test_which_ranks_share_a_node_is_found_out_where_the_launcher_does_not_tell(monkeypatch):
    names = ["a", "b", "a", "c", "b"]
    store = FilledStore({f"node of {rank}": name for rank, name in enumerate(names)})
    asked = World(2, 5, 1, local_size=0, node_rank=None)

    assert replace(asked, local_size=2, node_rank=0) == placed(asked, store)
    assert replace(asked, rank=4, local_size=2, node_rank=1) == placed(replace(asked, rank=4), store)
    assert replace(asked, rank=3, local_size=1, node_rank=2) == placed(replace(asked, rank=3, local_size=1), store)
    assert World() == placed(World(), None)


@pytest.mark.ranks(2)
def test_the_group_knows_what_the_launcher_has_not_told(tmp_path):
    world = current().world
    dist.destroy_process_group()
    with opened(World(world.rank, 2, world.rank, 0, None, "test", f"file://{tmp_path}/store"), "gloo") as group:
        assert (2, 0) == (group.world.local_size, group.world.node_rank)


def test_what_the_user_has_said_of_interfaces_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("TP_SOCKET_IFNAME", raising=False)
    with on_loopback(World(0, 2, 0, 2)):
        assert ("eth7", "lo") == (os.environ["GLOO_SOCKET_IFNAME"], os.environ["TP_SOCKET_IFNAME"])
    assert "TP_SOCKET_IFNAME" not in os.environ
    with on_loopback(World(0, 4, 0, 2)):
        assert "TP_SOCKET_IFNAME" not in os.environ
