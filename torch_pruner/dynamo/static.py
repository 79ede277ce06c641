"""Parameters in the form kernels want: packed, or computed from parameters alone.

They are renewed when a parameter changes. A parameter counts as unchanged while it is the same
tensor object with the same storage address and the same version, which every in-place operation
raises. (Writing through ``.data`` or numpy does not raise it.)
"""

from __future__ import annotations

import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_pruner.dynamo.tensors import DTYPES
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping, Sequence

    from torch_pruner.compiler.driver import CompiledGraph
    from torch_pruner.graph.packing import PackLayout

Array = npt.NDArray[Any]

_Layout = tuple["PackLayout", tuple[int, ...] | None]
_Wanted = tuple[torch.Tensor, "PackLayout", tuple[int, ...] | None]
_Memory = tuple[torch.UntypedStorage, int, int | None]

WORTH_THREADS = 1 << 20  # bytes to pack: less is done before a thread has started
_shared_lock = threading.Lock()
# For each tensor and layout, the memory that was packed and the packed copy.
_shared: MutableMapping[torch.Tensor, dict[_Layout, tuple[_Memory, torch.Tensor]]]
_shared = WeakIdKeyDictionary()


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from a sequence to its items at ``indices``, without a loop in Python."""
    if len(indices) < 2:  # an item getter of one index gives no tuple
        return lambda values: [values[i] for i in indices]
    return operator.itemgetter(*indices)


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
    versions: tuple[int | None, ...]
    addresses: tuple[int, ...]
    table: tuple[tuple[int, int], ...]  # (slot, address)
    kept: tuple[torch.Tensor, ...]
    prepared: tuple[torch.Tensor | None, ...]  # None: only its packed copy is read

    def valid(self, inputs: Sequence[torch.Tensor], pick: Callable[..., Any]) -> bool:
        """Whether the parameters among ``inputs`` are those of the snapshot, unchanged.

        Asked at every call about every parameter: the loops are the interpreter's own.
        """
        if not all(map(operator.is_, pick(inputs), self.tensors)):
            return False
        try:
            versions = tuple(map(_version, self.tensors))
        except RuntimeError:  # an inference tensor has no version: it may have changed
            return False
        return versions == self.versions and self.addresses == tuple(map(_address, self.tensors))


class StaticInputs:
    """The static inputs of one compiled graph. Safe for concurrent calls."""

    def __init__(
        self,
        compiled: CompiledGraph,
        n_inputs: int,
        static: Sequence[int],
        orders: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._compiled, self._device = compiled, device
        self._n_inputs = n_inputs
        self._orders = orders
        self.indices = tuple(static)
        self._pick = picker(self.indices)
        self._slots = [
            (k, slot)
            for k, slot in enumerate(compiled.plan.slots)
            if slot.kind in ("input", "packed")
            and (slot.index in set(static) or slot.index >= n_inputs)
        ]
        self._lock = threading.Lock()
        self._current: Snapshot | None = None
        self._stays = False

    def stay(self) -> None:
        """From now on what is renewed is written where it was: its address has been recorded."""
        self._stays = True

    def current(self, inputs: Sequence[torch.Tensor]) -> Snapshot:
        """The snapshot for ``inputs``, made anew when a parameter changed."""
        snapshot = self._current
        if snapshot is not None and snapshot.valid(inputs, self._pick):
            return snapshot
        with self._lock:
            snapshot = self._current
            if snapshot is None or not snapshot.valid(inputs, self._pick):
                made = self._make(inputs)
                stays = self._stays and self._current is not None
                snapshot = self._current = _moved(made, self._current) if stays else made
        return snapshot

    @property
    def nbytes(self) -> int:
        """Bytes held beside the parameters themselves."""
        return sum(t.nbytes for t in self._current.kept) if self._current else 0

    def _make(self, inputs: Sequence[torch.Tensor]) -> Snapshot:
        prepared: list[torch.Tensor] = []
        compiled = self._compiled
        if compiled.prepare is not None:
            arrays = [to_numpy(inputs[i]) for i in compiled.sources]
            results = evaluate(compiled.prepare, arrays)
            dtypes = [compiled.prepare.nodes[o].dtype for o in compiled.prepare.outputs]
            made = (from_numpy(a, d) for a, d in zip(results, dtypes, strict=True))
            prepared = [t.to(self._device) for t in made]
        kept: list[torch.Tensor] = []
        table: list[tuple[int, int]] = []
        plain: set[int] = set()
        given = [*inputs[: self._n_inputs], *prepared]
        packed = _all_packed(
            [
                (
                    given[s.index],
                    s.pack,
                    self._orders[s.index] if s.index < self._n_inputs else None,
                )
                for _, s in self._slots
                if s.pack is not None
            ]
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
            else:
                dense = tensor.permute(self._orders[slot.index])
                if not dense.is_contiguous() or tensor.data_ptr() % 64 or tensor.is_neg():
                    dense = dense.detach()
                    tensor = torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
                    tensor.copy_(dense)
                    kept.append(tensor)
            table.append((k, tensor.data_ptr()))
        mine = tuple(inputs[i] for i in self.indices)
        return Snapshot(
            mine, tuple(t.untyped_storage() for t in mine), tuple(version_of(t) for t in mine),
            tuple(t.data_ptr() for t in mine), tuple(table), tuple(kept),
            tuple(t if j in plain else None for j, t in enumerate(prepared)),
        )  # fmt: skip


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


def _all_packed(wanted: Sequence[_Wanted]) -> Iterator[torch.Tensor]:
    """The packed copy of each. New memory is what takes the time, and every core gets its share."""
    unique = {(id(w[0]), w[1], w[2]): w for w in wanted}
    order = sorted(unique.values(), key=lambda w: -w[1].nbytes)
    threads = min(torch.get_num_threads(), len(order))
    if threads > 1 and sum(w[1].nbytes for w in order) >= WORTH_THREADS:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(_packed, order))
    else:
        results = [_packed(w) for w in order]
    made = {(id(w[0]), w[1], w[2]): packed for w, packed in zip(order, results, strict=True)}
    return (made[id(w[0]), w[1], w[2]] for w in wanted)


def _packed(wanted: _Wanted) -> torch.Tensor:
    """The packed copy, shared between all graphs that want this layout of the parameter."""
    tensor, layout, order = wanted
    memory = tensor.untyped_storage(), tensor.data_ptr(), version_of(tensor)
    with _shared_lock:
        known = _shared.get(tensor, {}).get((layout, order))
    if known is not None and memory[2] is not None and known[0] == memory:
        return known[1]
    dense = tensor if order is None else tensor.detach().permute(order)
    packed = torch.empty(layout.shape, dtype=tensor.dtype)
    layout.pack(to_numpy(dense), to_numpy(packed))
    packed = packed.to(tensor.device)
    with _shared_lock:
        _shared.setdefault(tensor, {})[layout, order] = (memory, packed)
    return packed
