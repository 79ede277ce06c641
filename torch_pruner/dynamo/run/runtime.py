"""Calls at run time: fill the address table, run the program, hand back torch's own tensors.

Nothing here looks anything up, logs, or reads the environment; the only lock is taken when a
parameter changed.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch

from torch_pruner.compiler.compiled import CompiledGraph, LibraryCall
from torch_pruner.devices.aten import run_spec
from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.devices.openmp import crowded
from torch_pruner.dynamo.lower.calls import picker
from torch_pruner.dynamo.lower.tensors import takeable
from torch_pruner.dynamo.run.huge_pages import ask_for
from torch_pruner.dynamo.run.openmp import SMALL_BYTES, on_one_thread
from torch_pruner.dynamo.run.overwriting import Overwriting
from torch_pruner.dynamo.run.packed_inputs import PackedInputs
from torch_pruner.dynamo.run.recycled import recycled
from torch_pruner.graph.updates import written_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import RuntimeValue, StepCall
    from torch_pruner.dynamo.lower.tensors import TensorSpec
    from torch_pruner.dynamo.run.snapshot import Snapshot
    from torch_pruner.graph.memory import Place


_profiler = torch.autograd.profiler


def _allocator(device: torch.device, spec: TensorSpec) -> Callable[..., torch.Tensor]:
    """``torch.empty_strided`` of (shape, strides, dtype) on a device, for tensors of ``spec``.

    On CPUs it is what Inductor's programs call, where torch has it: no parsing of arguments and no
    dispatcher, whose code the caches have lost since the last call.
    """
    if device.type != "cpu":
        return partial(_empty, device)
    found = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", None)
    function = cast("Callable[..., torch.Tensor]", found or partial(_empty, device))
    return recycled(function, math.prod(spec.shape) * spec.dtype.itemsize)


def _empty(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


@dataclass(slots=True)
class _Own:
    """What each calling thread has for itself: an address table and, in host memory, a workspace.

    On other devices the workspace is allocated for each call: torch's allocator knows which stream
    uses it, and takes it from the pool of a graph that is being captured.
    """

    table: ctypes.Array[ctypes.c_int64]
    address: int  # of the table
    workspace: torch.Tensor | None = None
    snapshot: Snapshot | None = None


class _Local(threading.local):
    """Asked once a call: each question is one to a dictionary of the thread's."""

    own: _Own | None = None


