"""Parameters in the form kernels want: packed, or computed from parameters alone.

They are renewed when a parameter changes. A parameter counts as unchanged while it is the same
tensor object with the same storage address and the same version, which every in-place operation
raises, no optimizer made a step with it (``optimizer_steps``), and a sample of its memory is as it
was (``weight_checks``): writing through ``.data`` raises no version. Of what is read where it lies
only the address counts.
"""

from __future__ import annotations

import functools
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.dynamo.lower.calls import picker
from torch_pruner.dynamo.run.narrow_weights import narrow_copy
from torch_pruner.dynamo.run.optimizer_steps import steps, storage_key
from torch_pruner.dynamo.run.settled_watch import SettledWatch
from torch_pruner.dynamo.run.weight_checks import (
    Contents,
    State,
    facts_of,
    read_contents,
    span_of,
)
from torch_pruner.graph.memory import ALIGNMENT
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Iterator,
        Mapping,
        MutableMapping,
        MutableSet,
        Sequence,
    )

    from torch_pruner.compiler.driver import CompiledGraph
    from torch_pruner.dynamo.run.weight_checks import Entry
    from torch_pruner.graph.packing import PackLayout

Array = npt.NDArray[Any]
Item = TypeVar("Item")

_Layout = tuple["PackLayout", tuple[int, ...] | None]
_Narrow = tuple[str, tuple[int, ...]]  # dtype, memory order
# What is packed, how, from which order, and the parameter with which the copy is kept.
_Wanted = tuple[torch.Tensor, "PackLayout", tuple[int, ...] | None, torch.Tensor]
_Memory = tuple[torch.UntypedStorage, int, int | None, int]

FEW = 12  # tensors: Python asks so many for their addresses as fast as a program is called
WORTH_THREADS = 1 << 20  # bytes to pack: less is done before a thread has started
_shared_lock = threading.Lock()


@dataclass(slots=True)
class _Held:
    """What is known of one parameter: its memory, what that held, and copies made from it."""

    memory: _Memory
    contents: Contents | None  # None on devices whose memory is not looked at
    copies: dict[_Layout, torch.Tensor] = field(default_factory=dict)
    narrow: MutableMapping[_Narrow, torch.Tensor] = field(default_factory=WeakValueDictionary)


# What is known of each parameter that is kept in another form, for all graphs that read it.
_shared: MutableMapping[torch.Tensor, _Held] = WeakIdKeyDictionary()


_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr


def to_numpy(tensor: torch.Tensor) -> Array:
    """A view of a CPU tensor, a copy of another device's; bfloat16 by way of its bits."""
    plain = tensor.detach().resolve_neg().cpu()
    if plain.dtype is torch.bfloat16:
        import ml_dtypes

        bits: Array = plain.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = plain.numpy()
    return array


def from_numpy(array: Array, dtype: str) -> torch.Tensor:
    """A copy in memory that torch allocated, and so aligned."""
    plain = np.asarray(array, order="C")  # ascontiguousarray would give a scalar a dimension
    if not plain.flags.writeable:  # torch warns of those, though nothing is written here
        plain = plain.copy()
    if dtype == "bfloat16":
        bits = torch.from_numpy(plain.view(np.int16))
        return torch.empty(array.shape, dtype=torch.bfloat16).copy_(bits.view(torch.bfloat16))
    source = torch.from_numpy(plain)
    return torch.empty(array.shape, dtype=DTYPES[dtype]).copy_(source)


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter, or None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


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
    memories: tuple[_Memory, ...]  # theirs
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
            return State.MOVED
        if frozen:
            return State.SAME
        if self.derived and self.stepped[0] != steps.count and self._stepped():
            return State.MOVED
        if self.watch is not None and self.watch.knows_facts:
            return self.watch.look()
        if not self._same_facts():
            return State.MOVED
        if not self.derived:
            return State.SAME
        # A tensor of inference mode has no version: all of it is read, or it is taken as written.
        versions = None not in self.versions
        if self.watch is None:
            return State.SAME if versions else State.WRITTEN
        same = self.watch.unchanged() if versions else self.watch.all_unchanged()
        return State.SAME if same else State.WRITTEN

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


