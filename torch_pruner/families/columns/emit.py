"""Emits reductions over outer axes, and windows: an accumulator for each output element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import around_lines
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.reductions import column_block
from torch_pruner.codegen.parts.sweeps import over_blocks
from torch_pruner.codegen.tir.reader import Reader
from torch_pruner.families.columns.form import line_windows
from torch_pruner.families.columns.lines import Lines
from torch_pruner.families.sweeps import inner_axis_kept

if TYPE_CHECKING:
    from torch_pruner.families.columns.form import ColumnsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: ColumnsDecisions[int], signature: Signature) -> Emitted:
    """TIR for a reduction over outer axes, or a window."""
    inputs, outputs, scratch = parameters(signature)
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    if line_windows(spec):
        body = Lines(spec, reader, outputs, decisions.vl).sweep(decisions.chunk, decisions.par)
        return Emitted(body, inputs, outputs, scratch)
    block = column_block(spec, reader, outputs, abreast=inner_axis_kept(spec))
    shape = spec.nodes[spec.outputs[0]].shape
    around = around_lines(spec, reader)
    body = over_blocks(shape, decisions.vl, decisions.chunk, decisions.par, block, around)
    return Emitted(body, inputs, outputs, scratch)
