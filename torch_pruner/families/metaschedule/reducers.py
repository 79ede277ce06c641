"""Reductions of an unscheduled TIR function: sums, extremes, windows, products, convolutions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvm import te

from torch_pruner.codegen.tir import scalar
from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.indices import linear
from torch_pruner.families.metaschedule.stages import compute, guarded, inside, tensor
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.nibbles import WORD, per_word
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.stored import order_before

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.families.metaschedule.stages import Apply, Order, Read
    from torch_pruner.graph.ir import Graph, Node, Shape


def _sum(value: Expr, axis: Any) -> Expr:
    total: Expr = te.sum(value, axis=axis)
    return total


def _reducer(op: str, dtype: str, apply: Apply) -> Callable[..., Expr]:
    """A commutative reducer; those of TVM where it has one, since it knows how to split them."""
    if op == "sum":
        total: Callable[..., Expr] = te.sum
        return total
    if op in ("max", "min") and dtype not in FLOATS:
        extreme: Callable[..., Expr] = te.max if op == "max" else te.min
        return extreme
    combine, identity = {
        "prod": ("mul", 1),
        "max": ("maximum", -math.inf),
        "min": ("minimum", math.inf),
        "any": ("logical_or", False),
        "all": ("logical_and", True),
    }[op]
    reducer: Callable[..., Expr] = te.comm_reducer(
        lambda a, b: apply(combine, [a, b], dtype),
        lambda t: T.const(identity, t),
        name=op,
    )
    return reducer


def _reduce(
    spec: Graph, node: Node, name: str, args: Sequence[Read], apply: Apply, _order: Order
) -> Read:
    source = spec.nodes[node.inputs[0]]
    reduced = node.attr("axes")
    axes = [te.reduce_axis((0, source.shape[d]), f"{name}_r{d}") for d in reduced]
    dtype = accumulator(node.dtype)
    fold = _reducer(node.op, dtype, apply)
    read = args[0]

    def element(*index: Expr) -> Expr:
        kept, folded = iter(index), iter(axes)
        whole = [next(folded) if d in reduced else next(kept) for d in range(len(source.shape))]
        return fold(scalar.cast(read(*whole), dtype), axis=axes)

    return _rounded(node, name, dtype, compute(node, name, element))


def _rounded(node: Node, name: str, dtype: str, total: Read, order: Order = None) -> Read:
    """``total``, which is of ``dtype``, in the node's own."""
    if dtype == node.dtype:
        return total
    return compute(node, f"{name}_cast", lambda *i: scalar.cast(total(*i), node.dtype), order)


def _arg_reduce(
    spec: Graph, node: Node, name: str, args: Sequence[Read], _apply: Apply, _order: Order
) -> Read:
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

    fold: Callable[..., Expr] = te.comm_reducer(combine, identity, name=node.op)
    read = args[0]

    def element(*index: Expr) -> Expr:
        at = (*index[:dim], axis, *index[dim:])
        return fold((axis.var, scalar.cast(read(*at), wide)), axis=axis)

    position, _ = te.compute(node.shape, element, name=name)
    return _rounded(node, name, str(position.dtype), position)


def _window(
    spec: Graph, node: Node, name: str, args: Sequence[Read], apply: Apply, order: Order
) -> Read:
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
    read = args[0]

    def element(*index: Expr) -> Expr:
        at = [
            i * s - before + r * d
            for i, s, before, r, d in zip(index[lead:], stride, lo, axes, dilation, strict=True)
        ]
        value = scalar.cast(read(*index[:lead], *at), dtype)
        return fold(guarded(inside(at, source.shape[lead:]), value, neutral), axis=axes)

    return _rounded(node, name, dtype, compute(node, name, element, order), order)


def _window_argmax(
    spec: Graph, node: Node, name: str, args: Sequence[Read], _apply: Apply, _order: Order
) -> Read:
    """Position of the first of the largest, of the last NaN; padding lies behind all others."""
    source = spec.nodes[node.inputs[0]]
    kernel, lead = node.attr("kernel"), len(source.shape) - len(node.attr("kernel"))
    axes = [te.reduce_axis((0, k), f"{name}_r{d}") for d, k in enumerate(kernel)]
    wide = "float32" if source.dtype in ("float16", "bfloat16") else source.dtype
    least = T.const(-math.inf, wide) if wide in FLOATS else T.min_value(wide)
    behind = T.max_value(node.dtype)

    def combine(a: Sequence[Expr], b: Sequence[Expr]) -> Sequence[Expr]:
        take = T.any(a[1] > b[1], T.all(a[1] == b[1], a[0] <= b[0]))
        if wide in FLOATS:
            number = T.Not(T.isnan(b[1]))
            take = T.any(T.all(take, number), T.all(T.isnan(a[1]), T.any(number, a[0] >= b[0])))
        return T.Select(take, a[0], b[0]), T.Select(take, a[1], b[1])

    fold: Callable[..., Expr] = te.comm_reducer(combine, lambda *_: (behind, least), name=node.op)
    read = args[0]

    def element(*index: Expr) -> Expr:
        sides = zip(
            index[lead:], node.attr("stride"), node.attr("lo"), axes, node.attr("dilation"),
            strict=True,
        )  # fmt: skip
        at = [i * s - before + r * d for i, s, before, r, d in sides]
        covered = inside(at, source.shape[lead:])
        value = guarded(covered, scalar.cast(read(*index[:lead], *at), wide), least)
        place = linear(at, source.shape[lead:]).astype(node.dtype)
        return fold((guarded(covered, place, behind), value), axis=axes)

    position, _ = te.compute(node.shape, element, name=name)
    return _rounded(node, name, node.dtype, position)


