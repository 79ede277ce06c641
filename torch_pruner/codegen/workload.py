"""A kernel graph as an unscheduled TIR function: what MetaSchedule's own space starts from.

One ``te.compute`` per node; MetaSchedule inlines what it wants to. Arithmetic is
``scalar.apply``'s, so that kernels of either space compute the same numbers, unless somebody asks
for another (``plain.apply``). No schedule is decided here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvm import te

from torch_pruner.codegen import scalar
from torch_pruner.codegen._tvm import Expr, T
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph, Node

Tensor = Any
Index = tuple[Expr, ...]
Read = Any  # index expressions -> value expression
Apply = Any  # (operator, operands, dtype of the result) -> value expression


def to_prim_func(spec: Graph, apply: Apply = scalar.apply) -> Any:
    """Parameters: the inputs of ``spec`` by index, then its outputs. Takes every operator that
    ``apply`` has, which ``scalar.apply`` is all of them.
    """
    values: list[Tensor] = []
    for i, node in enumerate(spec.nodes):
        values.append(_stage(spec, node, f"n{i}_{node.op}", values, apply))
    inputs = [values[i] for i in spec.inputs]
    outputs: list[Tensor] = []
    for k, i in enumerate(spec.outputs):
        fresh = spec.nodes[i].op not in ("input", "const") and i not in spec.outputs[:k]
        value = values[i]
        outputs.append(value if fresh else _compute(spec.nodes[i], f"out{k}", _reader(value)))
    return te.create_prim_func([*inputs, *outputs])


def _stage(spec: Graph, node: Node, name: str, values: Sequence[Tensor], apply: Apply) -> Tensor:
    """The tensor of one node; a constant is an expression."""
    if node.op == "input":
        return te.placeholder(node.shape, node.dtype, name)
    if node.op == "const":
        return T.const(const_value(node), node.dtype)
    if node.kind in (OpKind.REDUCE, OpKind.WINDOW, OpKind.CONTRACT):
        return _REDUCERS[node.op](spec, node, name, [values[i] for i in node.inputs], apply)
    reads = [_reader(values[i]) for i in node.inputs]
    shapes = [spec.nodes[i].shape for i in node.inputs]
    return _compute(node, name, _element(node, reads, shapes, apply))


def _reader(value: Tensor) -> Read:
    if isinstance(value, te.Tensor):
        return lambda *index: value(*index)
    return lambda *index: value


def _compute(node: Node, name: str, element: Read) -> Tensor:
    return te.compute(node.shape, element, name=name)


def _element(
    node: Node, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]], apply: Apply
) -> Read:
    """The value of a node that does not reduce, at given indices."""
    if node.kind is OpKind.POINTWISE:
        return lambda *index: apply(node.op, [r(*index) for r in reads], node.dtype)
    if node.op == "iota":
        return lambda *index: T.Cast(node.dtype, index[node.attr("dim")])
    if node.op == "cat":
        return _cat(node, reads, shapes)
    if node.op == "pad":
        return _pad(node, reads[0], shapes[0])
    if node.op in ("take", "gather"):
        return _indexed(node, reads, shapes)
    source = _view(node, shapes[0])
    return lambda *index: reads[0](*source(index))


def _view(node: Node, shape: tuple[int, ...]) -> Callable[[Index], Index]:
    """From the output's index to the operand's."""
    rank = len(node.shape)
    if node.op == "permute":
        perm = node.attr("perm")
        return lambda index: tuple(index[perm.index(d)] for d in range(rank))
    if node.op == "broadcast":
        skip = rank - len(shape)
        return lambda index: tuple(
            T.const(0, "int32") if d == 1 else index[skip + i] for i, d in enumerate(shape)
        )
    if node.op == "slice":
        starts, steps = node.attr("starts"), node.attr("steps")
        return lambda index: tuple(
            i * step + start for i, start, step in zip(index, starts, steps, strict=True)
        )
    if node.op == "flip":
        dims = node.attr("dims")
        return lambda index: tuple(
            shape[d] - 1 - i if d in dims else i for d, i in enumerate(index)
        )
    if node.op == "reshape":
        return lambda index: _unflatten(_flatten(index, node.shape), shape)
    raise ValueError(f"no view operator {node.op!r}")


def _flatten(index: Index, shape: tuple[int, ...]) -> Expr:
    flat: Expr = T.const(0, "int32")
    for i, extent in zip(index, shape, strict=True):
        flat = flat * extent + i
    return flat


def _unflatten(flat: Expr, shape: tuple[int, ...]) -> Index:
    found = []
    for d, extent in enumerate(shape):
        inner = math.prod(shape[d + 1 :])
        found.append(T.floormod(T.floordiv(flat, inner), extent) if d else T.floordiv(flat, inner))
    return tuple(found)


def _cat(node: Node, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]]) -> Read:
    dim = node.attr("dim")

    def element(*index: Expr) -> Expr:
        value, start = None, 0
        parts = []
        for read, shape in zip(reads, shapes, strict=True):
            if shape[dim]:
                parts.append((start, start + shape[dim], read))
            start += shape[dim]
        for begin, end, read in reversed(parts):
            moved = (*index[:dim], index[dim] - begin, *index[dim + 1 :])
            own = read(*moved)
            value = own if value is None else T.if_then_else(index[dim] < end, own, value)
        return value

    return element


def _inside(index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    conditions = []
    for i, extent in zip(index, shape, strict=True):
        conditions += [i >= 0, i < extent]
    return conditions


def _guarded(conditions: Sequence[Expr], value: Expr, other: Expr) -> Expr:
    return T.if_then_else(T.all(*conditions), value, other) if conditions else value


def _pad(node: Node, read: Read, shape: tuple[int, ...]) -> Read:
    lo, fill = node.attr("lo"), node.attr("value")
    other = T.const(float(fill) if isinstance(fill, str) else fill, node.dtype)

    def element(*index: Expr) -> Expr:
        moved = tuple(i - before for i, before in zip(index, lo, strict=True))
        return _guarded(_inside(moved, shape), read(*moved), other)

    return element


def _indexed(node: Node, reads: Sequence[Read], shapes: Sequence[tuple[int, ...]]) -> Read:
    dim, extent, rank = node.attr("dim"), shapes[0][node.attr("dim")], len(shapes[1])

    def element(*index: Expr) -> Expr:
        if node.op == "gather":
            at = reads[1](*index)
            before, after = index[:dim], index[dim + 1 :]
        else:
            at = reads[1](*index[dim : dim + rank])
            before, after = index[:dim], index[dim + rank :]
        place = T.Cast("int32", at)
        return reads[0](*before, T.Select(place < 0, place + extent, place), *after)

    return element


# Reductions


def _reducer(op: str, dtype: str, apply: Apply) -> Any:
    """A commutative reducer; those of TVM where it has one, since it knows how to split them."""
    if op == "sum":
        return te.sum
    if op in ("max", "min") and dtype not in FLOATS:
        return te.max if op == "max" else te.min
    combine, identity = {
        "prod": ("mul", 1),
        "max": ("maximum", -math.inf),
        "min": ("minimum", math.inf),
        "any": ("logical_or", False),
        "all": ("logical_and", True),
    }[op]
    return te.comm_reducer(
        lambda a, b: apply(combine, [a, b], dtype),
        lambda t: T.const(identity, t),
        name=op,
    )


def _reduce(spec: Graph, node: Node, name: str, args: Sequence[Tensor], apply: Apply) -> Tensor:
    source = spec.nodes[node.inputs[0]]
    reduced = node.attr("axes")
    axes = [te.reduce_axis((0, source.shape[d]), f"{name}_r{d}") for d in reduced]
    dtype = accumulator(node.dtype)
    fold = _reducer(node.op, dtype, apply)
    read = _reader(args[0])

    def element(*index: Expr) -> Expr:
        kept, folded = iter(index), iter(axes)
        whole = [next(folded) if d in reduced else next(kept) for d in range(len(source.shape))]
        return fold(scalar.cast(read(*whole), dtype), axis=axes)

    return _rounded(node, name, te.compute(node.shape, element, name=name))


def _rounded(node: Node, name: str, total: Tensor) -> Tensor:
    """``total`` in the node's dtype."""
    if total.dtype == node.dtype:
        return total
    return _compute(node, f"{name}_cast", lambda *i: scalar.cast(total(*i), node.dtype))


