"""Parameters in the form kernels want, at one moment; and whether they still are what they were."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.run.copies import version_of
from torch_pruner.dynamo.run.optimizer_steps import steps, storage_key
from torch_pruner.dynamo.run.settled_watch import SettledWatch
from torch_pruner.dynamo.run.weight_checks import MOVED, SAME, WRITTEN, facts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.dynamo.run.copies import Held, Memory
    from torch_pruner.dynamo.run.weight_checks import Entry, State

FEW = 12  # tensors: Python asks so many for their addresses as fast as a program is called
_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Derived tensors, their addresses by slot, and the parameters they were made from.

    ``storages`` keep the memory of the parameters: a new one at the same address would look
    unchanged.
    """

    tensors: tuple[torch.Tensor, ...]
    storages: tuple[torch.UntypedStorage, ...]
    addresses: tuple[int, ...]
    derived: tuple[torch.Tensor, ...]  # of ``tensors``, those that are kept in another form
    memories: tuple[Memory, ...]  # theirs
    versions: tuple[int | None, ...]  # theirs
    watch: SettledWatch | None  # over them; None where memory is not looked at
    stepped: list[int]  # one number: of optimizer steps, when they were last asked about
    table: tuple[tuple[int, int], ...]  # (slot, address)
    kept: tuple[torch.Tensor, ...]
    prepared: tuple[torch.Tensor | None, ...]  # None: only its packed copy is read

    def state(self, given: Sequence[torch.Tensor], *, frozen: bool = False) -> State:
        """Whether the parameters ``given`` are those of the snapshot, and as they were.

        As far as this call looks; not at all into those that are ``frozen``. Asked at every call
        about every parameter: the loop is the interpreter's own.
        """
        if not all(map(operator.is_, given, self.tensors)):
            return MOVED
        if frozen:
            return SAME
        if self.derived and self.stepped[0] != steps.count and self._stepped():
            return MOVED
        watch = self.watch
        if watch is not None and watch.knows_facts:
            return (watch.sample or watch).look()
        if not self._same_facts():
            return MOVED
        if not self.derived:
            return SAME
        # A tensor of inference mode has no version: all of it is read, or it is taken as written.
        versions = None not in self.versions
        if watch is None:
            return SAME if versions else WRITTEN
        same = watch.unchanged() if versions else watch.all_unchanged()
        return SAME if same else WRITTEN

    def _same_facts(self) -> bool:
        """Whether they lie where they lay, and torch does not say that they were written."""
        if self.addresses != tuple(map(_address, self.tensors)):
            return False
        if None in self.versions:
            return self.versions == tuple(map(version_of, self.derived))
        return self.versions == tuple(map(_version, self.derived))

    def _stepped(self) -> bool:
        """Whether an optimizer wrote to one of them since it was packed."""
        count = steps.count
        last = steps.by_storage()
        pairs = zip(self.derived, self.memories, strict=True)
        if any(last.get(storage_key(t), 0) > m[3] for t, m in pairs):
            return True
        self.stepped[0] = count
        return False


def watch_over(
    tensors: Sequence[torch.Tensor],
    derived: Sequence[torch.Tensor],
    held: Mapping[int, Held],
    entries: Sequence[Entry],
) -> SettledWatch | None:
    """Over all that a snapshot has, of which some is derived from; None where nothing was read."""
    known = {id(t): held[id(t)] for t in derived}
    contents = [h.contents for h in known.values() if h.contents is not None]
    versions = {key: h.memory[2] for key, h in known.items()}
    if len(contents) < len(derived):
        return None
    facts = None
    if entries and None not in versions.values() and (derived or len(tensors) > FEW):
        facts = facts_of(tensors, [versions.get(id(t)) for t in tensors])
    # A device writes to pages that are pinned for it, and no processor notes it.
    alone = not any(t.is_pinned() for t in derived)
    return SettledWatch(contents, entries, facts, alone=alone)


def moved_into(new: Snapshot, old: Snapshot) -> Snapshot:
    """``new`` in the memory of ``old``: for programs that know the addresses."""
    there = {mine.data_ptr(): kept for mine, kept in zip(new.kept, old.kept, strict=True)}
    for mine, kept in zip(new.kept, old.kept, strict=True):
        kept.copy_(mine)
    places = ((slot, there.get(address)) for slot, address in new.table)
    table = tuple(
        (slot, address if kept is None else kept.data_ptr())
        for (slot, kept), (_, address) in zip(places, new.table, strict=True)
    )
    prepared = tuple(None if t is None else there.get(t.data_ptr(), t) for t in new.prepared)
    return replace(new, kept=old.kept, table=table, prepared=prepared)
