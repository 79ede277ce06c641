"""Parameters in the form kernels want: packed, or computed from parameters alone.

They are renewed when a parameter changes. A parameter counts as unchanged while it is the same
tensor object with the same storage address and the same version, which every in-place operation
raises, no optimizer made a step with it (``optimizer_steps``), and its memory is as it was, as far
as a sample or the system tells (``settled_watch``): writing through ``.data`` raises no version. Of
what is read where it lies only the address counts.
"""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from torch_pruner.dynamo.lower.calls import picker
from torch_pruner.dynamo.run.arrays import from_numpy, to_numpy
from torch_pruner.dynamo.run.copies import all_packed, held_of, shared_out
from torch_pruner.dynamo.run.huge_pages import ask_for
from torch_pruner.dynamo.run.narrow_weights import narrow_copy
from torch_pruner.dynamo.run.optimizer_steps import steps, storage_key
from torch_pruner.dynamo.run.snapshot import Snapshot, moved_into, watch_over
from torch_pruner.dynamo.run.weight_checks import SAME, WRITTEN
from torch_pruner.graph.memory import ALIGNMENT
from torch_pruner.graph.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence

    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.run.copies import Held
    from torch_pruner.graph.packing import PackLayout

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


class PackedInputs:
    """The static inputs of one compiled graph. Safe for concurrent calls."""

    def __init__(
        self,
        compiled: CompiledGraph,
        n_inputs: int,
        static: Sequence[int],
        orders: Sequence[tuple[int, ...]],
        device: Device,
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
            if self._current is not None:
                self._device.retire(self._current.kept)
            self._current = None

    def current(self, inputs: Sequence[torch.Tensor]) -> Snapshot:
        """The snapshot for ``inputs``, made anew when a parameter changed.

        The first one takes copies that other programs have made, and nobody has looked since then
        whether memory still holds what they were made of: it is read.
        """
        snapshot, distrust = self._current, True
        if snapshot is not None:
            state = snapshot.state(self._pick(inputs), frozen=self.frozen)
            if state is SAME:
                return snapshot
            distrust = state is WRITTEN
        with self._lock:
            if snapshot is not self._current:  # another thread was here
                return self._valid(inputs) or self._renewed(inputs, distrust)
            return self._renewed(inputs, distrust)

    def _valid(self, inputs: Sequence[torch.Tensor]) -> Snapshot | None:
        found = self._current
        if found is None:
            return None
        state = found.state(self._pick(inputs), frozen=self.frozen)
        return found if state is SAME else None

    def _renewed(self, inputs: Sequence[torch.Tensor], distrust: bool) -> Snapshot:
        made, old = self._make(inputs, distrust), self._current
        if old is not None and self._stays:
            made = moved_into(made, old)
        elif old is not None:
            self._device.retire(old.kept)
        self._current = made
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

        Raises ``NotNarrowError`` if a parameter no longer holds what its narrow copy can,
        ``NotCodedError`` if that no longer codes well.
        """
        counted = steps.count
        derived = self._derived(inputs)
        looked_at = self._device.host_memory and not self.frozen
        watched = self._compiled.checksums if looked_at else None
        held = held_of(derived, watched, distrust)
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
            prepared = [t.to(self._device.device) for t in made]
        kept: list[torch.Tensor] = []
        table: list[tuple[int, int]] = []
        plain: set[int] = set()
        given = [*own_inputs, *prepared]
        packed = all_packed(
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
                tensor = ask_for(torch.empty_like(dense, memory_format=torch.contiguous_format))
                tensor.copy_(dense)
                kept.append(tensor)
            table.append((k, tensor.data_ptr()))
        mine = tuple(inputs[i] for i in self.indices)
        memories = tuple(held[id(t)].memory for t in derived)
        watch = None if watched is None else watch_over(mine, derived, held, watched)
        return Snapshot(
            mine, tuple(t.untyped_storage() for t in mine), tuple(t.data_ptr() for t in mine),
            tuple(derived), memories, tuple(m[2] for m in memories), watch, [counted],
            tuple(table), tuple(kept),
            tuple(t if j in plain else None for j, t in enumerate(prepared)),
        )  # fmt: skip

    def _narrowed(
        self, inputs: Sequence[torch.Tensor], held: Mapping[int, Held]
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
            wanted, shared_out(copy, wanted, [inputs[i].nbytes for i in wanted]), strict=True
        )

    def _has_copies(self, index: int, held: Held) -> bool:
        """Whether nothing is left to be made of an input's narrow copy."""
        order, mine = self._orders[index], [s.pack for _, s in self._slots if s.index == index]
        packed = all(pack is not None and (pack, order) in held.copies for pack in mine)
        return packed and index not in self._compiled.sources