def _arg_reduce(
    spec: Graph, node: Node, name: str, args: Sequence[Tensor], _apply: Apply
) -> Tensor:
    """First position of the extreme; NaN is more extreme than any number."""
    source = spec.nodes[node.inputs[0]]
    (dim,) = node.attr("axes")
    axis = te.reduce_axis((0, source.shape[dim]), f"{name}_r")
    wide = "float32" if source.dtype in ("float16", "bfloat16") else source.dtype
    wide = "int32" if wide == "bool" else wide
    greater = node.op == "argmax"

    def combine(a: Sequence[Expr], b: Sequence[Expr]) -> Sequence[Expr]:
        first = a[0] <= b[0]
        better = a[1] > b[1] if greater else a[1] < b[1]
        tied = T.all(a[1] == b[1], first)
        if wide in FLOATS:
            better = T.all(better, T.Not(T.isnan(b[1])))
            mine = T.all(T.isnan(a[1]), T.any(T.Not(T.isnan(b[1])), first))
            take = T.any(better, tied, mine)
        else:
            take = T.any(better, tied)
        return T.Select(take, a[0], b[0]), T.Select(take, a[1], b[1])

    def identity(index: str, value: str) -> Sequence[Expr]:
        least = T.min_value(value) if greater else T.max_value(value)
        if value in FLOATS:
            least = T.const(-math.inf if greater else math.inf, value)
        return T.const(2**31 - 1, index), least

    fold = te.comm_reducer(combine, identity, name=node.op)
    read = _reader(args[0])

    def element(*index: Expr) -> Expr:
        at = (*index[:dim], axis, *index[dim:])
        return fold((axis.var, scalar.cast(read(*at), wide)), axis=axis)

    position, _ = te.compute(node.shape, element, name=name)
    return _rounded(node, name, position)


