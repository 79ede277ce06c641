"""Steps of reductions and pooling windows, and a block of accumulators for columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.extremes import keep_extreme, least_extreme, place_dtype
from torch_pruner.codegen.parts.sweeps import Block, store_outputs
from torch_pruner.codegen.parts.windows import located, locating, over_window
from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm
from torch_pruner.codegen.tir.scalar import apply
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node

_COMBINE = {
    "sum": "add", "window_sum": "add", "prod": "mul", "max": "maximum", "window_max": "maximum",
    "window_argmax": "maximum", "min": "minimum", "any": "logical_or", "all": "logical_and",
}  # fmt: skip


def sum_dtype(node: Node) -> str:
    """The dtype a reduction accumulates in."""
    return (
        accumulator(node.dtype)
        if node.op in ("sum", "prod", "window_sum")
        else value_dtype(node.dtype)
    )


def combine(node: Node, left: Expr, right: Expr, dtype: str) -> Expr:
    """One step of the reduction ``node``: ``right`` is the next value."""
    if node.op == "window_max":  # eager's keeps the first of equals, and zeros of both signs are
        left, right = right, left
    return apply(_COMBINE[node.op], (left, right), dtype)


def identity(node: Node, dtype: str) -> Expr:
    """The value a reduction starts from."""
    op = _COMBINE[node.op]
    if op in ("add", "logical_or"):
        return T.const(0, dtype)
    if op in ("mul", "logical_and"):
        return T.const(1, dtype)
    lowest = op == "maximum"
    if dtype in FLOATS:
        return T.const(float("-inf") if lowest else float("inf"), dtype)
    return T.min_value(dtype) if lowest else T.max_value(dtype)


def column_block(spec: Graph, reader: Reader, outputs: Sequence[Buffer], *, abreast: bool) -> Block:
    """What computes a vector of neighbouring output elements, each with its own accumulator;
    ``abreast``: what neighbours reduce lies next to each other."""
    anchors = [i for i, n in enumerate(spec.nodes) if n.kind in (OpKind.REDUCE, OpKind.WINDOW)]

    def block(index: Callable[[Expr], Index], lanes: int) -> Stmt:
        accs = {
            a: buffer(lanes, sum_dtype(spec.nodes[a]), f"acc{a}", scope="local") for a in anchors
        }
        parts: list[Stmt] = [stack(acc) for acc in accs.values()]
        for a in anchors:

            def place(v: Expr, a: int = a) -> Index:
                return _places(spec, reader, accs, anchors, index(v), v)[a]

            if spec.nodes[a].op == "window_argmax":
                parts.append(_located(spec, reader, a, place, accs, lanes))
            elif locating(spec, spec.nodes[a], anchors) is None:  # else it is found along with it
                parts.append(_accumulate(spec, reader, a, place, accs[a], lanes, abreast=abreast))

        def final(v: Expr) -> Stmt:
            _read_back(spec, reader, accs, v)
            return store_outputs(spec, reader, outputs, index(v))

        return seq([*parts, loop(lanes, final, VECTORIZED, "v")])

    return block


def _read_back(spec: Graph, reader: Reader, accs: Mapping[int, Buffer], v: Expr) -> None:
    for a, acc in accs.items():
        reader.overrides[a] = held(acc, v, spec.nodes[a].dtype)


def _places(
    spec: Graph,
    reader: Reader,
    accs: Mapping[int, Buffer],
    anchors: list[int],
    index: Index,
    v: Expr,
) -> dict[int, Index]:
    """At which index each reduction is read for one output element.

    Found by reading and looking who is asked.
    """
    places: dict[int, Index] = {}

    def note(a: int, acc: Buffer) -> Callable[[Index], Expr]:
        def read(at: Index) -> Expr:
            places[a] = at
            return acc[v].astype(value_dtype(spec.nodes[a].dtype))

        return read

    for a, acc in accs.items():
        reader.overrides[a] = note(a, acc)
    for o in spec.outputs:
        reader.at(o, index)
    for a in reversed(anchors):  # an earlier reduction may be read only by a later one
        node = spec.nodes[a]
        if node.kind is OpKind.REDUCE and a in places:
            source = spec.nodes[node.inputs[0]].shape
            zeros = tuple(imm(0) for _ in node.attr("axes"))
            reader.at(node.inputs[0], merge(places[a], zeros, node.attr("axes"), len(source)))
    _read_back(spec, reader, accs, v)
    return places


Place = Callable[[Expr], Index]


def _accumulate(
    spec: Graph,
    reader: Reader,
    anchor: int,
    place: Place,
    acc: Buffer,
    lanes: int,
    *,
    abreast: bool,
) -> Stmt:
    node = spec.nodes[anchor]
    if node.op in ("argmax", "argmin") and abreast:
        return _extremes(spec, reader, anchor, place, acc, lanes)
    if node.op in ("argmax", "argmin"):
        return loop(
            lanes, lambda v: arg_reduce(spec, reader, anchor, place(v), acc, v), name="lane"
        )
    dtype = str(acc.dtype)
    start = loop(lanes, lambda v: store(acc, v, identity(node, dtype)), VECTORIZED, "v")
    if node.kind is OpKind.WINDOW:

        def covered(v: Expr, at: Index) -> Stmt:
            return _add(reader, node, acc, v, at)

        return seq([start, over_window(spec, anchor, place, lanes, covered)])
    source = spec.nodes[node.inputs[0]].shape
    axes = node.attr("axes")

    def visit(done: Index, rest: tuple[int, ...]) -> Stmt:
        if rest:
            return loop(source[rest[0]], lambda r: visit((*done, r), rest[1:]), name="r")

        def lane(v: Expr) -> Stmt:
            at = merge(place(v), done, axes, len(source))
            return _add(reader, node, acc, v, at)

        return loop(lanes, lane, VECTORIZED, "v")

    return seq([start, visit((), axes)])


def _extremes(
    spec: Graph, reader: Reader, anchor: int, place: Place, acc: Buffer, lanes: int
) -> Stmt:
    """Where the first extreme elements lie, one for each lane."""
    node = spec.nodes[anchor]
    source = spec.nodes[node.inputs[0]]
    (axis,), dtype = node.attr("axes"), value_dtype(source.dtype)
    best = buffer(lanes, dtype, f"best{anchor}", scope="local")
    kind = place_dtype(source.shape[axis])
    places = buffer(lanes, kind, f"places{anchor}", scope="local")

    def begin(v: Expr) -> Stmt:
        start = store(best, v, least_extreme(node, dtype))
        return seq([start, store(places, v, T.const(0, kind))])

    def step(r: Expr, v: Expr) -> Stmt:
        at = merge(place(v), (r,), (axis,), len(source.shape))
        value = partial(reader.at, node.inputs[0], at)
        return keep_extreme(reader, node, best, places, v, value, r)

    def along(r: Expr) -> Stmt:
        return loop(lanes, lambda v: step(r, v), VECTORIZED, "v")

    def end(v: Expr) -> Stmt:
        return store(acc, v, places[v].astype(str(acc.dtype)))

    return seq(
        [
            stack(best),
            stack(places),
            loop(lanes, begin, VECTORIZED, "v"),
            loop(source.shape[axis], along, name="r"),
            loop(lanes, end, VECTORIZED, "v"),
        ]
    )


def _located(
    spec: Graph,
    reader: Reader,
    anchor: int,
    place: Place,
    accs: Mapping[int, Buffer],
    lanes: int,
) -> Stmt:
    """Where the maximum of a window lies, and that maximum, if it is asked for as well."""
    dtype = value_dtype(spec.nodes[spec.nodes[anchor].inputs[0]].dtype)
    asked = [a for a in accs if locating(spec, spec.nodes[a], (anchor,)) is not None]
    best = accs[asked[0]] if asked else buffer(lanes, dtype, f"best{anchor}", scope="local")
    least = identity(spec.nodes[anchor], dtype)
    return seq(
        [
            None if asked else stack(best),
            loop(lanes, lambda v: store(best, v, least), VECTORIZED, "v"),
            located(spec, reader, anchor, place, best, accs[anchor], lanes),
        ]
    )


def _add(reader: Reader, node: Node, acc: Buffer, v: Expr, at: Index) -> Stmt:
    dtype = str(acc.dtype)
    return reader.scope(
        lambda: [
            store(acc, v, combine(node, acc[v], reader.at(node.inputs[0], at).astype(dtype), dtype))
        ]
    )


def merge(kept: Index, reduced: Index, axes: tuple[int, ...], rank: int) -> Index:
    """An index of the reduction's operand from the kept and the reduced coordinates."""
    k, r = iter(kept), iter(reduced)
    return tuple(next(r) if a in axes else next(k) for a in range(rank))


