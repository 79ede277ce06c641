"""Kernels of MetaSchedule's own space: replay a trace on the workload and lower its blocks.

A trace is the JSON text of what MetaSchedule recorded, decisions and postprocessing included. As
in TVM's pipeline for constant weights, it may choose the layout of a contraction's constant operand
to suit its tiles. That layout is written down as decisions, so that whoever runs the kernel can
pack without TVM: ``in{input}_extent{axis}`` and ``in{input}_stride{axis}``, outermost axis first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.stmt import SBlock

from torch_pruner.codegen.parts.kernel import ScheduledKernel
from torch_pruner.codegen.tir import scalar
from torch_pruner.codegen.tir.builders import IRModule, PrimFunc, T, on_cpu, tvm
from torch_pruner.families.metaschedule.plain import apply as plain_apply
from torch_pruner.families.metaschedule.workload import to_prim_func
from torch_pruner.graph.ops import OpKind
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.target import TargetSpec

PREPROC = "meta_schedule.layout_rewrite_preproc"  # marks a block that lays weights out anew


def workload_module(spec: Graph, *, plain: bool = False) -> IRModule:
    """The module that a trace applies to, and that MetaSchedule searches.

    ``plain``: with TVM's own arithmetic where it has such. A trace of either module fits the other.
    """
    apply = plain_apply if plain else scalar.apply
    func = to_prim_func(spec, apply).with_attr("global_symbol", "main")
    if free := layout_free(spec):
        func = func.with_attr("layout_free_buffers", free)
    return IRModule({"main": func})


def layout_free(spec: Graph) -> list[int]:
    """The inputs that a kernel may ask for in a layout of its own: constants that are multiplied,
    each read by one contraction and nothing else.
    """
    users = spec.users()
    found = []
    for k, position in enumerate(spec.inputs):
        node = position
        while len(users[node]) == 1 and spec.nodes[users[node][0]].op == "permute":
            (node,) = users[node]
        if spec.nodes[position].attr("static") and _multiplied_once(spec, node, users[node]):
            found.append(k)
    return found


def _multiplied_once(spec: Graph, node: int, users: Sequence[int]) -> bool:
    if len(users) != 1 or node in spec.outputs:
        return False
    user = spec.nodes[users[0]]
    return user.kind is OpKind.CONTRACT and user.inputs.count(node) == 1


def candidate_of(schedule: Any) -> Candidate:
    """The candidate that one of MetaSchedule's schedules of a workload's module is."""
    decisions = tuple(sorted(_layouts(schedule.mod["main"]).items()))
    return Candidate("metaschedule", decisions, trace_text(schedule.trace))


def _layouts(func: PrimFunc) -> dict[str, int]:
    """Extents and strides of the inputs that are rewritten before anything is computed."""
    rewrites: list[Any] = []

    def visit(block: Any) -> None:
        if PREPROC in block.annotations:
            rewrites.append(block.body)

    tvm_ffi.structural_walk(func.body, (SBlock, visit))
    params = list(func.params)
    decisions: dict[str, int] = {}
    for store in rewrites:
        load = store.value
        (k,) = (k for k, p in enumerate(params) if load.source.same_as(p))
        for axis, (extent, stride) in enumerate(_strides(load, store)):
            decisions[f"in{k}_extent{axis}"], decisions[f"in{k}_stride{axis}"] = extent, stride
    return decisions


def _strides(load: Any, store: Any) -> list[tuple[int, int]]:
    """(extent, stride in elements of what is loaded) of each axis of what is stored.

    Raises ValueError where the axes are no digits of the position, so that there is no such stride.
    """
    shape = [int(d) for d in load.source.shape]
    extents = [int(d) for d in store.buffer.shape]
    inverse = tirx.IndexMap(load.indices, store.indices, None).inverse(shape)

    def position(final: list[int]) -> int:
        found = inverse.map_indices([T.const(i, "int32") for i in final])
        offset = 0
        for index, extent in zip(found, shape, strict=True):
            offset = offset * extent + int(index)
        return offset

    last = position([d - 1 for d in extents])
    units = [[int(k == j) for k in range(len(extents))] for j in range(len(extents))]
    axes = [(d, position(u) if d > 1 else 0) for d, u in zip(extents, units, strict=True)]
    if position([0] * len(extents)) or last != sum((d - 1) * s for d, s in axes):
        raise ValueError(f"a layout of {extents} without strides")
    return axes


def trace_text(trace: Any) -> str:
    """A trace as JSON text."""
    return json.dumps(_plain(trace.as_json()), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """TVM's containers as Python's."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "__len__"):
        return [_plain(v) for v in value]
    return value.value  # an immediate


def replay(
    spec: Graph, candidate: Candidate, target: TargetSpec, signature: Signature
) -> ScheduledKernel:
    """The kernel that the candidate's trace makes of ``spec``; without one, the loops as they come.

    Raises:
        ValueError: The trace is not JSON, or the layouts that it chooses are not the candidate's.
            Whatever TVM raises when it does not fit the workload.
    """
    module = workload_module(spec)
    if candidate.trace:
        schedule = s_tir.Schedule(module, debug_mask="none")
        s_tir.schedule.Trace.apply_json_to_schedule(json.loads(candidate.trace), schedule)
        module = schedule.mod
    if _layouts(module["main"]) != dict(candidate.decisions):
        raise ValueError("the layouts of a candidate are not those of its trace")
    with tvm.target.Target(target.tvm_target()):
        lowered = _lower_blocks()(module)["main"]
    lowered = lowered.with_body(on_cpu(lowered.body))
    return ScheduledKernel(
        lowered, signature.inputs, signature.outputs, signature.scratch, signature.packs
    )


def _lower_blocks() -> Any:
    """The first part of TVM's pipeline for blocks, up to plain loops on flat buffers."""
    return tvm.transform.Sequential(
        [
            s_tir.transform.RemoveWeightLayoutRewriteBlock(),
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.CompactBufferAllocation(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.StmtSimplify(),
            s_tir.transform.AnnotateIrregularLoop(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
        ]
    )
