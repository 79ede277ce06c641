"""Places every buffer of a fused graph: inputs, outputs by address, the rest in one workspace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.graph.phases import Turn
from torch_pruner.graph.updates import writes_in_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.graph.fuse import FusedGraph
    from torch_pruner.graph.packing import PackLayout
    from torch_pruner.graph.signature import Signature

ALIGNMENT = 64
STEALING_BYTES = 64
"""A line, in which a thread says which of its tasks are left: see ``codegen.build.stealing``."""
CHECKSUMS = ("sample", "samples")
"""Entries of a program that look at what parameters hold: on one thread, and on all of them."""
COPIES = "copies"
"""The entry that copies rows: see ``codegen.build.row_copies``."""
MASKS = "masks"
"""The entry that draws masks of dropout: see ``codegen.build.masks``."""
LAUNCH = "launch"
"""The entry that says on which threads a library's kernels run: see ``codegen.build.launch``."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry of the address table.

    ``index`` counts inputs or outputs; the workspace is one slot.
    """

    kind: str  # "input" | "packed" | "output" | "workspace"
    index: int = 0
    pack: PackLayout | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kernel argument lives: a slot and an offset in bytes.

    ``apart``: bytes from the copy of one thread to that of the next; 0 where all have the same.
    """

    slot: int
    offset: int = 0
    apart: int = 0


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call of a program. ``turn`` is None where threads meet before and after it."""

    kernel: str
    args: tuple[Place, ...]
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``arguments[k]`` are the places of kernel k's parameters (inputs, outputs, scratch).

    ``outputs[j]`` is the slot of output j; several outputs may be one node and then one slot.
    ``lines``: ``STEALING_BYTES`` for each thread and once more, where there are several.
    """

    slots: tuple[Slot, ...]
    arguments: tuple[tuple[Place, ...], ...]
    outputs: tuple[int, ...]
    workspace_bytes: int
    lines: Place | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies of constant inputs."""
        return sum(s.pack.nbytes for s in self.slots if s.pack is not None)


@dataclass(slots=True)
class _Planner:
    fused: FusedGraph
    slots: list[Slot] = field(default_factory=list)
    known: dict[object, int] = field(default_factory=dict)
    free: list[tuple[int, int]] = field(default_factory=list)  # (offset, size), sorted
    top: int = 0

    def slot(self, slot: Slot, key: object) -> int:
        if key not in self.known:
            self.known[key] = len(self.slots)
            self.slots.append(slot)
        return self.known[key]

    def allocate(self, nbytes: int) -> int:
        """The lowest gap that fits, else the end."""
        size = _round_up(nbytes)
        for i, (offset, gap) in enumerate(self.free):
            if gap >= size:
                self.free[i : i + 1] = [(offset + size, gap - size)] if gap > size else []
                return offset
        offset, self.top = self.top, self.top + size
        return offset

    def place(self, slot: int, nbytes: int, copies: int) -> Place:
        """Memory for so many copies, which begin at lines of their own."""
        apart = _round_up(nbytes) if copies > 1 else 0
        return Place(slot, self.allocate(apart * copies or nbytes), apart)

    def release(self, offset: int, nbytes: int) -> None:
        spans = sorted([*self.free, (offset, _round_up(nbytes))])
        merged: list[tuple[int, int]] = []
        for start, size in spans:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self.free = merged


def plan_memory(
    fused: FusedGraph,
    signatures: Sequence[Signature],
    turns: Sequence[Turn] | None = None,
    threads: int = 1,
) -> MemoryPlan:
    """Lay out the buffers of ``fused`` for kernels with these signatures, reusing dead memory.

    Nothing is reused within a phase of ``turns``, nor within two that a kernel has parts in. What
    every one of ``threads`` makes for itself has a copy for each.
    """
    planner = _Planner(fused)
    nodes = fused.graph.nodes
    workspace = planner.slot(Slot("workspace"), "workspace")
    output_index: dict[int, int] = {}
    for j, node in enumerate(fused.graph.outputs):
        output_index.setdefault(node, j)
    last_use = _last_uses(fused)
    made: dict[int, Place] = {}
    arguments = []
    dead: list[tuple[Place, int]] = []  # places and bytes of a copy, until the phase ends
    for k, (kernel, takes) in enumerate(zip(fused.kernels, signatures, strict=True)):
        turn = Turn(k) if turns is None else turns[k]
        copies = threads if turn.everywhere or turn.epilogue else 1
        places = []
        for node, pack in zip(kernel.inputs, takes.packs, strict=True):
            if nodes[node].op == "input":
                index = nodes[node].attr("index")
                slot = Slot("packed", index, pack) if pack else Slot("input", index)
                places.append(Place(planner.slot(slot, slot)))
            elif ("output", node) in planner.known:
                places.append(Place(planner.known["output", node]))
            else:
                places.append(made[node])
        for node, spec in zip(kernel.outputs, takes.outputs, strict=True):
            if writes_in_place(nodes[node]):
                planner.known["output", node] = _written_slot(planner, fused, node)
                places.append(Place(planner.known["output", node]))
            elif node in output_index:
                places.append(
                    Place(planner.slot(Slot("output", output_index[node]), ("output", node)))
                )
            else:
                made[node] = planner.place(workspace, spec.nbytes, copies)
                places.append(made[node])
        copies = threads if turn.everywhere or turn.prologue else 1
        scratch = [planner.place(workspace, spec.nbytes, copies) for spec in takes.scratch]
        arguments.append((*places, *scratch))
        dead += [(p, s.nbytes) for p, s in zip(scratch, takes.scratch, strict=True)]
        for node in (*kernel.inputs, *kernel.outputs):
            if node in made and last_use[node] == k:
                dead.append((made.pop(node), nodes[node].nbytes))
        after = None if turns is None or k + 1 == len(turns) else turns[k + 1]
        if after is None or (after.phase != turn.phase and not after.epilogue):
            for place, nbytes in dead:
                planner.release(place.offset, place.apart * threads or nbytes)
            dead.clear()
    outputs = tuple(_output_slot(planner, fused, node) for node in fused.graph.outputs)
    lines = Place(workspace, planner.top) if threads > 1 else None
    top = planner.top + ((threads + 1) * STEALING_BYTES if lines else 0)
    return MemoryPlan(tuple(planner.slots), tuple(arguments), outputs, top, lines)


def _written_slot(planner: _Planner, fused: FusedGraph, update: int) -> int:
    """Of the input that ``update`` writes into."""
    source = fused.graph.nodes[fused.graph.nodes[update].inputs[0]]
    assert source.op == "input", "only inputs are written into"
    slot = Slot("input", source.attr("index"))
    return planner.slot(slot, slot)


def _output_slot(planner: _Planner, fused: FusedGraph, node: int) -> int:
    if (made := planner.known.get(("output", node))) is not None:
        return made
    source = fused.graph.nodes[node]
    assert source.op == "input", "an output that no kernel writes"
    slot = Slot("input", source.attr("index"))
    return planner.slot(slot, slot)


def _last_uses(fused: FusedGraph) -> Mapping[int, int]:
    last: dict[int, int] = {}
    for k, kernel in enumerate(fused.kernels):
        for node in (*kernel.inputs, *kernel.outputs):
            last[node] = k
    return last


def _round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
