"""Attention in one kernel in Triton's language: scores stay in registers, whatever the sequence.

A block takes ``bm`` queries and goes over the keys, ``bn`` at a time, with the online softmax of
``gpu_attention``, whose expressions it shares. Where there are too few queries for a card,
``split`` blocks share the keys, and a second launch joins what each has found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import in_blocks
from torch_pruner.codegen.parts.gpu.operands import Moved
from torch_pruner.codegen.parts.kernel import index_dtype_of, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.parts.triton.expressions import TYPES, Tile
from torch_pruner.codegen.parts.triton.source import Source, write
from torch_pruner.codegen.tir.builders import Buffer, Expr, T, Var, imm, index_var, indexing
from torch_pruner.codegen.tir.indices import remembering
from torch_pruner.codegen.tir.reader import Index, Reader, unlinear
from torch_pruner.codegen.tir.scalar import powers_by_hardware
from torch_pruner.codegen.tir.values import value_dtype
from torch_pruner.families.gpu_attention.form import FACTS
from torch_pruner.families.gpu_attention.parts import row_at
from torch_pruner.families.gpu_attention.softmax import Softmax
from torch_pruner.families.gpu_triton_attention.form import padded
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.contraction import contraction_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.triton.kernel import TritonKernel
    from torch_pruner.families.gpu_triton_attention.form import GpuTritonAttentionDecisions
    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

F32 = "float32"
JOINING = 1024  # elements of a block that joins parts
JOINING_WARPS = 4


def text(
    spec: Graph, decisions: GpuTritonAttentionDecisions[int], signature: Signature
) -> tuple[TritonKernel, ...]:
    """One kernel, or two where blocks share keys."""
    att = attention_of(spec)
    assert att is not None
    width = index_dtype_of(spec, signature)
    with indexing(width), remembering(), powers_by_hardware():
        inputs, (out,), scratch = parameters(signature)
        reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
        source = Source(signature, [*inputs, out, *scratch], width)
        softmax = Softmax(spec, att, reader)
        kernel = _Attention(spec, att, softmax, decisions, source, out, scratch)
        first = kernel.kernel()
        return (first, kernel.joining()) if scratch else (first,)


@dataclass(slots=True)
class _Attention:
    spec: Graph
    att: Attention
    softmax: Softmax
    decisions: GpuTritonAttentionDecisions[int]
    source: Source
    out: Buffer
    scratch: list[Buffer]
    group: Var = field(default_factory=lambda: index_var("group"))
    row: Var = field(default_factory=lambda: index_var("row"))
    key: Var = field(default_factory=lambda: index_var("key"))
    at: Var = field(default_factory=lambda: index_var("at"))  # along a head

    @property
    def rows(self) -> int:
        """Of a group."""
        return self.decisions.heads * self.att.queries

    @property
    def _dtype(self) -> str:
        nodes = self.spec.nodes
        return nodes[nodes[self.att.out].inputs[1]].dtype

    def _place(self) -> tuple[Expr, Expr]:
        """The head and the query that a row of a group is."""
        heads, queries = self.decisions.heads, self.att.queries
        if heads == 1:
            return self.group, self.row
        head = self.group * heads + T.floordiv(self.row, queries)
        return head, T.floormod(self.row, queries)

    def _index(self, key: Expr) -> Index:
        """Of a score."""
        head, query = self._place()
        return (*unlinear(head, self.att.batch), query, key)

    # Tiles and what is known in them: rows by scores, by columns, and operands.

    def _tile(self, lines: Tile, axes: dict[str, int], indent: str) -> Tile:
        """Of two of the axes ``m`` (rows), ``n`` (keys), ``d`` (depth) and ``w`` (columns)."""
        att, d = self.att, self.decisions
        there = {"m": self.rows, "n": att.keys, "d": att.depth, "w": att.width}
        names = {"m": "rows", "n": "keys", "d": "depth", "w": "columns"}
        variables = {"m": self.row, "n": self.key, "d": self.at, "w": self.at}
        tile = lines.within(axes, {}, indent)
        for axis, at in zip(axes, ("[:, None]", "[None, :]"), strict=True):
            name = names[axis] + ("_down" if at == "[:, None]" else "_along")
            size = axes[axis]
            turn = self.source.wide("turn")
            start = {"m": f"first * {d.bm} + ", "n": f"{turn} * {d.bn} + "}.get(axis, "")
            tile.line(f"{name} = {start}tl.arange(0, {size}){at}")
            if there[axis] % size:
                tile.edges[axis] = f"({name} < {there[axis]})"
            tile.number(variables[axis], in_blocks(there[axis], size) * size, name, axis)
        return tile

    def _operand(
        self, tile: Tile, product: int, second: int, value: Callable[[int, Reader], Expr]
    ) -> str:
        """An operand of a product as tensor cores take it, with zeros where there is nothing."""
        con = contraction_at(self.spec, product)
        reader = self.softmax.reader
        nest = Nest(self.spec, con, reader, 1, 1, 1, 1, False, False, None, None, None, self.out)
        node = con.b if second else con.a
        moved = Moved(nest, node, tensor=True)
        found = tile.computed(moved.nest.reader, lambda: value(node, moved.nest.reader))
        if moved.raw:
            return tile.whole(found, self._dtype)
        whole = f"({tile.whole(found, value_dtype(self._dtype))})"
        if tile.edges:
            whole = f"tl.where({' & '.join(tile.edges.values())}, {whole}, 0.0)"
        return f"({whole}).to({TYPES[self._dtype]})"

    def kernel(self) -> TritonKernel:
        att, d = self.att, self.decisions
        depth, width = padded(att.depth), padded(att.width)
        tiles, turns = in_blocks(self.rows, d.bm), in_blocks(att.keys, d.bn) // d.split
        top = self.source.tile({})
        top.line(f"block = {self.source.block}")
        top.line(f"part = block % {d.split}")
        top.line(f"first = block // {d.split} % {tiles}")
        top.number(self.group, att.groups // d.heads, f"block // {d.split * tiles}")
        top.line(f"largest = tl.full(({d.bm}, 1), float('-inf'), tl.float32)")
        top.line(f"total = tl.zeros(({d.bm}, 1), tl.float32)")
        top.line(f"acc = tl.zeros(({d.bm}, {width}), tl.float32)")
        queries = self._tile(top, {"m": d.bm, "d": depth}, top.indent)

        def query_at(node: int, reader: Reader) -> Expr:
            head, query = self._place()
            return reader.at(node, (*unlinear(head, self._batch(node)), query, self.at))

        held = self._operand(queries, att.scores, 0, query_at)
        top.line(f"query = {held}")
        ends = f"part * {turns}", f"part * {turns} + {turns}"
        if att.causal:  # keys are never shared then
            top.line(f"last = tl.minimum((first * {d.bm} + {d.bm + d.bn - 1}) // {d.bn}, {turns})")
            ends = "0", "last"
        top.line(f"for turn in tl.range({ends[0]}, {ends[1]}):")
        self._turn(top, top.indent + "    ", depth, width)
        after = self._tile(top, {"m": d.bm, "w": width}, top.indent)
        self._leave(after)
        blocks = att.groups // d.heads * tiles * d.split
        return self.source.kernel(top, blocks, d.warps, d.stages)

    def _batch(self, node: int) -> tuple[int, ...]:
        return self.spec.nodes[node].shape[:-2]

    def _head(self) -> Expr:
        """The first head of a group, for keys and values."""
        return self.group * self.decisions.heads

    def _turn(self, top: Tile, indent: str, depth: int, width: int) -> None:
        att, d, softmax, nodes = self.att, self.decisions, self.softmax, self.spec.nodes
        keys = self._tile(top, {"d": depth, "n": d.bn}, indent)

        def key_at(node: int, reader: Reader) -> Expr:
            return reader.at(node, (*unlinear(self._head(), self._batch(node)), self.at, self.key))

        taken = self._operand(keys, att.scores, 1, key_at)
        keys.line(f"score = tl.dot(query, {taken})")
        tile = self._tile(top, {"m": d.bm, "n": d.bn}, indent)
        score, masked, before, largest = (
            T.Var(name, F32) for name in ("score", "masked", "largest", "wider")
        )
        tile.held(score, "score")
        reader, dtype = softmax.reader, value_dtype(nodes[att.scores].dtype)
        reader.overrides[att.scores] = lambda _: score.astype(dtype)
        found = tile.computed(
            reader, lambda: reader.at(att.masked, self._index(self.key)).astype(F32)
        )
        del reader.overrides[att.scores]
        text = tile.whole(found, F32)
        if "n" in tile.edges:
            text = f"tl.where({tile.edges['n']}, {text}, {tile(softmax.lowest).text})"
        tile.line(f"masked = {text}")
        tile.line("widest = tl.max(masked, 1)[:, None]")
        tile.held(masked, "masked")
        tile.held(before, "largest", "m")
        widest = T.Var("widest", F32)
        tile.held(widest, "widest", "m")
        tile.line(f"wider = {tile(softmax.larger(before, widest)).text}")
        tile.held(largest, "wider", "m")
        index = self._index(self.key)
        power = tile.computed(reader, lambda: softmax.power(masked, largest, index))
        tile.line(f"power = {tile.whole(power, F32)}")
        shrunk = tile.computed(reader, lambda: softmax.shrunk(before, largest, self._index(imm(0))))
        tile.line(f"factor = {shrunk.text}")
        tile.line("total = total * factor + tl.sum(power, 1)[:, None]")
        tile.line("largest = wider")
        values = self._tile(top, {"n": d.bn, "w": width}, indent)

        def value_at(node: int, reader: Reader) -> Expr:
            return reader.at(node, (*unlinear(self._head(), self._batch(node)), self.key, self.at))

        taken = self._operand(values, att.out, 1, value_at)
        values.line(f"acc = tl.dot(power.to({TYPES[self._dtype]}), {taken}, acc * factor)")

    def _leave(self, tile: Tile) -> None:
        """The sums, divided, through the rest of the graph; or as they are, for ``joining``."""
        total, acc = T.Var("total", F32), T.Var("acc", F32)
        tile.held(total, "total", "m")
        tile.held(acc, "acc")
        head, query = self._place()
        if not self.scratch:
            self._write(tile, head, query, total, acc)
            return
        sums, facts = self.scratch
        part, largest = index_var("part"), T.Var("largest", F32)
        tile.number(part, self.decisions.split, "part")
        at = row_at(self.att, part, head, query)
        tile.store(sums, at * self.att.width + self.at, acc)
        tile.held(largest, "largest", "m")
        first = T.EQ(self.at, imm(0))  # a column writes what a row has
        with tile.guarded(first):
            tile.store(facts, at * FACTS, largest)
            tile.store(facts, at * FACTS + 1, total)

    def _write(self, tile: Tile, head: Expr, query: Expr, total: Expr, acc: Expr) -> None:
        softmax, spec, att = self.softmax, self.spec, self.att
        index = (*unlinear(head, att.batch), query, imm(0))
        divisor = tile.computed(softmax.reader, lambda: softmax.divisor(total, index))
        tile.line(f"result = acc / {divisor.text}")
        result = T.Var("result", F32)
        tile.held(result, "result")
        place = (*unlinear(head, spec.nodes[att.out].shape[:-2]), query, self.at)
        write(tile, spec, softmax.reader, att.out, place, result, self.out)

    def joining(self) -> TritonKernel:
        """A launch of its own: what parts of the keys have left, shrunk to the largest of all."""
        att, softmax, split = self.att, self.softmax, self.decisions.split
        sums, facts = self.scratch
        count = att.groups * att.queries * att.width
        tile = self.source.tile({"i": JOINING})
        item = index_var("item")
        tile.line(f"items = {self.source.block} * {JOINING} + tl.arange(0, {JOINING})")
        tile.edges = {"i": f"(items < {count})"} if count % JOINING else {}
        tile.number(item, in_blocks(count, JOINING) * JOINING, "items", "i")
        head, query, column = unlinear(item, (att.groups, att.queries, att.width))
        largest, total, acc = (T.Var(name, F32) for name in ("largest", "total", "acc"))
        index = (*unlinear(head, att.batch), query, imm(0))
        rows = [row_at(att, imm(part), head, query) for part in range(split)]
        for part, row in enumerate(rows):
            tile.line(f"top_{part} = {tile(facts[row * FACTS]).text}")
            found = T.Var("top", F32)
            tile.held(found, f"top_{part}")
            wider = f"top_{part}" if part == 0 else tile(softmax.larger(largest, found)).text
            tile.line(f"largest = {wider}")
            tile.held(largest, "largest")
        for part, row in enumerate(rows):
            found = T.Var("top", F32)
            tile.held(found, f"top_{part}")
            shrunk = partial(softmax.shrunk, found, largest, index)
            factor = tile.computed(softmax.reader, shrunk)
            tile.line(f"factor = {factor.text}")
            whole, one = (
                tile(facts[row * FACTS + 1]).text,
                tile(sums[row * att.width + column]).text,
            )
            tile.line(f"total = {'total + ' if part else ''}{whole} * factor")
            tile.line(f"acc = {'acc + ' if part else ''}{one} * factor")
        tile.held(total, "total")
        tile.held(acc, "acc")
        divisor = tile.computed(softmax.reader, lambda: softmax.divisor(total, index))
        tile.line(f"result = acc / {divisor.text}")
        result = T.Var("result", F32)
        tile.held(result, "result")
        place = (*unlinear(head, self.spec.nodes[att.out].shape[:-2]), query, column)
        write(tile, self.spec, softmax.reader, att.out, place, result, self.out)
        return self.source.kernel(tile, in_blocks(count, JOINING), JOINING_WARPS, 1)
