"""Emits sums of outer products: the loops of ``contraction`` over two packed operands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.copies import pack_panel, pack_rows
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.parts.output import output_path
from torch_pruner.codegen.tir.builders import seq
from torch_pruner.codegen.tir.reader import Reader
from torch_pruner.families.contraction.emit import compute
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.extents import unneeded, unwritten

if TYPE_CHECKING:
    from torch_pruner.families.outer_products.form import OuterProductsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def emit(spec: Graph, decisions: OuterProductsDecisions[int], signature: Signature) -> Emitted:
    """TIR for a kernel graph with one contraction."""
    con = contraction_of(spec)
    inputs, (out,), scratch = parameters(signature)
    rows, panel, *sums = scratch
    nest = Nest(
        spec,
        con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        decisions.tm,
        decisions.nv,
        decisions.ku,
        bool(decisions.par),
        ahead=False,
        panel=panel,
        copied=None,
        sums=sums[0] if sums else None,
        out=out,
        kb=decisions.kb,
        rows=rows,
        unwritten=unwritten(spec, output_path(spec, con.anchor)),
        unneeded=unneeded(spec)[con.anchor],
    )
    products = compute(nest, decisions.mc, decisions.order)
    return Emitted(seq([pack_rows(nest), pack_panel(nest), products]), inputs, [out], scratch)
