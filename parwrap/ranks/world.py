"""Reads launch variables into a frozen ``World``, which says which rank this process is.

``launchers.py`` has the names that launchers use; this file draws conclusions from those that are set. It only reads the environment
that is passed to it; ``group.py`` starts the process group.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from parwrap.errors import LaunchError
from parwrap.ranks.launchers import LAUNCHERS, NODE_VARIABLES, Launcher, node_of

__all__ = ["INIT_METHOD", "IN_SCRATCH", "ONE_NODE", "World", "detect", "launch_variables"]

INIT_METHOD = "PARWRAP_INIT_METHOD"
"""The variable with the rendezvous as a URL for ``init_process_group``, which parwrap's launcher or the user sets."""

IN_SCRATCH = "PARWRAP_IN_SCRATCH"
"""The environment variable that is 1 if rank 0 writes to scratch too, so that the launch changes no file of the user."""

ONE_NODE = "parwrap"
"""The scheme of a URL for ranks that meet on one node, without a port; see ``rendezvous.py``."""

BY_HAND = "set PARWRAP_RANK, PARWRAP_WORLD_SIZE and PARWRAP_LOCAL_RANK to the right values, or PARWRAP_WORLD_SIZE=1 to run on one rank"

_TELLING = frozenset(name for row in LAUNCHERS for names in (row.rank, row.size, row.local_rank) for name in names) | NODE_VARIABLES
"""Every launcher sets at least one of these variables."""

PORTS = range(25000, 32000)
"""The range of derived ports: below the ports that systems assign, and different from those that other tools derive."""


