"""The moves by which random graphs grow: each appends what models are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


from tests.unit.graph.random_growth import _LARGEST, Bound, Growth


def _unary(g: Growth) -> None:
    x = g.pick()
    if x is None:
        return
    dtype, bound = g.builder.dtype(x), g.bound(x)
    if dtype == "bool":
        g.apply("logical_not", x)
    elif dtype not in FLOATS:
        g.apply(g.one_of(("neg", "abs", "relu", "bitwise_not")), x)
    else:
        smooth = ["neg", "abs", "relu", "tanh", "sigmoid", "erf", "sin", "cos", "atan"]
        jumping = ["floor", "ceil", "round", "trunc", "sign", "isnan"]
        if bound.magnitude <= 8:
            smooth += ["exp", "exp", "expm1", "exp2"]
        op = g.one_of(smooth + (jumping if bound.bits is not None else []))
        if op in ("sin", "cos"):
            x = g.tamed(x, 16)
        g.apply(op, x, dtype="bool" if op == "isnan" else None)


def _root(g: Growth) -> None:
    x = g.floating()
    above = g.apply("add", g.apply("abs", x), g.const(1, g.builder.dtype(x)))
    g.apply(g.one_of(("sqrt", "rsqrt", "log", "log1p", "reciprocal", "log2")), above)


def _compatible(g: Growth, x: int) -> int:
    """A value of the same dtype that broadcasts with ``x`` to no more than the limit."""
    b = g.builder
    shape = b.shape(x)

    def accept(i: int) -> bool:
        if b.dtype(i) != b.dtype(x):
            return False
        try:
            both = np.broadcast_shapes(shape, b.shape(i))
        except ValueError:
            return False
        return bool(np.prod(both) <= g.numel)

    kind = g.choose(6)
    if kind == 0:
        return g.const((2, 0.5, -1, 3)[g.choose(4)], b.dtype(x))
    if kind == 1:
        cut = g.choose(len(shape) + 1)
        return g.fresh(
            [d if g.choose(3) else 1 for d in shape[cut:]], b.dtype(x), static=bool(g.choose(2))
        )
    found = g.pick(accept)
    return x if found is None else found


def _binary(g: Growth) -> None:
    x = g.pick()
    if x is None:
        return
    y = _compatible(g, x)
    if g.choose(2):
        x, y = y, x
    b, dtype = g.builder, g.builder.dtype(x)
    exact = g.bound(x).bits is not None and g.bound(y).bits is not None
    if dtype == "bool":
        g.apply(g.one_of(("logical_and", "logical_or", "logical_xor")), x, y)
    elif dtype not in FLOATS:
        op = g.one_of(
            ("add", "sub", "mul", "maximum", "minimum", "bitwise_and", "bitwise_xor", "floordiv",
             "mod", "lt", "eq")
        )  # fmt: skip
        if op in ("floordiv", "mod"):  # division by zero has no agreed result
            y = g.apply("add", g.apply("bitwise_and", y, g.const(7, dtype)), g.const(1, dtype))
        g.apply(op, x, y)
    else:
        ops = ["add", "sub", "mul", "maximum", "minimum", "div"]
        op = g.one_of(ops + (["lt", "ge", "eq", "ne"] if exact else []))
        x, y = g.tamed(x, _LARGEST / 2), g.tamed(y, _LARGEST / 2)
        if op == "mul" and g.bound(x).magnitude * g.bound(y).magnitude > _LARGEST:
            x, y = g.tamed(x, 2), g.tamed(y, 2)
        if op == "div":
            y = g.apply("add", g.apply("abs", y), g.const(1, b.dtype(y)))
        g.apply(op, x, y)


def _where(g: Growth) -> None:
    x = g.pick()
    condition = g.pick(lambda i: g.builder.dtype(i) == "bool")
    if x is None:
        return
    b = g.builder
    if condition is None or b.shape(condition) != b.shape(x):
        condition = g.fresh(b.shape(x), "bool")
    y = _compatible(g, x)
    if b.shape(y) in ((), b.shape(x)):
        g.apply("where", condition, x, y)


def _cast(g: Growth) -> None:
    x = g.pick()
    if x is None:
        return
    bound = g.bound(x)
    targets = ["float32", "bfloat16", "float64", "float16"]
    if bound.bits is not None:
        targets += ["int32", "int64", "bool"]
    target = g.one_of(targets)
    node = g.builder.cast(x, target)
    if node == x:
        return
    bits = bound.bits
    g.add(node, max(bound.magnitude, 1.0), bits if target in FLOATS else 0)


def _reshape(g: Growth) -> None:
    x = g.pick()
    if x is None:
        return
    shape = list(g.builder.shape(x))
    at = g.choose(len(shape) + 1)
    kind = g.choose(3)
    if kind == 0 or not shape or at == len(shape):
        shape.insert(at, 1)
    elif kind == 1 and at + 1 < len(shape):
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        factors = [f for f in range(1, shape[at] + 1) if shape[at] % f == 0]
        f = factors[g.choose(len(factors))]
        shape[at : at + 1] = [f, shape[at] // f]
    if len(shape) <= 5:
        g.view(g.builder.reshape(x, shape), x)


def _permute(g: Growth) -> None:
    x = g.pick(lambda i: len(g.builder.shape(i)) > 1)
    if x is None:
        return
    rest = list(range(len(g.builder.shape(x))))
    perm = [rest.pop(g.choose(len(rest))) for _ in range(len(rest))]
    g.view(g.builder.permute(x, perm), x)


def _broadcast(g: Growth) -> None:
    x = g.pick(lambda i: len(g.builder.shape(i)) < 4)
    if x is None:
        return
    shape = g.builder.shape(x)
    grown = [d if d != 1 else g.dims[g.choose(len(g.dims))] for d in shape]
    if g.choose(2):
        grown.insert(0, g.dims[g.choose(len(g.dims))])
    if np.prod(grown) <= g.numel:
        g.view(g.builder.broadcast(x, grown), x)


def _slice(g: Growth) -> None:
    x = g.pick(lambda i: len(g.builder.shape(i)) > 0)
    if x is None:
        return
    starts, sizes, steps = [], [], []
    for d in g.builder.shape(x):
        start, step = g.choose(d), g.choose(2) + 1
        starts.append(start)
        steps.append(step)
        sizes.append(g.choose(-(-(d - start) // step)) + 1)
    if g.choose(4) == 0:
        g.view(g.builder.append("flip", (x,), g.builder.shape(x), g.builder.dtype(x), dims=(0,)), x)
    else:
        g.view(g.builder.slice(x, starts, sizes, steps), x)


def _axes(g: Growth, x: int) -> tuple[int, ...]:
    """The trailing axis or two, or any."""
    rank = len(g.builder.shape(x))
    kind = g.choose(4)
    if kind == 0 and rank > 1:
        return (rank - 2, rank - 1)
    if kind == 1:
        return (g.choose(rank),)
    if kind == 2:
        return tuple(range(rank)) if rank == 1 or g.choose(2) else tuple(range(rank - 1))
    return (rank - 1,)


def _reduced(g: Growth, op: str, x: int, axes: tuple[int, ...], *, keepdim: bool) -> int:
    b = g.builder
    count = int(np.prod([b.shape(x)[a] for a in axes]))
    if op == "sum" and g.bound(x).magnitude * count > _LARGEST:
        x = g.tamed(x, 1)
    dtype = "int64" if op == "sum" and b.dtype(x) not in FLOATS else None
    bound = g.bound(x)
    node = b.reduce(op, x, axes, dtype=dtype, keepdim=keepdim)
    return g.add(node, bound.magnitude * (count if op == "sum" else 1), bound.bits)


def _reduce(g: Growth) -> None:
    x = g.pick(lambda i: len(g.builder.shape(i)) > 0)
    if x is None:
        return
    dtype = g.builder.dtype(x)
    op = "any" if dtype == "bool" else g.one_of(("sum", "max", "min", "sum"))
    if op == "any" and g.choose(2):
        op = "all"
    _reduced(g, op, x, _axes(g, x), keepdim=bool(g.choose(2)))


def _arg_reduce(g: Growth) -> None:
    x = g.pick(
        lambda i: (
            len(g.builder.shape(i)) > 0
            and g.bound(i).bits is not None
            and g.builder.dtype(i) != "bool"
        )
    )
    if x is None:
        return
    axis = g.choose(len(g.builder.shape(x)))
    node = g.builder.reduce(g.one_of(("argmax", "argmin")), x, (axis,), dtype="int64")
    g.add(node, float(g.builder.shape(x)[axis]), 0)


def _softmax(g: Growth) -> None:
    x = g.tamed(g.floating(lambda i: len(g.builder.shape(i)) > 0), 8)
    axes = _axes(g, x)
    highest = _reduced(g, "max", x, axes, keepdim=True)
    shifted = g.apply("sub", x, highest)
    e = g.builder.pointwise("exp", shifted)
    g.add(e, 1.0, None)
    total = _reduced(g, "sum", e, axes, keepdim=True)
    node = g.builder.pointwise("div", e, total)
    g.add(node, 1.0, None)


def _normalise(g: Growth) -> None:
    """Layer norm, or batch norm with statistics of the batch."""
    x = g.tamed(g.floating(lambda i: len(g.builder.shape(i)) > 0), 8)
    b = g.builder
    axes = _axes(g, x)
    count = int(np.prod([b.shape(x)[a] for a in axes]))
    scale = g.const(1 / count, b.dtype(x))
    mean = g.apply("mul", _reduced(g, "sum", x, axes, keepdim=True), scale)
    centred = g.apply("sub", x, mean)
    square = g.apply("mul", centred, centred)
    var = g.apply("mul", _reduced(g, "sum", square, axes, keepdim=True), scale)
    inv = g.apply("rsqrt", g.apply("add", var, g.const(1, b.dtype(x))))
    out = g.apply("mul", centred, inv)
    if g.choose(2):
        weight = g.fresh(b.shape(x)[-1:], b.dtype(x), static=True)
        g.apply("mul", out, weight)
    if g.choose(3) == 0:
        g.view(b.reshape(inv, [d for d in b.shape(inv) if d != 1]), inv)


_MATRIX = frozenset(("float32", "bfloat16", "float64", "float16", "int32"))


def _matmul(g: Growth) -> None:
    b = g.builder
    x = g.pick(lambda i: len(b.shape(i)) > 1 and b.dtype(i) in _MATRIX)
    if x is None:
        x = g.fresh(g.shape(2), "float32")
    x = g.tamed(x, 16)
    *batch, _, depth = b.shape(x)
    dtype = b.dtype(x)
    partners = [i for i in g.pool if b.dtype(i) == dtype and b.shape(i)[:-1] == (*batch, depth)]
    if partners and g.choose(2):
        y = g.tamed(partners[g.choose(len(partners))], 16)
    else:
        width = g.dims[g.choose(len(g.dims))]
        static = bool(g.choose(3))
        if g.choose(2):
            y = b.permute(g.fresh((width, depth), dtype, static=static), (1, 0))
        else:
            y = g.fresh((depth, width), dtype, static=static)
        y = b.broadcast(y, (*batch, depth, width))
        g.bounds[y] = Bound(3.0, 1)
    if b.shape(x)[-2] * b.shape(y)[-1] * int(np.prod(batch)) > g.numel:
        return
    p, q = g.bound(x), g.bound(y)
    bits = None if p.bits is None or q.bits is None else p.bits + q.bits
    node = g.add(b.matmul(x, y), p.magnitude * q.magnitude * depth, bits)
    _epilogue(g, node)


def _epilogue(g: Growth, node: int) -> None:
    """Bias, activation, residual: what follows contractions in models."""
    b = g.builder
    kind = g.choose(5)
    if kind == 0:
        return
    shape = b.shape(node)
    if b.dtype(node) in FLOATS and kind != 1:
        node = g.apply(g.one_of(("tanh", "sigmoid", "relu", "neg")), node)
    if kind >= 3:
        other = g.fresh(shape if kind == 3 else shape[-1:], b.dtype(node), static=kind == 4)
        node = g.apply("add", node, other)
    if kind == 2:
        node = g.view(b.permute(node, (*range(1, len(shape)), 0)), node)


def _image(g: Growth) -> int:
    """A value of shape (batch, channels, *spatial)."""
    b = g.builder
    x = g.pick(lambda i: len(b.shape(i)) in (3, 4) and b.dtype(i) in _MATRIX)
    if x is None:
        x = g.fresh(g.shape(3 + g.choose(2)), "float32")
    return g.tamed(x, 4)


def _conv(g: Growth) -> None:
    b = g.builder
    x = _image(g)
    batch, channels, *extent = b.shape(x)
    dtype = b.dtype(x)
    kind = g.choose(4)
    kernel = [min(1 + g.choose(3), d) for d in extent]
    stride = [1 + g.choose(2) for _ in extent]
    dilation = [
        1 + g.choose(2) if (k - 1) * 2 < d else 1 for k, d in zip(kernel, extent, strict=True)
    ]
    lo = [g.choose(k) for k in kernel]
    static = bool(g.choose(4))
    groups = 1
    if kind == 1:
        groups = channels
    elif kind == 2 and channels % 2 == 0:
        groups = 2
    common = {"stride": stride, "lo": lo, "dilation": dilation, "groups": groups}
    per_group = 1 if kind == 1 and g.choose(3) else g.dims[g.choose(len(g.dims))]
    out = per_group * groups
    taps = int(np.prod(kernel)) * channels // groups
    if kind == 3:
        w = g.fresh((channels, per_group, *kernel), dtype, static=static)
        size = [
            (d - 1) * s - 2 * p + r * (k - 1) + 1 + g.choose(s)
            for d, s, p, r, k in zip(extent, stride, lo, dilation, kernel, strict=True)
        ]
        op = "conv_transpose"
    else:
        hi = [g.choose(k) for k in kernel]
        w = g.fresh((out, channels // groups, *kernel), dtype, static=static)
        size = [
            (d + p + q - r * (k - 1) - 1) // s + 1
            for d, s, p, q, r, k in zip(extent, stride, lo, hi, dilation, kernel, strict=True)
        ]
        op, common = "conv", common | {"hi": hi}
    if min(size) < 1 or batch * out * int(np.prod(size)) > 2 * g.numel:
        return
    p, q = g.bound(x), g.bound(w)
    bits = None if p.bits is None or q.bits is None else p.bits + q.bits
    node = b.append(op, (x, w), (batch, out, *size), dtype, **common)
    _epilogue(g, g.add(node, p.magnitude * q.magnitude * taps, bits))


def _window(g: Growth) -> None:
    b = g.builder
    x = g.pick(
        lambda i: len(b.shape(i)) in (3, 4) and b.dtype(i) in ("float32", "bfloat16", "int32")
    )
    if x is None:
        x = g.fresh(g.shape(4), "float32")
    shape = b.shape(x)
    rank = len(shape) - 2
    extent = shape[2:]
    kernel = [min(1 + g.choose(3), d) for d in extent]
    stride = [1 + g.choose(2) for _ in extent]
    dilation = [
        1 + g.choose(2) if (k - 1) * 2 < d else 1 for k, d in zip(kernel, extent, strict=True)
    ]
    lo, hi = ([g.choose(k) for k in kernel] for _ in range(2))
    size = [
        (d + p + q - r * (k - 1) - 1) // s + 1
        for d, s, p, q, r, k in zip(extent, stride, lo, hi, dilation, kernel, strict=True)
    ]
    if rank < 1 or min(size) < 1 or np.prod(size) * shape[0] * shape[1] > 2 * g.numel:
        return
    op = g.one_of(("window_max", "window_sum", "window_argmax"))
    ends = {"kernel": kernel, "stride": stride, "lo": lo, "hi": hi, "dilation": dilation}
    bound = g.bound(x)
    reached = all(  # a window that lies in the padding alone gives -inf
        p <= (k - 1) * r and (n - 1) * s - p < d
        for n, s, d, p, k, r in zip(size, stride, extent, lo, kernel, dilation, strict=True)
    )
    if op == "window_argmax":
        if reached and bound.bits is not None:
            place = b.append(op, (x,), (*shape[:2], *size), "int32", **ends)
            g.add(place, float(np.prod(extent)), 0)
        return
    count = int(np.prod(kernel)) if op == "window_sum" else 1
    node = b.append(op, (x,), (*shape[:2], *size), b.dtype(x), **ends)
    node = g.add(node, bound.magnitude * count, bound.bits if reached else None)
    if g.choose(2) and b.dtype(node) in FLOATS:
        g.apply("relu", node)


def _pad(g: Growth) -> None:
    b = g.builder
    x = g.pick(lambda i: len(b.shape(i)) > 0)
    if x is None:
        return
    shape = b.shape(x)
    lo, hi = ([g.choose(3) for _ in shape] for _ in range(2))
    grown = [p + d + q for p, d, q in zip(lo, shape, hi, strict=True)]
    if np.prod(grown) <= 2 * g.numel:
        dtype = b.dtype(x)
        value = g.choose(2) if dtype == "bool" else (0, 1, -2)[g.choose(3)]
        fill = float(value) if dtype in FLOATS else value
        node = b.append(
            "pad", (x,), grown, dtype, lo=lo, hi=hi, value=bool(fill) if dtype == "bool" else fill
        )
        g.add(node, max(g.bound(x).magnitude, 2.0), g.bound(x).bits)


def _cat(g: Growth) -> None:
    b = g.builder
    x = g.pick(lambda i: len(b.shape(i)) > 0)
    if x is None:
        return
    shape, dim = b.shape(x), g.choose(len(b.shape(x)))

    def lined_up(i: int) -> bool:
        other = b.shape(i)
        same = (
            len(other) == len(shape)
            and other[:dim] + other[dim + 1 :] == shape[:dim] + shape[dim + 1 :]
        )
        return same and b.dtype(i) == b.dtype(x)

    parts = [x]
    for _ in range(1 + g.choose(2)):
        parts.append(g.pick(lined_up) or x)
    total = sum(b.shape(p)[dim] for p in parts)
    grown = (*shape[:dim], total, *shape[dim + 1 :])
    if np.prod(grown) <= 2 * g.numel:
        bits = [g.bound(p).bits for p in parts]
        node = b.append("cat", parts, grown, b.dtype(x), dim=dim)
        g.add(node, max(g.bound(p).magnitude for p in parts), None if None in bits else max(bits))


def _indices(g: Growth, shape: Sequence[int], extent: int) -> int:
    """Positions below ``extent``, some of them negative: an input, or computed."""
    b = g.builder
    index = g.fresh(shape, g.one_of(("int64", "int32")))
    if extent < 4 or g.choose(2):
        index = g.apply("mod", index, g.const(extent, b.dtype(index)))
    return g.apply("sub", index, g.const(1, b.dtype(index))) if g.choose(2) else index


def _take(g: Growth) -> None:
    b = g.builder
    x = g.pick(lambda i: len(b.shape(i)) > 0)
    if x is None:
        return
    shape, dim = b.shape(x), g.choose(len(b.shape(x)))
    size = [g.dims[g.choose(len(g.dims))] for _ in range(g.choose(3))]
    grown = (*shape[:dim], *size, *shape[dim + 1 :])
    if np.prod(grown) <= g.numel and len(grown) <= 5:
        index = _indices(g, size, shape[dim])
        g.view(b.append("take", (x, index), grown, b.dtype(x), dim=dim), x)


def _gather(g: Growth) -> None:
    b = g.builder
    x = g.pick(lambda i: len(b.shape(i)) > 0)
    if x is None:
        return
    shape, dim = b.shape(x), g.choose(len(b.shape(x)))
    size = [g.choose(d) + 1 for d in shape]
    index = _indices(g, size, shape[dim])
    g.view(b.append("gather", (x, index), size, b.dtype(x), dim=dim), x)


def _iota(g: Growth) -> None:
    shape = g.shape(g.choose(2) + 1)
    dim = g.choose(len(shape))
    dtype = g.one_of(("int64", "int32"))
    g.add(g.builder.append("iota", (), shape, dtype, dim=dim), float(shape[dim]), 0)


def _static(g: Growth) -> None:
    """Something computed from parameters alone."""
    x = g.pick(lambda i: g.builder.dtype(i) == "float32")
    if x is None:
        return
    w = g.fresh(g.builder.shape(x)[-1:], "float32", static=True)
    g.apply("mul", x, g.apply("tanh", g.apply("add", w, g.const(1, "float32"))))


MOVES: tuple[Callable[[Growth], None], ...] = (
    _unary, _unary, _binary, _binary, _binary, _root, _where, _cast, _reshape, _reshape, _permute,
    _broadcast, _slice, _reduce, _reduce, _arg_reduce, _softmax, _normalise, _matmul, _matmul,
    _conv, _conv, _window, _pad, _cat, _take, _gather, _iota, _static,
)  # fmt: skip
