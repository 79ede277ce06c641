"""Products with weights of few bits: words of several, a scale for every group of the reduction.

``quantize_weights`` makes such weights of floats, which the user has to ask for: what computes the
words is split off with everything that depends on parameters alone. ``keep_groups`` gives the words
themselves to the product where kernels read them; elsewhere they are made floats ahead. It takes
int8 weights with a scale for each group, too, as torchao has them. See ``graph.nibbles`` for what
the words are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.nibbles import per_word
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.quantize import LEAST, rewritten, unpermuted

if TYPE_CHECKING:
    from typing import Protocol

    from torch_pruner.graph.ir import Graph, GraphBuilder, Node

    class TakesWords(Protocol):
        """What ``takes_words`` is."""

        def __call__(self, rows: int, given: str, *, full: bool) -> bool: ...


GROUP = 64  # neighbours along the reduction that share a scale
SCALE = "bfloat16"  # a quarter of a bit for each weight, and 0.03 % more of squared error


def quantize_weights4(graph: Graph, group: int = GROUP) -> Graph:
    """Static float weights of matrix products as numbers of four bits.

    Symmetric, groups of ``group`` neighbours along the reduction, the scale of each such that the
    mean squared error is least (``nibbles.scales_of``). Weights of fewer than 64 columns or rows
    stay. A group with NaN or infinity is NaN.
    """

    def rewrite(b: GraphBuilder, node: Node, operands: tuple[int, int]) -> int | None:
        _, weight = unpermuted(b, operands[1])
        of = b.nodes[weight]
        parameter = of.op == "input" and of.attr("static") and of.dtype in FLOATS
        if not parameter or len(of.shape) != 2 or min(of.shape) < LEAST:
            return None
        depth, columns = b.shape(operands[1])
        scales = b.append(
            "group_scales", (operands[1],), (-(-depth // group), columns), SCALE, group=group
        )
        words = b.append(
            "group_words",
            (operands[1], scales),
            (-(-depth // per_word(4)), columns),
            "int32",
            group=group,
        )
        weights = b.append(
            "group_floats", (words, scales), (depth, columns), of.dtype, bits=4, group=group
        )
        return b.append(node.op, (operands[0], weights), node.shape, node.dtype)

    return rewritten(graph, rewrite)


def takes_words(rows: int, given: str, *, full: bool) -> bool:
    """Whether a product of so many rows of ``given`` reads words as they are, on CPUs: all do.

    ``full``: each word has as many numbers as it can.
    """
    return True


def keep_groups(graph: Graph, takes: TakesWords = takes_words) -> Graph:
    """``a @ group_floats(words, ...)`` as a product with the words themselves, in float32 sums.

    Where ``takes`` says so. So is ``a @ ((q - zero) * scale)`` for static int8 ``q`` whose scale
    and zero are constant along groups of the reduction.
    """

    def rewrite(b: GraphBuilder, node: Node, operands: tuple[int, int]) -> int | None:
        right = operands[1]
        if b.nodes[right].op != "group_floats":
            found = _of_bytes(b, right)
            if found is None:
                return None
            right = found
        made = b.nodes[right]
        each = per_word(made.attr("bits"))
        full = b.shape(right)[0] % each == 0
        if made.attr("group") % each or not takes(node.shape[0], b.dtype(operands[0]), full=full):
            return None
        given, attrs = (operands[0], *made.inputs), dict(made.attrs)
        total = b.append("matmul_grouped", given, node.shape, "float32", **attrs)
        return b.cast(total, node.dtype)

    return rewritten(graph, rewrite)


def _of_bytes(b: GraphBuilder, right: int) -> int | None:
    """An operand (k, n) made of int8 (n, k) by groups, as ``group_floats``; None for any other."""
    perm, x = unpermuted(b, right)
    grouped = b.nodes[x].inputs[0] if b.nodes[x].op == "reshape" else x
    if perm != (1, 0) or len(b.shape(grouped)) != 3:
        return None
    columns, groups, group = b.shape(grouped)
    factor = b.nodes[_uncast(b, grouped)]
    if factor.op != "mul" or b.shape(x) != (columns, groups * group):
        return None
    for values, scale in (factor.inputs, factor.inputs[::-1]):
        number, zero = _uncast(b, values), None
        if b.nodes[number].op == "sub":
            number, zero = b.nodes[number].inputs
        number = _uncast(b, number)
        scales = _by_group(b, scale)
        zeros = None if zero is None else _by_group(b, zero)
        if b.dtype(number) != "int8" or scales is None or (zero is not None and zeros is None):
            continue
        whole = b.permute(b.reshape(number, (columns, groups * group)), (1, 0))
        rows = -(-groups * group // per_word(8))
        words = b.append("byte_words", (whole,), (rows, columns), "int32")
        given = [words, scales]
        if zeros is not None:
            wide = (b.cast(zeros, "float32"), b.cast(scales, "float32"))
            given.append(b.pointwise("neg", b.pointwise("mul", *wide)))
        return b.append("group_floats", given, b.shape(right), b.dtype(x), bits=8, group=group)
    return None


def _uncast(b: GraphBuilder, x: int) -> int:
    """What a value is cast from, bytes or floats."""
    while b.nodes[x].op == "cast" and b.dtype(b.nodes[x].inputs[0]) in ("int8", *FLOATS):
        x = b.nodes[x].inputs[0]
    return x


def _by_group(b: GraphBuilder, factor: int) -> int | None:
    """A value (n, groups, group) that is constant along groups, as (groups, n)."""
    x = b.nodes[factor].inputs[0] if b.nodes[factor].op == "broadcast" else factor
    x = _uncast(b, x)
    shape = b.shape(factor)
    if len(shape) != 3 or b.shape(x) != (*shape[:2], 1):
        return None
    return b.permute(b.reshape(x, shape[:2]), (1, 0))
