"""What the ranks agree on before a loader is split: that they hold the same samples in the same order.

Where their lists differ, rank 0's are used with a warning if that is safe; otherwise there is only the warning. All values go through the
store. A pass over unchanged lists, agreed on before, costs no sync point.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from parwrap.coordination.call_site import warn
from parwrap.data.dataset_summaries import Held, Items, held_by, items_of, length_of, summary
from parwrap.errors import RankMismatchError
from parwrap.group.group import Group
from parwrap.system.wording import counted

__all__ = ["Agreement", "SameDraws"]

LARGEST = 2**25
"""The most bytes of a dataset's lists to send; for larger ones there is only a warning."""

LOADER, ITEMS, SAMPLER, DRAWS = "training loader", "training data in another order", "DistributedSampler", "first draws of a sampler"
DRAWN = "indices to look at"
"""The purposes of the collectives."""

PIECE = 2**22
"""Bytes in one value of the store, which takes at most 8 MiB."""

MOST_DRAWS = 10**7
"""The number of batches of one pass that rank 0 lists for the others, if their samplers draw others."""


class Agreement:
    """Compares the ranks' data, and uses rank 0's where it can.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rank = group.world.rank
        self._known: dict[int, tuple[Any, int, dict[str, str | None]]] = {}
        for kind in (LOADER, ITEMS, SAMPLER, DRAWS, DRAWN):
            group.coordinator.answer(kind, lambda detail, present: None)  # a rank that has left splits nothing

    def changed(self, loader: DataLoader) -> list[list[Held]]:
        """The sequences behind ``loader`` that still need agreement."""
        return [each for each in held_by(loader) if each and self._is_new(each, loader)]

    def _is_new(self, attributes: list[Held], loader: DataLoader) -> bool:
        """Whether ``attributes`` belong to a dataset that is new or has changed in length, or are in a different order than before."""
        holder = attributes[0].holder
        known, length, orders = self._known.get(id(holder), (lambda: None, 0, {}))
        if all(known() is not each for each in (holder, loader)) or length != length_of(holder):
            return True
        # a list of indices may change in every pass; a dataset's content is compared once
        return any(held.orders and summary(held) != orders.get(held.name) for held in attributes)

    def agree(self, loader: DataLoader, changed: list[list[Held]], seed: int) -> int:
        """Make all ranks hold what rank 0 does, where possible.

        Returns:
            Rank 0's ``seed``.

        Raises:
            RankMismatchError: the datasets differ in length.
        """
        mine = [{held.name: summary(held) for held in each} for each in changed]
        answers = self._group.exchange(LOADER, (length_of(loader.dataset), seed, mine))
        _refuse_other_lengths({rank: length for rank, (length, _, _) in answers.items()})
        self._take({rank: each for rank, (_, _, each) in answers.items()}, changed)
        for attributes in changed:
            self._remember(attributes, loader)
        return answers[min(answers)][1]

    def take_first(self, loader: DataLoader) -> None:
        """Make all ranks read the indices that rank 0 has drawn for ``loader``: in a training pass each draws its own."""
        for attributes in self.changed(loader):
            drawn = [held for held in attributes if held.orders]
            if drawn:
                views = self._group.exchange(DRAWN, [(length_of(held.value), summary(held)) for held in drawn])
                differing = [held for held, *seen in zip(drawn, *views.values(), strict=False) if len(set(seen)) > 1]
                self._hand_out(differing, list(views))
                self._remember(attributes, loader)

    def _take(self, views: dict[int, list[dict[str, str | None]]], changed: list[list[Held]]) -> None:
        """Use rank 0's sequences where ``views`` show a difference."""
        differing = []
        for attributes, *seen in zip(changed, *views.values(), strict=False):
            by_name = [(held, {each[held.name] for each in seen}) for held in attributes if all(held.name in each for each in seen)]
            differing.append([held for held, summaries in by_name if len(summaries) > 1])
        orders = [held for each in differing for held in each if held.orders]
        contents = [[held for held in each if not held.orders] for each in differing]
        taken = any(contents) and self._same_items(contents, changed)
        others = [held for each in contents for held in each]
        if orders:
            _warn(
                f"{_named(orders)} differ between ranks, so all ranks use rank 0's. Draw them from torch, np.random or random, which are "
                "the same on all ranks, or seed their generator: np.random.default_rng(0)."
            )
        if others and taken:
            _warn(
                f"the ranks have the same items in different orders in {_named(others)}, so all ranks use rank 0's order. os.listdir and "
                "glob return files in any order: sort them."
            )
        elif others:
            _warn(
                f"the ranks hold different data of the same length in {_named(others)}: each rank trains on its own data, and one may "
                "train on what another holds out for testing. Generate the data from a seed, np.random.default_rng(0), and sort what "
                "os.listdir and glob return before you split it."
            )
        self._hand_out([*orders, *(others if taken else ())], list(views))

    def _same_items(self, contents: list[list[Held]], changed: list[list[Held]]) -> bool:
        """Whether the datasets differ only in order, and reordering would leave nothing behind."""
        mine: list[Items | None] = [items_of(held.value, LARGEST) for each in contents for held in each]
        if any(_left_behind(each, attributes) for each, attributes in zip(contents, changed, strict=False)):
            mine = [None] * len(mine)
        views = list(self._group.exchange(ITEMS, mine).values())
        if any(items is None for view in views for items in view) or sum(items.octets for items in views[0]) > LARGEST:
            return False
        alike = all(len({items.strings for items in each}) == 1 for each in zip(*views, strict=True))
        # equal files may have different numbers, like classes; numbers alone must be equal
        return alike and (
            any(items.has_strings for items in views[0])
            or all(len({items.numbers for items in each}) == 1 for each in zip(*views, strict=True))
        )

    def _hand_out(self, differing: list[Held], present: list[int]) -> None:
        """Replace this rank's sequences by rank 0's."""
        if not differing:
            return
        first = self._rank == min(present)
        values = _from_first(self._group, present, [_on_cpu(held.value) for held in differing] if first else None)
        for held, value in zip(differing, values, strict=True):
            if first:
                continue
            if isinstance(value, torch.Tensor):
                value = value.to(held.value.device)
            if held.name:
                vars(held.holder)[held.name] = value
            elif isinstance(held.holder, list):
                held.holder[:] = value

    def _remember(self, attributes: list[Held], loader: DataLoader) -> None:
        holder = attributes[0].holder
        key = id(holder)
        try:
            known = weakref.ref(holder, lambda _: self._known.pop(key, None))
        except TypeError:  # a plain list, which its loader keeps alive
            known = weakref.ref(loader, lambda _: self._known.pop(key, None))
        orders = {held.name: summary(held._replace(value=vars(holder)[held.name])) for held in attributes if held.orders}
        self._known[key] = known, length_of(holder), orders

    def own_sampler(self, sampler: DistributedSampler) -> bool:
        """Whether the ranks' own ``DistributedSampler`` objects each have another rank."""
        ranks = self._group.exchange(SAMPLER, sampler.rank)
        return len(set(ranks.values())) == len(ranks)