def _matmul(
    spec: Graph, node: Node, name: str, args: Sequence[Read], _apply: Apply, _order: Order
) -> Read:
    depth = spec.nodes[node.inputs[0]].shape[-1]
    axis = te.reduce_axis((0, depth), f"{name}_k")
    dtype = accumulator(node.dtype)
    left, right = args

    def element(*index: Expr) -> Expr:
        *batch, i, j = index
        a, b = left(*batch, i, axis), right(*batch, axis, j)
        return _sum(scalar.cast(a, dtype) * scalar.cast(b, dtype), axis)

    return _rounded(node, name, dtype, compute(node, name, element))


def _matmul_grouped(
    spec: Graph, node: Node, name: str, args: Sequence[Read], _apply: Apply, _order: Order
) -> Read:
    """Words are taken apart whenever they are read."""
    depth, bits, group = spec.nodes[node.inputs[0]].shape[-1], node.attr("bits"), node.attr("group")
    axis = te.reduce_axis((0, depth), f"{name}_k")
    left, words, *factors = args
    highest, dtype = T.const(WORD - bits, "int32"), "float32"

    def element(i: Expr, j: Expr) -> Expr:
        word = words(T.floordiv(axis, per_word(bits)), j)
        up = highest - T.floormod(axis, per_word(bits)) * bits
        value = scalar.cast(T.shift_right(T.shift_left(word, up), highest), dtype)
        scale, *offset = (scalar.cast(f(T.floordiv(axis, group), j), dtype) for f in factors)
        value = value * scale + offset[0] if offset else value * scale
        return _sum(scalar.cast(left(i, axis), dtype) * value, axis)

    return _rounded(node, name, dtype, compute(node, name, element))


def _conv(
    spec: Graph, node: Node, name: str, args: Sequence[Read], _apply: Apply, order: Order
) -> Read:
    """Both directions: a transposed convolution is an ordinary one on a dilated input."""
    x_shape, w_shape = (spec.nodes[i].shape for i in node.inputs)
    transposed = node.op == "conv_transpose"
    groups, kernel, dilation = node.attr("groups"), w_shape[2:], node.attr("dilation")
    dtype = accumulator(node.dtype)
    channels = x_shape[1] // groups
    per_group = w_shape[1] if transposed else w_shape[0] // groups
    stride = (1,) * len(kernel) if transposed else node.attr("stride")
    padded = _padded_input(spec, node, name, args[0], w_shape, dtype)
    weight = args[1]
    c = te.reduce_axis((0, channels), f"{name}_c")
    taps = [te.reduce_axis((0, k), f"{name}_r{d}") for d, k in enumerate(kernel)]
    axes = [c, *taps] if order is None or order[-1] != 1 else [*taps, c]

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
        return _sum(padded(n, channel, *at) * scalar.cast(w, dtype), axes)

    return _rounded(node, name, dtype, compute(node, name, element, order), order)


def _padded_input(
    spec: Graph, node: Node, name: str, read: Read, w_shape: Shape, dtype: str
) -> Read:
    """The input in the accumulator's dtype, with zeros around it and between its elements."""
    x_shape = spec.nodes[node.inputs[0]].shape
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
        conditions = inside(at, x_shape[2:])
        conditions += [T.EQ(T.floormod(s, g), 0) for s, g in zip(spread, gap, strict=True) if g > 1]
        return guarded(conditions, scalar.cast(read(n, channel, *at), dtype), T.const(0, dtype))

    shape = (x_shape[0], x_shape[1], *extents)
    return tensor(shape, f"{name}_pad", element, order_before(spec, node.inputs[0]))


REDUCERS: dict[str, Callable[[Graph, Node, str, Sequence[Read], Apply, Order], Read]] = {
    **dict.fromkeys(("sum", "prod", "max", "min", "any", "all"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _arg_reduce),
    **dict.fromkeys(("window_max", "window_sum"), _window),
    "window_argmax": _window_argmax,
    "matmul": _matmul,
    "matmul_grouped": _matmul_grouped,
    "conv": _conv,
    "conv_transpose": _conv,
}