def _window(spec: Graph, node: Node, name: str, args: Sequence[Tensor], apply: Apply) -> Tensor:
    source = spec.nodes[node.inputs[0]]
    kernel, stride, dilation = node.attr("kernel"), node.attr("stride"), node.attr("dilation")
    lo, lead = node.attr("lo"), len(source.shape) - len(node.attr("kernel"))
    axes = [te.reduce_axis((0, k), f"{name}_r{d}") for d, k in enumerate(kernel)]
    largest = node.op == "window_max"
    dtype = accumulator(node.dtype)
    fold = _reducer("max" if largest else "sum", dtype, apply)
    neutral: Expr = T.const(0, dtype)
    if largest:
        neutral = T.const(-math.inf, dtype) if dtype in FLOATS else T.min_value(dtype)
    read = _reader(args[0])

    def element(*index: Expr) -> Expr:
        at = [
            i * s - before + r * d
            for i, s, before, r, d in zip(index[lead:], stride, lo, axes, dilation, strict=True)
        ]
        value = scalar.cast(read(*index[:lead], *at), dtype)
        return fold(_guarded(_inside(at, source.shape[lead:]), value, neutral), axis=axes)

    return _rounded(node, name, te.compute(node.shape, element, name=name))


def _matmul(spec: Graph, node: Node, name: str, args: Sequence[Tensor], _apply: Apply) -> Tensor:
    depth = spec.nodes[node.inputs[0]].shape[-1]
    axis = te.reduce_axis((0, depth), f"{name}_k")
    dtype = accumulator(node.dtype)
    left, right = (_reader(a) for a in args)

    def element(*index: Expr) -> Expr:
        *batch, i, j = index
        a, b = left(*batch, i, axis), right(*batch, axis, j)
        return te.sum(scalar.cast(a, dtype) * scalar.cast(b, dtype), axis=axis)

    return _rounded(node, name, te.compute(node.shape, element, name=name))