class RegionCall:
    """One compiled region as a function of a list of tensors. Thread safe."""

    def __init__(
        self,
        name: str,
        compiled: CompiledGraph,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        static: Sequence[int],
        device: Device,
        narrow: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """``narrow``: the dtypes in which the program reads parameters that are float32."""
        self.device = device.device
        self.name = f"## Call PrunerGraph {name} ##"
        self.compiled = compiled
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._n_outputs = len(self._outputs)
        orders = [s.order for s in inputs]
        self.packed = PackedInputs(compiled, len(inputs), static, orders, device, narrow)
        self._reads_static = bool(static)
        varying = set(range(len(inputs))) - set(static)
        plan = compiled.plan
        self._dynamic = tuple(
            (k, s.index, self._inputs[s.index].kernel_strides)
            for k, s in enumerate(plan.slots)
            if s.kind == "input" and s.index in varying
        )
        self._made = tuple(
            (j, k, _allocator(device.device, o), o.shape, o.kernel_strides, o.dtype)
            for k, s in enumerate(plan.slots)
            if s.kind == "output"
            for j, o in ((s.index, self._outputs[s.index]),)
        )
        self._over: Overwriting | None = None  # see ``overwrite``
        # Outputs that are inputs, written into: what torch then copies back is the same tensor.
        self._updated = tuple(written_inputs(compiled.graph).items())
        made = {entry[0] for entry in (*self._made, *self._updated)}
        self._copies = tuple((j, self._source(j)) for j in range(len(outputs)) if j not in made)
        self._restride = tuple(j for j in range(len(outputs)) if not self._outputs[j].dense)
        self._workspace_slot = next(k for k, s in enumerate(plan.slots) if s.kind == "workspace")
        self._local = _Local()
        self._simple = all(not isinstance(s, LibraryCall) for s in compiled.steps)
        self._keeps_workspace = device.host_memory
        self._on_one_thread = device.host_memory and crowded()  # small copies

    def overwrite(self, pairs: Collection[tuple[int, int]]) -> None:
        """From now on write output ``j`` over input ``i``, which is never wanted again, for the
        pairs (j, i) of these for which the program may. A call changes its inputs then."""
        may = {
            j: i
            for j, i in self.compiled.overwrites
            if (j, i) in pairs and i < len(self._inputs) and self._outputs[j].dense
        }
        if may:
            slots = self.compiled.plan.slots
            self._over = Overwriting(may, self._made, slots, self._inputs)
            self._made = tuple(entry for entry in self._made if entry[0] not in may)

    @property
    def weight_bytes(self) -> int:
        """Bytes that are held beside the parameters for kernels to read."""
        return self.compiled.plan.packed_bytes

    def _source(self, j: int) -> tuple[str, int]:
        """Where an output that no kernel writes comes from: an "input", what was "prepared" from
        parameters, or another "output"; and which one."""
        slot = self.compiled.plan.slots[self.compiled.plan.outputs[j]]
        assert slot.kind in ("input", "output"), slot
        if slot.kind == "input" and slot.index >= len(self._inputs):
            return ("prepared", slot.index - len(self._inputs))
        return (slot.kind, slot.index)

    def _start_thread(self) -> _Own:
        table = (ctypes.c_int64 * len(self.compiled.plan.slots))()
        own = self._local.own = _Own(table, ctypes.addressof(table))
        self._take_workspace(own)
        return own

    def _take_workspace(self, own: _Own) -> None:
        size = max(self.compiled.plan.workspace_bytes, 1)
        own.workspace = ask_for(torch.empty(size, dtype=torch.uint8, device=self.device))
        own.table[self._workspace_slot] = own.workspace.data_ptr()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = self._local.own
        if own is None:
            own = self._start_thread()
        elif not self._keeps_workspace:
            self._take_workspace(own)
        table, snapshot = own.table, own.snapshot
        if snapshot is None or self._reads_static:
            snapshot = self.packed.current(inputs)
            if snapshot is not own.snapshot:
                for slot, address in snapshot.table:
                    table[slot] = address
                own.snapshot = snapshot
        given = inputs
        held: list[torch.Tensor] = []  # copies of inputs stay alive until the program is done
        for slot, i, strides in self._dynamic:
            tensor = inputs[i]
            address = tensor.data_ptr()
            if not address or address & 63 or tensor.stride() != strides:
                tensor = self._copied(takeable, tensor, strides)
                held.append(tensor)
                inputs = [*inputs[:i], tensor, *inputs[i + 1 :]]
                address = tensor.data_ptr()
            table[slot] = address
        results: list[torch.Tensor] = [None] * self._n_outputs  # type: ignore[list-item]
        for j, slot, allocate, shape, strides, dtype in self._made:
            out = allocate(shape, strides, dtype)
            results[j] = out
            table[slot] = out.data_ptr()
        if self._over is not None:
            self._over.place(table, given, results)
        if self._simple:
            for entry in self.compiled.steps:
                entry(own.address)  # type: ignore[operator]
        else:
            self._run_steps(own, inputs, results)
        for j, i in self._updated:
            results[j] = inputs[i]
        if self._copies or self._restride:
            self._finish(snapshot, inputs, results)
        if not self._keeps_workspace:
            own.workspace = None
        return results

    def _run_steps(
        self, own: _Own, inputs: Sequence[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        for step in self.compiled.steps:
            if isinstance(step, LibraryCall):
                operands = [
                    self._tensor(
                        own,
                        p,
                        inputs,
                        results,
                        step.spec.nodes[i].shape,
                        step.spec.nodes[i].dtype,
                    )
                    for p, i in zip(step.inputs, step.spec.inputs, strict=True)
                ]
                values = run_spec(step.spec, operands)
                for p, o, value in zip(step.outputs, step.spec.outputs, values, strict=True):
                    node = step.spec.nodes[o]
                    self._tensor(own, p, inputs, results, node.shape, node.dtype).copy_(value)
            else:
                step(own.address)

    def _tensor(
        self,
        own: _Own,
        place: Place,
        inputs: Sequence[torch.Tensor],
        results: list[torch.Tensor],
        shape: tuple[int, ...],
        dtype: str,
    ) -> torch.Tensor:
        """The buffer at ``place`` as a dense tensor of ``shape`` (memory order)."""
        slot = self.compiled.plan.slots[place.slot]
        if slot.kind == "workspace":
            assert own.workspace is not None
            count = 1
            for d in shape:
                count *= d
            nbytes = count * DTYPES[dtype].itemsize
            return (
                own.workspace[place.offset : place.offset + nbytes].view(DTYPES[dtype]).view(shape)
            )
        if slot.kind == "output":
            spec, tensor = self._outputs[slot.index], results[slot.index]
            return tensor.permute(spec.order)
        if slot.index < len(self._inputs):
            spec = self._inputs[slot.index]
            return takeable(inputs[slot.index].detach(), spec.kernel_strides).permute(spec.order)
        assert own.snapshot is not None
        prepared = own.snapshot.prepared[slot.index - len(self._inputs)]
        assert prepared is not None
        return prepared

    def _finish(
        self, snapshot: Snapshot, inputs: Sequence[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        values = {"input": inputs, "output": results, "prepared": snapshot.prepared}
        for j, (kind, index) in self._copies:
            source = values[kind][index]
            assert source is not None, "a prepared value that only its packed copy holds"
            spec = self._outputs[j]
            results[j] = self._copied(self._new(spec).copy_, source)
        for j in self._restride:
            spec = self._outputs[j]
            if results[j].stride() != spec.strides:
                results[j] = self._copied(self._new(spec).copy_, results[j])

    def _copied(
        self, copy: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: object
    ) -> torch.Tensor:
        """``copy(tensor, *args)``, on one thread if that is little."""
        if self._on_one_thread and tensor.nbytes <= SMALL_BYTES:
            return on_one_thread(copy, tensor, *args)
        return copy(tensor, *args)

    def _new(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One step of a graph that runs: what it reads and writes, and which values nobody needs then.

    ``named`` does the same under a name that ``torch.profiler`` shows.
    """

    run: StepCall
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...]
    named: StepCall | None = None


class GraphCall:
    """A captured graph as steps over numbered values; a boxed callable, as AOTAutograd wants it."""

    def __init__(
        self,
        steps: Sequence[GraphStep],
        n_values: int,
        constants: Mapping[int, RuntimeValue],
        outputs: Sequence[tuple[int, RuntimeValue]],
    ) -> None:
        """``outputs``: the number of a value and None, or -1 and a constant."""
        # On the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True
        # Hundreds of parameters pass through here at every call: no loop of Python's over them, and
        # what the last step used is dropped with the list of values.
        dead = [step.dead for step in steps[:-1]] + [()]
        rows = [(picker(s.reads), s.writes, d) for s, d in zip(steps, dead, strict=False)]
        # One step whose results are the graph's: there is nothing to number.
        self._only = None
        if len(steps) == 1 and not constants and [n for n, _ in outputs] == [*steps[0].writes]:
            reads = steps[0].reads
            given = len(reads) if reads == tuple(range(len(reads))) else -1
            self._only = (steps[0].run, steps[0].named or steps[0].run, rows[0][0], given)
        self._steps = tuple((s.run, *row) for s, row in zip(steps, rows, strict=True))
        self._named = tuple((s.named or s.run, *row) for s, row in zip(steps, rows, strict=True))
        known, numbers = dict(constants), []
        for number, constant in outputs:
            if number < 0:
                number = n_values
                known[number] = constant
                n_values += 1
            numbers.append(number)
        self._n_values = n_values
        self._constants = tuple(known.items())
        self._outputs: Callable[[Sequence[RuntimeValue]], Sequence[RuntimeValue]] = picker(numbers)

    def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        if self._only is not None:
            run, named, pick, given = self._only
            if _profiler._is_profiler_enabled:
                run = named
            results = list(run(args if len(args) == given else pick(args)))
            if isinstance(args, list):
                args.clear()
            return results
        values: list[RuntimeValue] = [*args, *(None,) * (self._n_values - len(args))]
        if isinstance(args, list):
            args.clear()
        for index, constant in self._constants:
            values[index] = constant
        steps = self._named if _profiler._is_profiler_enabled else self._steps
        for run, pick, writes, dead in steps:
            for index, value in zip(writes, run(pick(values)), strict=True):
                values[index] = value
            for index in dead:
                values[index] = None
        return list(self._outputs(values))


def profiled(name: str, run: StepCall) -> StepCall:
    """``run`` under a name that ``torch.profiler`` shows."""

    def call(inputs: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
        with torch._C._profiler._RecordFunctionFast(name):
            return run(inputs)

    return call
