"""Kernels of MetaSchedule's own space: replay a trace on the workload and lower its blocks.

A trace is the JSON text of what MetaSchedule recorded, decisions and postprocessing included.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tvm import s_tir, tirx

from torch_pruner.codegen import scalar
from torch_pruner.codegen._tvm import on_cpu, tvm
from torch_pruner.codegen.kernel import BufferSpec, ScheduledKernel
from torch_pruner.codegen.plain import apply as plain_apply
from torch_pruner.codegen.workload import to_prim_func

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec


def workload_module(spec: Graph, *, plain: bool = False) -> Any:
    """The module that a trace applies to, and that MetaSchedule searches.

    ``plain``: with TVM's own arithmetic where it has such. A trace of either module fits the other.
    """
    apply = plain_apply if plain else scalar.apply
    return tvm.IRModule({"main": to_prim_func(spec, apply).with_attr("global_symbol", "main")})


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


def schedule_stock(spec: Graph, trace: str, target: TargetSpec) -> ScheduledKernel:
    """The kernel that ``trace`` makes of ``spec``; without a trace, the loops as they come.

    Raises:
        ValueError: The trace is not JSON. Whatever TVM raises when it does not fit the workload.
    """
    module = workload_module(spec)
    if trace:
        schedule = s_tir.Schedule(module, debug_mask="none")
        s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), schedule)
        module = schedule.mod
    with tvm.target.Target(target.tvm_target()):
        lowered = _lower_blocks()(module)["main"]
    lowered = lowered.with_body(on_cpu(lowered.body))
    nodes = spec.nodes
    return ScheduledKernel(
        func=lowered,
        inputs=tuple(BufferSpec(nodes[i].shape, nodes[i].dtype) for i in spec.inputs),
        outputs=tuple(BufferSpec(nodes[i].shape, nodes[i].dtype) for i in spec.outputs),
        scratch=(),
        packs=(None,) * len(spec.inputs),
    )


def _lower_blocks() -> Any:
    """The first part of TVM's pipeline for blocks, up to plain loops on flat buffers."""
    return tvm.transform.Sequential(
        [
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