def _conv(spec: Graph, node: Node, name: str, args: Sequence[Tensor], _apply: Apply) -> Tensor:
    """Both directions: a transposed convolution is an ordinary one on a dilated input."""
    x_shape, w_shape = (spec.nodes[i].shape for i in node.inputs)
    transposed = node.op == "conv_transpose"
    groups, kernel, dilation = node.attr("groups"), w_shape[2:], node.attr("dilation")
    dtype = accumulator(node.dtype)
    channels = x_shape[1] // groups
    per_group = w_shape[1] if transposed else w_shape[0] // groups
    stride = (1,) * len(kernel) if transposed else node.attr("stride")
    padded = _padded_input(node, name, args[0], x_shape, w_shape, dtype)
    weight = _reader(args[1])
    c = te.reduce_axis((0, channels), f"{name}_c")
    taps = [te.reduce_axis((0, k), f"{name}_r{d}") for d, k in enumerate(kernel)]

    def element(*index: Expr) -> Expr:
        n, o, *place = index
        group = T.floordiv(o, per_group) if groups > 1 else 0
        channel = group * channels + c if groups > 1 else c
        at = [p * s + r * d for p, s, r, d in zip(place, stride, taps, dilation, strict=True)]
        if transposed:
            back = [k - 1 - r for k, r in zip(kernel, taps, strict=True)]
            w = weight(channel, T.floormod(o, per_group) if groups > 1 else o, *back)
        else:
            w = weight(o, c, *taps)
        return te.sum(padded(n, channel, *at) * scalar.cast(w, dtype), axis=[c, *taps])

    return _rounded(node, name, te.compute(node.shape, element, name=name))


def _padded_input(
    node: Node,
    name: str,
    value: Tensor,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    dtype: str,
) -> Read:
    """The input in the accumulator's dtype, with zeros around it and between its elements."""
    read = _reader(value)
    kernel, dilation, out = w_shape[2:], node.attr("dilation"), node.shape[2:]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    transposed = node.op == "conv_transpose"
    lo = node.attr("lo")
    before = [r - p for r, p in zip(reach, lo, strict=True)] if transposed else lo
    stride = (1,) * len(out) if transposed else node.attr("stride")
    gap = node.attr("stride") if transposed else (1,) * len(out)
    extents = [(o - 1) * s + r + 1 for o, s, r in zip(out, stride, reach, strict=True)]
    fits = all(e <= x for e, x in zip(extents, x_shape[2:], strict=True))
    if not any(before) and not transposed and fits:
        return lambda *index: scalar.cast(read(*index), dtype)

    def element(*index: Expr) -> Expr:
        n, channel, *place = index
        spread = [p - b for p, b in zip(place, before, strict=True)]
        at = [T.floordiv(s, g) if g > 1 else s for s, g in zip(spread, gap, strict=True)]
        conditions = _inside(at, x_shape[2:])
        conditions += [T.EQ(T.floormod(s, g), 0) for s, g in zip(spread, gap, strict=True) if g > 1]
        return _guarded(conditions, scalar.cast(read(n, channel, *at), dtype), T.const(0, dtype))

    shape = (x_shape[0], x_shape[1], *extents)
    return _reader(te.compute(shape, element, name=f"{name}_pad"))


_REDUCERS: dict[str, Callable[[Graph, Node, str, Sequence[Tensor], Apply], Tensor]] = {
    **dict.fromkeys(("sum", "prod", "max", "min", "any", "all"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _arg_reduce),
    **dict.fromkeys(("window_max", "window_sum"), _window),
    "matmul": _matmul,
    "conv": _conv,
    "conv_transpose": _conv,
}
