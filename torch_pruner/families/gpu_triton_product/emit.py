"""Matmul and convolution in Triton's language.

A block, or one of a few that take them in turns, computes tiles of ``bm`` rows by ``bn`` columns,
``bk`` positions of the reduction at a time; Triton copies what the next turns read ahead. A
convolution is the same product, its rows positions of the output: what is outside of its input is
masked. What the graph does with the sums is computed on the tile before it is stored.

Where ``split`` blocks share a tile, each sums its part of the reduction, and a second launch adds
these up and does the rest.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import in_blocks
from torch_pruner.codegen.parts.gpu.operands import Moved, first_operand
from torch_pruner.codegen.parts.kernel import index_dtype_of, parameters
from torch_pruner.codegen.parts.operands import Nest, second_operand
from torch_pruner.codegen.parts.output import anchor_index
from torch_pruner.codegen.parts.triton.expressions import TYPES, Tile, Value
from torch_pruner.codegen.parts.triton.source import Source, write
from torch_pruner.codegen.tir.builders import Buffer, Expr, T, Var, index_var, indexing
from torch_pruner.codegen.tir.indices import remembering
from torch_pruner.codegen.tir.reader import Index, Reader, unlinear
from torch_pruner.codegen.tir.scalar import powers_by_hardware
from torch_pruner.codegen.tir.values import value_dtype
from torch_pruner.families.gpu_triton_product.form import packed_depth
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_pruner.codegen.parts.triton.kernel import TritonKernel
    from torch_pruner.families.gpu_triton_product.form import GpuTritonProductDecisions
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

ADDING = 1024  # elements of a block that adds parts up
ADDING_WARPS = 4


def nest_of(
    spec: Graph,
    decisions: GpuTritonProductDecisions[int],
    signature: Signature,
    inputs: Sequence[Buffer],
    out: Buffer,
) -> Nest:
    """The operands of a product with its buffers."""
    constant = next((k for k, p in enumerate(signature.packs) if p is not None), None)
    panel = None if constant is None else inputs[constant]
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    con, bn = contraction_of(spec), decisions.bn
    return Nest(spec, con, reader, bn, 1, 1, 1, False, False, panel, None, None, out)


def text(
    spec: Graph, decisions: GpuTritonProductDecisions[int], signature: Signature
) -> tuple[TritonKernel, ...]:
    """One kernel, or two where parts of a reduction are added up."""
    width = index_dtype_of(spec, signature)
    with indexing(width), remembering(), powers_by_hardware():
        inputs, (out,), scratch = parameters(signature)
        nest = nest_of(spec, decisions, signature, inputs, out)
        source = Source(signature, [*inputs, out, *scratch], width)
        product = _Product(nest, decisions, source, scratch[0] if scratch else None)
        first = product.kernel()
        return (first, product.adding()) if scratch else (first,)


@dataclass(slots=True)
class _Product:
    nest: Nest
    decisions: GpuTritonProductDecisions[int]
    source: Source
    parts: Buffer | None

    @property
    def con(self) -> Contraction:
        return self.nest.con

    @property
    def tiles(self) -> int:
        down = in_blocks(self.con.rows, self.decisions.bm)
        across = in_blocks(self.con.n, self.decisions.bn)
        return self.con.groups * down * across * self.decisions.split

    def kernel(self) -> TritonKernel:
        d = self.decisions
        tile = self.source.tile({})
        if d.blocks:
            tile.line(f"for number in tl.range(tl.program_id(0), {self.tiles}, {d.blocks}):")
            tile.indent += "    "
            tile.line(f"tile = {self.source.wide('number')}")
        else:
            tile.line(f"tile = {self.source.block}")
        self._tile(tile)
        return self.source.kernel(tile, min(d.blocks or self.tiles, self.tiles), d.warps, d.stages)

    def _tile(self, tile: Tile) -> None:
        con, d = self.con, self.decisions
        g, m, n, k = (index_var(name) for name in ("g", "m", "n", "k"))
        acc = T.Var("acc", "float32")
        part, place = self._place(tile, g)
        turns = in_blocks(con.depth, d.bk) // d.split
        rows, columns = f"tl.arange(0, {d.bm})[:, None]", f"tl.arange(0, {d.bn})[None, :]"
        m_edge = {"m": f"(rows < {con.rows})"} if con.rows % d.bm else {}
        n_edge = {"n": f"(columns < {con.n})"} if con.n % d.bn else {}
        tile.line(f"rows = {place[0]} * {d.bm} + {rows}")
        tile.line(f"columns = {place[1]} * {d.bn} + {columns}")
        tile.line(f"acc = tl.zeros(({d.bm}, {d.bn}), tl.float32)")
        first = f"{part} * {turns} + " if d.split > 1 else ""
        tile.line(f"for turn in tl.range(0, {turns}):")
        indent = tile.indent + "    "
        tile.line(f"    position = ({first}{self.source.wide('turn')}) * {d.bk}")
        k_edge = f"(k{{}} < {con.depth})" if con.depth % d.bk else ""

        def axis(name: str, at: str) -> dict[str, str]:
            inner.line(f"{name} = position + tl.arange(0, {d.bk}){at}")
            return {"k": k_edge.format(name[1:])} if k_edge else {}

        inner = tile.within({"m": d.bm, "k": d.bk}, m_edge, indent)
        inner.edges = {**m_edge, **axis("k_a", "[None, :]")}
        inner.number(m, in_blocks(con.rows, d.bm) * d.bm, "rows", "m")
        inner.number(k, packed_depth(con.depth, d.bk), "k_a", "k")
        a = self._a(inner, g, m, k)
        inner = tile.within({"k": d.bk, "n": d.bn}, n_edge, indent)
        inner.edges = {**axis("k_b", "[:, None]"), **n_edge}
        inner.number(n, in_blocks(con.n, d.bn) * d.bn, "columns", "n")
        inner.number(k, packed_depth(con.depth, d.bk), "k_b", "k")
        b = self._b(inner, g, k, n)
        precision = ', input_precision="tf32"' if self._dtype == "float32" else ""
        inner.line(f"acc = tl.dot({a}, {b}, acc{precision})")
        after = tile.within({"m": d.bm, "n": d.bn}, {**m_edge, **n_edge}, tile.indent)
        after.number(m, in_blocks(con.rows, d.bm) * d.bm, "rows", "m")
        after.number(n, in_blocks(con.n, d.bn) * d.bn, "columns", "n")
        after.held(acc, "acc")
        if self.parts is None:
            self._write(after, (g, m, n), acc)
            return
        number = index_var("part")
        after.number(number, d.split, part)
        at = ((number * con.groups + g) * con.rows + m) * con.n + n
        after.store(self.parts, at, acc)

    def _place(self, tile: Tile, g: Var) -> tuple[str, tuple[str, str]]:
        """Text of (the part of the reduction, the block of rows and that of columns) of ``tile``.

        Blocks of the same ``near`` rows of tiles come one after another, so that what they read is
        in the second cache, and of one tile the parts.
        """
        con, d = self.con, self.decisions
        down, across = in_blocks(con.rows, d.bm), in_blocks(con.n, d.bn)
        at = "tile"
        if d.split > 1:
            tile.line(f"part = tile % {d.split}")
            tile.line(f"at = tile // {d.split}")
            at = "at"
        if con.groups > 1:
            tile.number(g, con.groups, f"{at} // {down * across}")
            tile.line(f"inner = {at} % {down * across}")
            at = "inner"
        else:
            tile.number(g, 1, "0")
        near = min(d.near, down)
        if near == 1 or across == 1:
            tile.line(f"block_m = {at} // {across}")
            tile.line(f"block_n = {at} % {across}")
        else:
            tile.line(f"first = {at} // {near * across} * {near}")
            tile.line(f"high = tl.minimum({down} - first, {near})")
            tile.line(f"block_m = first + {at} % {near * across} % high")
            tile.line(f"block_n = {at} % {near * across} // high")
        return "part", ("block_m", "block_n")

    @property
    def _dtype(self) -> str:
        return self.nest.spec.nodes[self.con.a].dtype

    def _a(self, tile: Tile, g: Expr, m: Expr, k: Expr) -> str:
        moved = Moved(self.nest, self.con.a, tensor=True)
        inside, value = first_operand(moved.nest, g, unlinear(m, self.con.m), T.const(0, "int32"))
        index = unlinear(k, self.con.k)
        return self._operand(tile, moved, inside(index), lambda: value(index))

    def _b(self, tile: Tile, g: Expr, k: Expr, n: Expr) -> str:
        con, d, panel = self.con, self.decisions, self.nest.panel
        moved = Moved(self.nest, con.b, tensor=True, packed=panel is not None)
        if panel is not None:
            columns, deep = self.nest.blocks * d.bn, packed_depth(con.depth, d.bk)
            tile.edges = {}  # where there are no weights it has zeros
            return self._operand(tile, moved, [], lambda: panel[(g * columns + n) * deep + k])
        index = unlinear(k, con.k)
        return self._operand(tile, moved, [], lambda: second_operand(moved.nest, g, index, n))

    def _operand(
        self, tile: Tile, moved: Moved, inside: list[Expr], value: Callable[[], Expr]
    ) -> str:
        """A tile of what tensor cores take, with zeros where there is nothing.

        Of what is only moved a load makes them, and Triton may copy it without registers.
        """
        with _under(tile, inside) as guard:
            found = tile.computed(moved.nest.reader, value)
        dtype = self._dtype
        if moved.raw:
            return tile.whole(found, dtype)
        whole = f"({tile.whole(found, value_dtype(dtype))})"
        conditions = [*tile.edges.values(), *([] if guard is None else [guard.text])]
        if conditions:
            whole = f"tl.where({' & '.join(conditions)}, {whole}, 0.0)"
        return f"({whole}).to({TYPES[dtype]})"

    def _write(self, tile: Tile, place: Index, acc: Var) -> None:
        """Sums through the rest of the graph, stored."""
        con, nest = self.con, self.nest
        g, m, n = place
        index = anchor_index(con, g, unlinear(m, con.m), n)
        write(tile, nest.spec, nest.reader, con.anchor, index, acc, nest.out)

    def adding(self) -> TritonKernel:
        """A launch of its own: the sums of all parts, through the rest of the graph."""
        con = self.con
        total = con.groups * con.rows * con.n
        tile = self.source.tile({"i": ADDING})
        item, acc = index_var("item"), T.Var("acc", "float32")
        tile.line(f"items = {self.source.block} * {ADDING} + tl.arange(0, {ADDING})")
        tile.edges = {"i": f"(items < {total})"} if total % ADDING else {}
        tile.number(item, in_blocks(total, ADDING) * ADDING, "items", "i")
        assert self.parts is not None
        for part in range(self.decisions.split):
            found = tile(self.parts[item + part * total])
            tile.line(f"acc = {'acc + ' if part else ''}{found.text}")
        tile.held(acc, "acc")
        g, m, n = unlinear(item, (con.groups, con.rows, con.n))
        self._write(tile, (g, m, n), acc)
        return self.source.kernel(tile, in_blocks(total, ADDING), ADDING_WARPS, 1)


@contextmanager
def _under(tile: Tile, conditions: list[Expr]) -> Iterator[Value | None]:
    """Inside, loads of ``tile`` are of places where ``conditions`` hold."""
    if not conditions:
        yield None
        return
    with tile.guarded(T.all(*conditions)) as guard:
        yield guard