def arg_reduce(
    spec: Graph, reader: Reader, anchor: int, index: Index, acc: Buffer, lane: Expr
) -> Stmt:
    """Position of the first extreme element; NaN is the most extreme of all."""
    node = spec.nodes[anchor]
    source = spec.nodes[node.inputs[0]]
    (axis,) = node.attr("axes")
    best = buffer(1, value_dtype(source.dtype), f"best{anchor}", scope="local")
    better = "gt" if node.op == "argmax" else "lt"

    def value(r: Expr) -> Expr:
        return reader.at(node.inputs[0], merge(index, (r,), (axis,), len(source.shape)))

    def step(r: Expr) -> Stmt:
        def take() -> list[Stmt]:
            v = value(r)
            wins = apply(better, (v, best[imm(0)]), "bool")
            if source.dtype in FLOATS:
                new_nan = T.all(
                    apply("isnan", (v,), "bool"), T.Not(apply("isnan", (best[imm(0)],), "bool"))
                )
                wins = T.any(wins, new_nan)
            both = seq([store(best, imm(0), v), store(acc, lane, r.astype("int64"))])
            return [when(wins, both)]

        return reader.scope(take)

    first = reader.scope(
        lambda: [store(best, imm(0), value(imm(0))), store(acc, lane, T.const(0, "int64"))]
    )
    extent = source.shape[axis]
    return seq([stack(best), first, loop(extent, step, name="r")])