_alive: MutableSet[PackedInputs] = WeakSet()


def in_use(parameter: torch.Tensor) -> bool:
    """Whether a compiled graph, or a look at what it holds, reads the parameter's own memory.

    True, too, where no graph reads it at all: then nobody has a copy.
    """
    storage = parameter.untyped_storage()
    first = storage.data_ptr()
    memory, copied = range(first, first + max(storage.nbytes(), 1)), False
    for packed in list(_alive):
        reads = packed.reads(parameter, memory)
        if reads:
            return True
        copied = copied or reads is False
    return not copied


def layouts_held() -> frozenset[PackLayout]:
    """In which programs with ``frozen`` weights, as long as they are there, have them packed."""
    frozen = (packed for packed in list(_alive) if packed.frozen)
    return frozenset(layout for packed in frozen for layout in packed.layouts)


def moved(parameter: torch.Tensor) -> None:
    """The parameter lies elsewhere and holds what it held: copies made of it are still its own."""
    with _shared_lock:
        held = _shared.get(parameter)
        if held is not None:
            held.memory = (held.memory[0], parameter.data_ptr(), *held.memory[2:])


class PackedInputs:
    """The static inputs of one compiled graph. Safe for concurrent calls."""

    def __init__(
        self,
        compiled: CompiledGraph,
        n_inputs: int,
        static: Sequence[int],
        orders: Sequence[tuple[int, ...]],
        device: torch.device,
        narrow: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """``narrow``: the dtypes in which the program reads inputs that are float32."""
        self._compiled, self._device = compiled, device
        self._narrow = narrow
        self._n_inputs = n_inputs
        self._orders = orders
        self.indices = tuple(static)
        self._pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
        self._pick = picker(self.indices)
        self._slots = [
            (k, slot)
            for k, slot in enumerate(compiled.plan.slots)
            if slot.kind in ("input", "packed")
            and (slot.index in set(static) or slot.index >= n_inputs)
        ]
        self.frozen = compiled.weights == "frozen"
        self._lock = threading.Lock()
        self._current: Snapshot | None = None
        self._stays = False
        _alive.add(self)

    def stay(self) -> None:
        """From now on what is renewed is written where it was: its address has been recorded."""
        self._stays = True

    def reads(self, parameter: torch.Tensor, memory: range) -> bool | None:
        """Whether the parameter's own ``memory`` is read; None: it is no input."""
        current, key = self._current, storage_key(parameter)
        if current is None:
            return None
        if any(address in memory for _, address in current.table):
            return True
        shared = any(storage_key(t) == key for t in current.tensors)
        return not self.frozen if shared else None

    @property
    def layouts(self) -> list[PackLayout]:
        """Of all that is packed."""
        return [slot.pack for _, slot in self._slots if slot.pack is not None]

    def drop(self) -> None:
        """Nothing calls for these any more."""
        with self._lock:
            self._current = None

    def current(self, inputs: Sequence[torch.Tensor]) -> Snapshot:
        """The snapshot for ``inputs``, made anew when a parameter changed."""
        snapshot, distrust = self._current, False
        if snapshot is not None:
            state = snapshot.state(self._pick(inputs), frozen=self.frozen)
            if state is State.SAME:
                return snapshot
            distrust = state is State.WRITTEN
        with self._lock:
            if snapshot is not self._current:  # another thread was here
                return self._valid(inputs) or self._renewed(inputs, distrust)
            return self._renewed(inputs, distrust)

    def _valid(self, inputs: Sequence[torch.Tensor]) -> Snapshot | None:
        found = self._current
        if found is None:
            return None
        state = found.state(self._pick(inputs), frozen=self.frozen)
        return found if state is State.SAME else None

    def _renewed(self, inputs: Sequence[torch.Tensor], distrust: bool) -> Snapshot:
        made, old = self._make(inputs, distrust), self._current
        self._current = _moved(made, old) if self._stays and old is not None else made
        return self._current

    @property
    def nbytes(self) -> int:
        """Bytes held beside the parameters themselves."""
        return sum(t.nbytes for t in self._current.kept) if self._current else 0

    def _derived(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters that are not read where they lie, each once."""
        packed = {s.index for _, s in self._slots if s.pack is not None}
        copied = {
            s.index
            for _, s in self._slots
            if s.index < self._n_inputs and not self._as_it_lies(inputs[s.index], s.index)
        }
        positions = packed | copied | set(self._compiled.sources) | set(self._narrow)
        tensors = {id(inputs[i]): inputs[i] for i in sorted(positions) if i < self._n_inputs}
        return list(tensors.values())

    def _as_it_lies(self, tensor: torch.Tensor, index: int) -> bool:
        dense = tensor.permute(self._orders[index])
        return dense.is_contiguous() and not tensor.data_ptr() % ALIGNMENT and not tensor.is_neg()

    def _make(self, inputs: Sequence[torch.Tensor], distrust: bool) -> Snapshot:
        """``distrust``: memory does not hold what it held though nobody said so.

        Raises ``NotNarrowError`` if a parameter no longer holds what its narrow copy can.
        """
        counted = steps.count
        derived = self._derived(inputs)
        looked_at = self._device.type == "cpu" and not self.frozen
        watched = self._compiled.checksums if looked_at else None
        held = _held(derived, watched, distrust)
        prepared: list[torch.Tensor] = []
        compiled = self._compiled
        own_inputs = [*inputs[: self._n_inputs]]
        for i, tensor in self._narrowed(inputs, held):
            own_inputs[i] = tensor
        if compiled.prepare is not None:
            arrays = [to_numpy(own_inputs[i]) for i in compiled.sources]
            results = evaluate(compiled.prepare, arrays)
            dtypes = [compiled.prepare.nodes[o].dtype for o in compiled.prepare.outputs]
            made = (from_numpy(a, d) for a, d in zip(results, dtypes, strict=True))
            prepared = [t.to(self._device) for t in made]
        kept: list[torch.Tensor] = []
        table: list[tuple[int, int]] = []
        plain: set[int] = set()
        given = [*own_inputs, *prepared]
        packed = _all_packed(
            [
                (
                    given[s.index],
                    s.pack,
                    self._orders[s.index] if s.index < self._n_inputs else None,
                    inputs[s.index] if s.index < self._n_inputs else given[s.index],
                )
                for _, s in self._slots
                if s.pack is not None
            ],
            held,
        )
        for k, slot in self._slots:
            own = slot.index < self._n_inputs
            tensor = given[slot.index]
            if slot.pack is not None:
                tensor = next(packed)
                kept.append(tensor)
            elif not own:
                kept.append(tensor)
                plain.add(slot.index - self._n_inputs)
            elif slot.index in self._narrow:
                kept.append(tensor)
            elif not self._as_it_lies(tensor, slot.index):
                dense = tensor.permute(self._orders[slot.index]).detach()
                tensor = torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
                tensor.copy_(dense)
                kept.append(tensor)
            table.append((k, tensor.data_ptr()))
        mine = tuple(inputs[i] for i in self.indices)
        memories = tuple(held[id(t)].memory for t in derived)
        watch = None if watched is None else _watch(mine, derived, held, watched)
        return Snapshot(
            mine, tuple(t.untyped_storage() for t in mine), tuple(map(_address, mine)),
            tuple(derived), memories, tuple(m[2] for m in memories), watch, [counted],
            tuple(table), tuple(kept),
            tuple(t if j in plain else None for j, t in enumerate(prepared)),
        )  # fmt: skip

    def _narrowed(
        self, inputs: Sequence[torch.Tensor], held: Mapping[int, _Held]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The narrow copies that the program reads, which all graphs share while one needs them.

        None of those of which every copy is there already.
        """
        wanted = [i for i in self._narrow if not self._has_copies(i, held[id(inputs[i])])]

        def copy(i: int) -> torch.Tensor:
            copies, key = held[id(inputs[i])].narrow, (self._narrow[i], self._orders[i])
            found = copies.get(key)
            if found is None:
                found = copies[key] = narrow_copy(inputs[i], *key)
            return found

        return zip(
            wanted, _shared_out(copy, wanted, [inputs[i].nbytes for i in wanted]), strict=True
        )

    def _has_copies(self, index: int, held: _Held) -> bool:
        """Whether nothing is left to be made of an input's narrow copy."""
        order, mine = self._orders[index], [s.pack for _, s in self._slots if s.index == index]
        packed = all(pack is not None and (pack, order) in held.copies for pack in mine)
        return packed and index not in self._compiled.sources


def _watch(
    tensors: Sequence[torch.Tensor],
    derived: Sequence[torch.Tensor],
    held: Mapping[int, _Held],
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


def _held(
    tensors: Sequence[torch.Tensor], entries: Sequence[Entry] | None, distrust: bool
) -> dict[int, _Held]:
    """What is known of each parameter, by its ``id``; what its memory holds is read where needed.

    It is read before anything is made of it: a write in between is then seen as a change later.
    """
    last = steps.by_storage()
    found: dict[int, _Held] = {}
    unread: list[torch.Tensor] = []
    for tensor in tensors:
        step = last.get(storage_key(tensor), 0)
        memory = tensor.untyped_storage(), tensor.data_ptr(), version_of(tensor), step
        with _shared_lock:
            known = _shared.get(tensor)
        if known is not None and memory[2] is not None and known.memory == memory:
            found[id(tensor)] = known
            if entries is None or not (distrust or known.contents is None):
                continue
        else:
            found[id(tensor)] = _Held(memory, None)
        if entries is not None:
            unread.append(tensor)
    read = read_contents([span_of(t) for t in unread], entries or ()) if unread else []
    for tensor, contents in zip(unread, read, strict=True):
        known = found[id(tensor)]
        if known.contents != contents:
            found[id(tensor)] = _Held(known.memory, contents)
    with _shared_lock:
        for tensor in tensors:
            _shared[tensor] = found[id(tensor)]
    return found


def _moved(new: Snapshot, old: Snapshot | None) -> Snapshot:
    """``new`` in the memory of ``old``: for programs that know the addresses."""
    assert old is not None
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


def _all_packed(
    wanted: Sequence[_Wanted], held: Mapping[int, _Held] = MappingProxyType({})
) -> Iterator[torch.Tensor]:
    """The packed copy of each, which ``held`` keeps for other graphs.

    New memory is what takes the time, and every core gets its share.
    """
    unique = {(id(w[0]), w[1], w[2]): w for w in wanted}
    order = sorted(unique.values(), key=lambda w: -w[1].nbytes)
    pack = functools.partial(_packed, held=held)
    results = _shared_out(pack, order, [w[1].nbytes for w in order])
    made = {(id(w[0]), w[1], w[2]): packed for w, packed in zip(order, results, strict=True)}
    return (made[id(w[0]), w[1], w[2]] for w in wanted)


def _shared_out(
    function: Callable[[Item], torch.Tensor], items: Sequence[Item], nbytes: Sequence[int]
) -> list[torch.Tensor]:
    """``function`` of each item, on several threads where ``nbytes`` say that it is worth it."""
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1 or sum(nbytes) < WORTH_THREADS:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _packed(wanted: _Wanted, held: Mapping[int, _Held]) -> torch.Tensor:
    """The packed copy, shared between all graphs that want this layout of the parameter."""
    tensor, layout, order, owner = wanted
    copies = held[id(owner)].copies if id(owner) in held else {}
    if (known := copies.get((layout, order))) is not None:
        return known
    dense = tensor if order is None else tensor.detach().permute(order)
    packed = torch.empty(layout.shape, dtype=tensor.dtype)
    layout.pack(to_numpy(dense), to_numpy(packed))
    packed = packed.to(tensor.device)
    copies[layout, order] = packed
    return packed
