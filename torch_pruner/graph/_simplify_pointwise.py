"""Rules of ``simplify`` for pointwise operators: constants, identities, repeated values."""

from __future__ import annotations

import math

from torch_pruner.graph.ir import GraphBuilder, Node, Shape, broadcast_shapes, const_value
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.reference import evaluate

_ROUNDING = ("floor", "ceil", "trunc", "round")
_IDEMPOTENT = frozenset((*_ROUNDING, "relu", "abs", "sign"))
_INVOLUTIONS = frozenset(("neg", "bitwise_not"))
_SAME_TWICE = frozenset(
    ("maximum", "minimum", "logical_and", "logical_or", "bitwise_and", "bitwise_or")
)
_NEUTRAL = {
    "add": 0,
    "mul": 1,
    "logical_and": 1,
    "logical_or": 0,
    "bitwise_or": 0,
    "bitwise_xor": 0,
}
_ABSORBING = {"logical_and": 0, "logical_or": 1}
_MANTISSA = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_EXPONENT = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8}
_BITS = {"int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8, "bool": 1}


def rewrite(b: GraphBuilder, node: Node, inputs: tuple[int, ...]) -> int:
    """The position of a node equal to the pointwise ``node`` of ``inputs``."""
    if node.op == "within":  # speaks of positions in this very shape
        return b.again(node, inputs)
    args = tuple(_scalar(b, x) for x in inputs)
    if all(b.nodes[x].op == "const" for x in args):
        return b.broadcast(_fold(b, node, args), node.shape)
    small: Shape = ()
    for x in args:
        small = broadcast_shapes(small, _source_shape(b, x))
    if small != node.shape and _shortens(b, args):
        repeated = [_shrink(b, x, small) for x in args]
        inner = rewrite(b, Node(node.op, (), small, node.dtype, node.attrs), tuple(repeated))
        return b.broadcast(inner, node.shape)
    if (equal := _identity(b, node, args)) is not None:
        return equal
    return b.again(node, args)


def _scalar(b: GraphBuilder, x: int) -> int:
    """A scalar needs no broadcast as an operand."""
    node = b.nodes[x]
    return node.inputs[0] if node.op == "broadcast" and b.shape(node.inputs[0]) == () else x


def _source_shape(b: GraphBuilder, x: int) -> Shape:
    node = b.nodes[x]
    return b.shape(node.inputs[0]) if node.op == "broadcast" else node.shape


def _shortens(b: GraphBuilder, args: tuple[int, ...]) -> bool:
    """Whether every operand that is not a scalar is a broadcast."""
    return all(b.nodes[x].op == "broadcast" or b.shape(x) == () for x in args)


def _shrink(b: GraphBuilder, x: int, shape: Shape) -> int:
    source = b.nodes[x].inputs[0] if b.nodes[x].op == "broadcast" else x
    return source if b.shape(source) == () else b.broadcast(source, shape)


def _fold(b: GraphBuilder, node: Node, args: tuple[int, ...]) -> int:
    """The value of the operator on constants, by the interpreter."""
    tiny = GraphBuilder()
    operands = [tiny.const(const_value(b.nodes[x]), b.dtype(x)) for x in args]
    tiny.append(node.op, operands, (), node.dtype)
    (value,) = evaluate(tiny.finish([len(tiny.nodes) - 1]), [])
    return b.const(value.item(), node.dtype)


def _identity(b: GraphBuilder, node: Node, args: tuple[int, ...]) -> int | None:
    """An existing value, or a simpler operator, that the node equals."""
    if len(args) == 1:
        return _unary(b, node, args[0])
    if node.op == "where":
        return _where(b, node, args)
    if any(b.dtype(x) != node.dtype for x in args):
        return None
    x, y = args
    if x == y and node.op in _SAME_TWICE:
        return x
    for value, other in ((_constant(b, y), x), (_constant(b, x), y)):
        if value is None or b.shape(other) != node.shape:
            continue
        if node.op in _NEUTRAL and _is_neutral(node, value):
            return other
        if node.op in _ABSORBING and value == _ABSORBING[node.op]:
            return b.broadcast(b.const(value, node.dtype), node.shape)
    right = _constant(b, y)
    return None if right is None or b.shape(x) != node.shape else _divisor(b, node, x, right)


def _is_neutral(node: Node, value: float) -> bool:
    """Adding leaves floats alone only if it is -0.0 that is added: -0.0 + 0.0 is 0.0."""
    if value != _NEUTRAL[node.op]:
        return False
    return node.op != "add" or node.dtype not in FLOATS or math.copysign(1.0, value) < 0


def _constant(b: GraphBuilder, x: int) -> float | int | bool | None:
    node = b.nodes[x]
    return const_value(node) if node.op == "const" else None


def _divisor(b: GraphBuilder, node: Node, x: int, value: float) -> int | None:
    """For a constant that is the right operand of an operator that does not commute."""
    match node.op:
        case "sub" if value == 0 and math.copysign(1.0, value) > 0:
            return x
        case "div" | "pow" if value == 1:
            return x
        case "floordiv" | "truncdiv" if value == 1 and node.dtype not in FLOATS:
            return x
        case "div" if _exact_reciprocal(value, node.dtype):
            factor = b.const(1 / value, node.dtype)
            return b.append("mul", (x, factor), node.shape, node.dtype)
    return None


def _exact_reciprocal(value: float, dtype: str) -> bool:
    """A power of two whose reciprocal is a normal number: dividing and multiplying round alike."""
    if value == 0 or not math.isfinite(value) or abs(math.frexp(value)[0]) != 0.5:
        return False
    limit: int = 2 ** (_EXPONENT[dtype] - 1) - 2
    return abs(math.frexp(value)[1] - 1) < limit


def _unary(b: GraphBuilder, node: Node, x: int) -> int | None:
    inner = b.nodes[x]
    if node.op == "cast":
        return _cast(b, node, x)
    if inner.dtype != node.dtype:
        return None
    if node.op in _ROUNDING and node.dtype not in FLOATS:
        return x
    if inner.op == node.op and node.op in _IDEMPOTENT:
        return x
    negated = node.op in _INVOLUTIONS or (node.op == "logical_not" and node.dtype == "bool")
    if inner.op == node.op and negated and b.dtype(inner.inputs[0]) == node.dtype:
        return inner.inputs[0]
    if node.op == "abs" and inner.op == "neg" and b.dtype(inner.inputs[0]) == node.dtype:
        return b.append("abs", inner.inputs, node.shape, node.dtype)
    return None


def _where(b: GraphBuilder, node: Node, args: tuple[int, ...]) -> int | None:
    condition, x, y = args
    value = _constant(b, condition)
    chosen = x if value or (value is None and x == y) else y
    if value is None and x != y:
        return None
    return b.cast(b.broadcast(chosen, node.shape), node.dtype)


def _cast(b: GraphBuilder, node: Node, x: int) -> int | None:
    inner = b.nodes[x]
    if inner.dtype == node.dtype:
        return x
    if inner.op == "cast":
        origin = inner.inputs[0]
        if _casts_compose(b.dtype(origin), inner.dtype, node.dtype):
            return b.cast(origin, node.dtype)
    return None


def _casts_compose(source: str, between: str, target: str) -> bool:
    """Whether ``source`` to ``between`` to ``target`` is ``source`` to ``target``."""
    if not _holds(between, source):
        return False
    # A float outside the range of an integer converts differently than an integer wraps.
    leaves_range = between in FLOATS and source not in FLOATS and target in _BITS
    return not leaves_range or target == "bool" or _holds(target, source)


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``."""
    if wide == narrow:
        return True
    if wide == "bool":
        return False
    if narrow == "bool":
        return True
    if wide in FLOATS and narrow in FLOATS:
        return _MANTISSA[wide] >= _MANTISSA[narrow] and _EXPONENT[wide] >= _EXPONENT[narrow]
    if wide in FLOATS:
        return _MANTISSA[wide] >= _BITS[narrow]  # float16 holds 2**11, int8 and uint8 need 2**8
    if narrow in FLOATS:
        return False
    return wide != "uint8" and _BITS[wide] > _BITS[narrow]