class SameDraws:
    """The draws of a sampler, the same on all ranks: where the first draws differ, rank 0's are used.

    Args:
        draws: the sampler.
        group: the ranks.
        agreed: earlier results, kept from pass to pass.
        name: the name of the sampler's class.
    """

    def __init__(self, draws: Any, group: Group, agreed: dict[str, bool], name: str) -> None:
        self._draws = self.within = draws
        self._group, self._agreed, self._name = group, agreed, name

    def __iter__(self) -> Iterator:
        drawing = iter(self._draws)
        first: list = []
        if "same" not in self._agreed:
            first = list(islice(drawing, self._group.world.size))
            self._agreed["same"] = len(set(self._group.exchange(DRAWS, repr(first)).values())) == 1
            if not self._agreed["same"]:
                _warn(
                    f"a {self._name} draws different samples on different ranks, so all ranks use rank 0's. Let it draw from torch, "
                    "np.random or random, which are the same on all ranks, or seed its generator."
                )
        if self._agreed["same"]:
            yield from first
            yield from drawing
        else:
            present = self._group.synchronize(DRAWS)
            listed = _from_first(self._group, present, self._listed(first, drawing) if self._group.world.rank == min(present) else None)
            if listed is None:
                raise RankMismatchError(
                    f"a {self._name} draws different samples on different ranks. It is endless, so rank 0's cannot be sent to the "
                    "others. Seed its generator."
                )
            yield from listed

    def _listed(self, first: list, drawing: Iterator) -> list | None:
        listed = [*first, *islice(drawing, MOST_DRAWS)]
        return listed if len(listed) < MOST_DRAWS else None

    def __len__(self) -> int:
        return len(self._draws)


def _from_first(group: Group, present: list[int], value: Any) -> Any:
    """The ``value`` of the first rank that is ``present`` on all that are, sent through the store and removed from it."""
    key, source = group.key("training data of the first rank"), min(present)
    store = group.store
    if group.world.rank == source:
        octets = pickle.dumps(value)
        pieces = [octets[start : start + PIECE] for start in range(0, len(octets), PIECE)]
        for number, piece in enumerate(pieces):
            store.set(f"{key}/{number}", piece)
        store.set(key, str(len(pieces)))
        return value
    count = int(group.fetch(key, source, "training data"))
    octets = b"".join(store.get(f"{key}/{number}") for number in range(count))
    if store.add(f"{key}/read", 1) == len(present) - 1:
        for number in range(count):
            store.delete_key(f"{key}/{number}")
    return pickle.loads(octets)


def _named(several: list[Held]) -> str:
    return " and ".join(dict.fromkeys(map(str, several)))


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _left_behind(differing: list[Held], attributes: list[Held]) -> bool:
    """Whether an opaque sequence is as long as a list that differs, so that its order may differ too."""
    lengths = {length_of(held.value) for held in differing}
    return any(summary(held) is None and length_of(held.value) in lengths for held in attributes) or any(
        not held.name and not isinstance(held.holder, list) for held in differing
    )


def _refuse_other_lengths(lengths: dict[int, int]) -> None:
    if len(set(lengths.values())) > 1:
        raise RankMismatchError(
            "the training datasets differ in length between ranks: "
            + ", ".join(f"{counted(length, 'sample')} on rank {rank}" for rank, length in lengths.items())
            + ". Every rank must build the same whole dataset; parwrap splits it."
        )


def _warn(text: str) -> None:
    warn(f"parwrap: {text}")