@dataclass(frozen=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: this process, counted over all nodes from 0.
        size: the number of ranks.
        local_rank: this process, counted on its own node from 0.
        local_size: the number of ranks on this node; 0 if the launcher does not set it, until the process group is open.
        node_rank: this node, counted from 0; ``None`` if the launcher does not set it, until the process group is open.
        launcher: the name of the row of ``LAUNCHERS`` with these facts; ``None`` for a process started by hand.
        init_method: the rendezvous, as ``torch.distributed.init_process_group`` takes it; ``None`` if unknown.
        node_ranks: the ranks of this node in ascending order; empty until the process group is open.

    >>> World().size
    1
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int | None = 0
    launcher: str | None = None
    init_method: str | None = "env://"
    node_ranks: tuple[int, ...] = field(default=(), repr=False)

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks are on one node.

        >>> World(size=4, local_size=2).on_one_node
        False
        """
        return self.local_size == self.size

    @property
    def rendezvous(self) -> str:
        """The ``init_method`` for ``torch.distributed.init_process_group``.

        Raises:
            LaunchError: the launcher does not say where the ranks can meet.
        """
        if self.init_method is None:
            raise LaunchError(
                f"{self.launcher} does not say where rank 0 of {self.size} can be reached, and MASTER_ADDR and MASTER_PORT are not both "
                "set: set MASTER_ADDR to the node of rank 0 and MASTER_PORT to a port that is free there, on all ranks (`mpirun -x "
                "MASTER_ADDR=... -x MASTER_PORT=...`; with MPICH and Intel MPI `mpiexec -genv MASTER_ADDR ... -genv MASTER_PORT ...`)."
            )
        return self.init_method


def detect(environ: Mapping[str, str]) -> World:
    """The :class:`World` that ``environ`` describes; a single rank if no launcher has set variables.

    Raises:
        LaunchError: some of a launcher's variables are set and others are not, their values make no sense, two launchers disagree, or
            this is the only process of its node and has to start the ranks there.

    >>> detect({})
    World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher=None, init_method='env://')
    >>> detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}).init_method
    'parwrap://launcher/PMI_RANK,PMI_SIZE'
    """
    if _TELLING.isdisjoint(environ):  # looking each one up would take several times as long
        return World()
    claims = list(_claims(environ))
    claims = [claim for claim in claims if not claim.of_only_node] or claims
    whole = [claim for claim in claims if not claim.missing]
    if not whole:
        by_hand = claims and claims[0].launcher is LAUNCHERS[0]
        if not by_hand and (node := node_of(environ)) and not node.is_only:
            raise LaunchError(
                f"{node.variables} number the nodes of a job (as {node.launcher} does), not its ranks: start the ranks of this node with "
                f"`parwrap run train.py`, which reads these variables, or {BY_HAND}."
            )
        if claims:
            raise _half(claims[0])
        return World()
    for other in claims:
        if not _may_surround(whole[0], other):
            raise LaunchError(
                f"two launchers disagree about this process: {whole[0]}, but {other}. Unset the variables of the wrong one, or {BY_HAND}."
            )
    return _world(whole[0], [other for other in whole if other.agrees(whole[0])], environ)


def launch_variables() -> tuple[str, ...]:
    """The names of all variables that would show a script that it was launched on several ranks.

    These are the variables for ranks, their numbers and their rendezvous. Those that only describe a job, such as ``SLURM_JOB_ID``, are
    left out: a script may use them on one rank too.

    >>> "RANK" in launch_variables(), "SLURM_JOB_ID" in launch_variables()
    (True, False)
    """
    names = [INIT_METHOD]
    for row in LAUNCHERS:
        names += [*row.rank, *row.size, *row.local_rank, *row.local_size, *row.node_rank, *row.others]
    names += [*sorted(NODE_VARIABLES - {"SM_HOSTS"}), "GROUP_WORLD_SIZE", "CROSS_SIZE"]
    return tuple(dict.fromkeys(names))


class _Claim(NamedTuple):
    """The facts that the variables of one launcher state."""

    launcher: Launcher
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int
    names: tuple[str, ...]
    """The variables that hold rank, size and local rank, for messages."""
    missing: tuple[str, ...]
    """Those of ``names`` that are not set."""
    of_only_node: bool
    """Whether a world size of 1 may count nodes rather than ranks."""

    def __str__(self) -> str:
        facts = zip(self.names[:2], (self.rank, self.size), strict=True)
        return f"{self.launcher.name} says {' and '.join(f'{name}={value}' for name, value in facts if value is not None)}"

    def agrees(self, other: _Claim) -> bool:
        """Whether the rank and size of this claim, as far as known, are the same in ``other``, which is complete."""
        return self.rank in (None, other.rank) and self.size in (None, other.size)


def _claims(environ: Mapping[str, str]) -> Iterator[_Claim]:
    torchs = False
    for launcher in LAUNCHERS:
        needed = launcher.rank, launcher.size, launcher.local_rank
        names = [_first_set(environ, each) for each in needed]
        if names == [None, None, None] or (torchs and launcher.has_rendezvous) or not launcher.applies(environ):
            continue
        torchs |= launcher.has_rendezvous
        rank, size, local_rank = (_integer(environ, name) if name else None for name in names)
        of_only_node = launcher.has_rendezvous and size == 1 and local_rank is None
        if size == 1:
            rank, local_rank = rank or 0, local_rank or 0
        shown = tuple(name or every[0] for name, every in zip(names, needed, strict=True))
        missing = tuple(name for name, value in zip(shown, (rank, size, local_rank), strict=True) if value is None)
        claim = _Claim(launcher, rank, size, local_rank, _local_size(environ, launcher, size), shown, missing, of_only_node)
        if not missing:
            _check(claim, environ)
        yield claim
        if launcher is LAUNCHERS[0]:  # set by the user
            return


def _local_size(environ: Mapping[str, str], launcher: Launcher, size: int | None) -> int:
    """The number of ranks on this node, or 0 if unknown."""
    if size == 1:
        return 1
    if name := _first_set(environ, launcher.local_size):
        return _at_least_one(environ, name)
    if told := launcher.local_size_of(environ):
        return int(told)
    nodes = _first_set(environ, launcher.nodes)
    count = _at_least_one(environ, nodes) if nodes else 0
    return {1: size or 0, size: 1}.get(count, 0)


def _check(claim: _Claim, environ: Mapping[str, str]) -> None:
    rank, size, local_rank = claim.names
    for name, value, limit, text in (
        (rank, claim.rank, claim.size, f"{size}={claim.size}"),
        (local_rank, claim.local_rank, claim.local_size or claim.size, f"the {claim.local_size or claim.size} ranks of this node"),
    ):
        if not 0 <= (value or 0) < (limit or 0):
            raise LaunchError(f"{name}={value} does not fit {text}: ranks start at 0. Correct it, or unset all variables of its launcher.")
    if claim.local_size > (claim.size or 0):
        variable = _first_set(environ, claim.launcher.local_size)
        here = (
            f"{variable}={claim.local_size} ranks on this node"
            if variable
            else f"{claim.local_size} ranks on this node, as {claim.launcher.name} says,"
        )
        raise LaunchError(f"{here} are more than {size}={claim.size} ranks in all. Correct one of the two, or {BY_HAND}.")


def _may_surround(inner: _Claim, other: _Claim) -> bool:
    """Whether ``other`` agrees with ``inner``, or may come from an outer launcher, which started one process on this node."""
    if other.agrees(inner) or inner.launcher.elastic:
        return True
    return not other.missing and (inner.size or 0) > 1 and 1 in (other.local_size, other.size)


def _half(claim: _Claim) -> LaunchError:
    present = " and ".join(name for name in claim.names if name not in claim.missing)
    missing = " and ".join(claim.missing)
    by_hand = claim.launcher is LAUNCHERS[0]
    return LaunchError(
        f"{present} {'are' if ' ' in present else 'is'} set but {missing} {'are' if ' ' in missing else 'is'} not, so the ranks cannot be "
        f"identified. If no launcher started this process, unset {present}: the process then runs as one rank. To start several ranks, use "
        f"`parwrap run`. Otherwise set {missing} too" + ("." if by_hand else f", as {claim.launcher.name} does, or {BY_HAND}.")
    )


def _world(claim: _Claim, agreeing: list[_Claim], environ: Mapping[str, str]) -> World:
    """The world of ``claim``, completed by other claims that agree."""
    launchers = [each.launcher for each in agreeing]
    size = claim.size or 1
    local_size = next((each.local_size for each in agreeing if each.local_size), 0)
    node = next((name for each in launchers if (name := _first_set(environ, each.node_rank))), None)
    node_rank = 0 if local_size == size else _integer(environ, node) if node else None
    method = "env://" if size == 1 and INIT_METHOD not in environ else _init_method(claim, launchers, local_size, environ)
    return World(claim.rank or 0, size, claim.local_rank or 0, local_size, node_rank, claim.launcher.name, method)


def _init_method(claim: _Claim, launchers: list[Launcher], local_size: int, environ: Mapping[str, str]) -> str | None:
    """The rendezvous: the user's, else the launcher's, else a folder if all ranks are on one node, else a port on the node of rank 0."""
    if INIT_METHOD in environ:
        return environ[INIT_METHOD]
    masters = [name for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    if "MASTER_PORT" in masters and not 0 < _integer(environ, "MASTER_PORT") < 2**16:
        raise LaunchError(f"MASTER_PORT={environ['MASTER_PORT']} is not a port: use a number from 1 to 65535.")
    if len(masters) == 2:
        return "env://"
    if local_size == claim.size:
        job = _joined(environ, [each.job for each in launchers])
        return f"{ONE_NODE}://job/{zlib.crc32(job):08x}" if job else f"{ONE_NODE}://launcher/{','.join(claim.names[:2])}"
    host = environ.get("MASTER_ADDR") or next((host for each in launchers if (host := each.host(environ))), None)
    job = _joined(environ, [each.port for each in launchers])
    port = environ.get("MASTER_PORT") or (job and PORTS[zlib.crc32(job) % len(PORTS)])
    if host and port:
        return f"tcp://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{port}"
    return None


def _joined(environ: Mapping[str, str], choices: list[tuple[str, ...]]) -> bytes:
    """The names and values of the variables in the first nonempty tuple of ``choices``, in one string."""
    names = next(filter(None, choices), ())
    return "/".join(f"{name}={environ[name]}" for name in names if name in environ).encode(errors="replace")


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _at_least_one(environ: Mapping[str, str], name: str) -> int:
    if (value := _integer(environ, name)) < 1:
        raise LaunchError(f"{name}={value} must be at least 1. A launcher normally sets this variable: unset it, or correct it.")
    return value


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(
            f"{name}={environ[name]!r} is not an integer. A launcher normally sets this variable: unset it, or start with `parwrap run`."
        ) from None
