import pytest

from parwrap.errors import LaunchError
from parwrap.world import INIT_METHOD, LAUNCHERS, World, launch_variables, read_world

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_no_launcher_is_one_rank():
    assert World() == read_world({})
    assert World() == read_world({"HOME": "/", "MASTER_ADDR": "localhost"})


def test_torchruns_variables():
    assert World(3, 4, 1, 2, 1, "torchrun") == read_world(TORCHRUN)


def test_where_parwrap_run_lets_its_ranks_meet():
    assert "file:///somewhere" == read_world({**TORCHRUN, INIT_METHOD: "file:///somewhere"}).init_method


def test_without_a_local_size_all_ranks_are_on_one_node():
    assert World(1, 2, 1, 2, 0, "torchrun") == read_world({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE, LOCAL_RANK is not, so the ranks cannot be told apart. torchrun sets all of"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE, LOCAL_RANK is set but RANK is not"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4: ranks are counted from 0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not below"),
    ],
)
def test_half_set_or_senseless_variables_are_refused(environ, text):
    with pytest.raises(LaunchError, match=text):
        read_world(environ)


def test_every_variable_by_which_a_script_could_tell_is_listed():
    assert set(TORCHRUN) | {INIT_METHOD, "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} <= set(launch_variables())


def test_launchers_are_told_apart_by_name():
    assert len(LAUNCHERS) == len({launcher.name for launcher in LAUNCHERS})
