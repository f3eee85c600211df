"""Who this process is among the ranks: launch variables in, a frozen :class:`World` out.

Everything known about a launcher is one row of ``LAUNCHERS``. This file reads the environment that it is given and writes
none; starting the process group is ``group.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parwrap.errors import LaunchError

__all__ = ["INIT_METHOD", "LAUNCHERS", "Launcher", "World", "launch_variables", "read_world"]

INIT_METHOD = "PARWRAP_INIT_METHOD"
"""Set by ``parwrap.run`` for its own ranks: where they meet, as a URL for ``init_process_group``."""


@dataclass(frozen=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: this process, counted over all nodes from 0.
        size: the number of ranks.
        local_rank: this process, counted on its own node from 0.
        local_size: the number of ranks on this node.
        node_rank: this node, counted from 0.
        launcher: the row of ``LAUNCHERS`` that the facts come from; ``None`` for a process started by hand.
        init_method: where the ranks meet, as ``torch.distributed.init_process_group`` takes it.

    >>> World().size
    1
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    launcher: str | None = None
    init_method: str = "env://"


@dataclass(frozen=True)
class Launcher:
    """The names under which one launcher tells a process who it is.

    ``rank``, ``size`` and ``local_rank`` must be set together. ``others`` are further variables by which a script can
    tell that it was launched.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node_rank: str
    others: tuple[str, ...] = ()


LAUNCHERS = (
    Launcher(
        name="torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        others=(
            *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
            *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
            *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
        ),
    ),
)


def read_world(environ: Mapping[str, str]) -> World:
    """The :class:`World` that ``environ`` describes; a single rank where no launcher has left its variables.

    Raises:
        LaunchError: some of a launcher's variables are set and others are not, or their values make no sense.

    >>> read_world({})
    World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher=None, init_method='env://')
    >>> read_world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}).node_rank
    1
    """
    for launcher in LAUNCHERS:
        needed = (launcher.rank, launcher.size, launcher.local_rank)
        present = [name for name in needed if name in environ]
        if not present:
            continue
        if missing := [name for name in needed if name not in environ]:
            raise LaunchError(
                f"{', '.join(present)} is set but {', '.join(missing)} is not, so the ranks cannot be told apart. "
                f"{launcher.name} sets all of {', '.join(needed)}: start with `python -m parwrap.run`, "
                f"or unset {', '.join(present)} to run on one rank."
            )
        return _checked(
            World(
                rank=_integer(environ, launcher.rank),
                size=_integer(environ, launcher.size),
                local_rank=_integer(environ, launcher.local_rank),
                local_size=_integer(environ, launcher.local_size, default=launcher.size),
                node_rank=_integer(environ, launcher.node_rank, default=None),
                launcher=launcher.name,
                init_method=environ.get(INIT_METHOD, "env://"),
            ),
            launcher,
        )
    return World()


def launch_variables() -> tuple[str, ...]:
    """The names of all variables by which a script could tell that it was launched on several ranks.

    >>> "RANK" in launch_variables()
    True
    """
    names = [INIT_METHOD]
    for launcher in LAUNCHERS:
        names += [launcher.rank, launcher.size, launcher.local_rank, launcher.local_size, launcher.node_rank]
        names += launcher.others
    return tuple(names)


def _integer(environ: Mapping[str, str], name: str, default: str | None = "") -> int:
    """The value of ``name``; where it is not set, that of the variable ``default``, or 0 for ``None``."""
    if name not in environ and default is None:
        return 0
    if name not in environ and default:
        name = default
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(
            f"{name}={environ[name]!r} is not a whole number; a launcher sets it, so unset it or start with `python -m parwrap.run`."
        ) from None


def _checked(world: World, launcher: Launcher) -> World:
    if not 0 <= world.rank < world.size:
        raise LaunchError(f"{launcher.rank}={world.rank} is not below {launcher.size}={world.size}: ranks are counted from 0.")
    if not 0 <= world.local_rank < world.local_size:
        raise LaunchError(
            f"{launcher.local_rank}={world.local_rank} is not below {launcher.local_size}={world.local_size}: ranks are counted from 0."
        )
    return world
