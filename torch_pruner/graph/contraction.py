"""Contractions in one canonical form: batch, row, column and reduction axes of any operator.

The form is what sketches reason about and what the emitter walks; it holds extents and roles, no
expressions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from torch_pruner.graph.ir import Graph, GraphBuilder, Node, Shape
from torch_pruner.graph.ops import ITEMSIZE, OpKind

_BLOCK = 256  # positions of the reduction at least in a block
NEAR_BYTES = 160 << 10
"""Of a panel's block in float32: a small part of a second cache."""
_ENOUGH_TILES = 4  # that pass by a panel, to convert it before instead of for each
_TWICE = 0.1  # of a line's rows: rows at a constant distance are worth so much


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Geometry of a convolution; a transposed one is an ordinary one on a dilated input."""

    kernel: Shape
    stride: Shape
    dilation: Shape
    lo: Shape  # zeros before the input, per spatial dim
    dilate_input: Shape  # distance of neighbouring input elements (transposed convolution), else 1
    padded: Shape  # spatial extents of the padded input that the kernel reads
    copies_input: (
        bool  # rows read outside the input or between its elements: a padded copy is made first
    )
    phase: Shape = ()  # of ``conv_phases``: the padding modulo the stride


@dataclass(frozen=True, slots=True)
class Contraction:
    """One contraction of a kernel graph: ``out[g, m, n] = sum_k a[g, m, k] * b[g, k, n]``.

    ``m`` and ``k`` are lists of extents (a convolution's rows are batch and output positions, its k
    kernel offsets and channels). ``depthwise``: there is one group and ``a`` depends on n instead
    of a channel of k. ``conv_phases``: a strided transposed convolution as one dense convolution
    per output position modulo the stride; groups are these phases, counted from the last backwards
    (see ``_phases``).
    """

    anchor: int  # node position
    form: (
        str  # "matmul" | "matmul_grouped" | "conv" | "conv_transpose" | "conv_phases" | "depthwise"
    )
    batch: Shape
    m: Shape
    n: int
    k: Shape
    a: int  # node positions of the operands
    b: int
    conv: ConvShape | None
    acc_dtype: str

    @property
    def groups(self) -> int:
        return math.prod(self.batch)

    @property
    def rows(self) -> int:
        return math.prod(self.m)

    @property
    def depth(self) -> int:
        return math.prod(self.k)

    @property
    def shares_rows(self) -> bool:
        """Whether groups read and write parts of the same lines: channels of a convolution."""
        return self.form == "conv" and self.groups > 1

    @property
    def channelwise(self) -> bool:
        """Whether each channel of the result is made of the same channel of the operand alone."""
        alone = self.form == "conv_transpose" and self.groups > 1 and (self.n, self.k[-1]) == (1, 1)
        return alone or self.form == "depthwise"

    @property
    def in_line(self) -> bool:
        """Whether the first operand's rows lie a constant apart, from the first to the last.

        So do those of a convolution that moves along its first spatial dimension alone.
        """
        conv = self.conv
        if conv is None:
            return True
        moves = conv.kernel if self.m[0] > 1 else conv.kernel[1:]
        spaced = {*conv.stride, *moves} == {1} and conv.padded[1:] == self.m[2:]
        return spaced and self.form == "conv" and max(conv.dilate_input) == 1

    def by_line(self, tm: Any) -> Any:
        """Whether tiles of ``tm`` rows (a number or an array) are laid along the innermost axis.

        They are where they fit, or where little is computed twice: the last tile of a line begins
        early enough to be whole.
        """
        width = self.m[-1]
        wasted = -(-width // tm) * tm - width
        return (wasted == 0) | ((not self.in_line) & (wasted <= _TWICE * width) & (tm <= width))

    def row_tiles(self, tm: Any) -> Any:
        """Tiles of ``tm`` rows (a number or an array)."""
        width = self.m[-1]
        lines = self.by_line(tm)
        return lines * (self.rows // width * -(-width // tm)) + (lines == 0) * -(-self.rows // tm)

    def chunked(self, tm: int, chunks: int) -> tuple[int, int]:
        """(row chunks, tiles of ``tm`` rows in each) nearest to ``chunks``; none is empty."""
        return dealt(int(self.row_tiles(tm)), chunks)

    def reduction_blocks(self) -> tuple[int, ...]:
        """Into how many blocks the reduction may be cut: leading kernel axes, or equal pieces."""
        if self.form == "matmul":
            counts = [n for n in (2, 3, 4, 6, 8, 12) if self.depth % n == 0]
        elif self.form == "matmul_grouped":  # a block has whole words, of eight numbers at most
            counts = [n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32) if self.depth % (n * 8) == 0]
        else:
            counts = [math.prod(self.k[:i]) for i in range(1, len(self.k))]
        legal = self.form in ("matmul", "matmul_grouped", "conv")
        return (1, *sorted({n for n in counts if n > 1 and legal and self.depth // n >= _BLOCK}))

    @property
    def flops(self) -> int:
        return 2 * self.groups * self.rows * self.n * self.depth


def dealt(tiles: int, chunks: int) -> tuple[int, int]:
    """(chunks, tiles in each) nearest to ``chunks`` of so many tiles; none is empty."""
    each = -(-tiles // min(chunks, tiles))
    return -(-tiles // each), each


def accumulator(dtype: str) -> str:
    """The dtype sums are kept in (see ``graph.ops``)."""
    return "float32" if dtype in ("float32", "float16", "bfloat16") else dtype


def is_narrow(graph: Graph, con: Contraction) -> bool:
    """Whether operands are narrower than the float32 that is computed in."""
    if con.form == "matmul_grouped":
        return True
    narrow = ITEMSIZE[graph.nodes[con.b].dtype] < ITEMSIZE[con.acc_dtype]
    return narrow and con.acc_dtype == "float32" and con.form != "depthwise"


class TileDecisions(Protocol):
    """The decisions of register tiles that say whether operands are widened: numbers or arrays."""

    @property
    def vl(self) -> Any:
        """Elements of one vector."""

    @property
    def tm(self) -> Any:
        """Rows of a register tile."""

    @property
    def nv(self) -> Any:
        """Vectors of a row of it."""

    @property
    def pack(self) -> Any:
        """1: the second operand is packed into panels."""

    @property
    def kb(self) -> Any:
        """Blocks of the reduction."""


def is_widened(graph: Graph, con: Contraction, constant: bool, tile: TileDecisions) -> Any:
    """Whether operands become float32 before tiles read them, and not whenever a tile does.

    A block of a constant panel is converted into the cache where several tiles pass by it; what is
    packed in the kernel is packed as float32. Then the first operand is copied, too, if it is
    narrow.
    """
    if con.form == "matmul_grouped":
        return np.ones(np.shape(tile.kb), dtype=bool)
    if not is_narrow(graph, con):
        return np.zeros(np.shape(tile.kb), dtype=bool)
    near = con.depth // tile.kb * (tile.nv * tile.vl * ITEMSIZE[con.acc_dtype])
    fits = near <= NEAR_BYTES if constant else tile.pack == 1
    return fits & (con.row_tiles(tile.tm) >= _ENOUGH_TILES)


def copies_first(graph: Graph, con: Contraction, widened: Any) -> Any:
    """Whether the first operand is copied before tiles read it: padded, or as float32."""
    pads = con.conv is not None and con.conv.copies_input
    return pads | (widened & (ITEMSIZE[graph.nodes[con.a].dtype] < ITEMSIZE[con.acc_dtype]))


def copied_shape(graph: Graph, con: Contraction) -> Shape:
    """Shape of that copy: (group, row, k), or a convolution's padded input, channels last."""
    if con.conv is None:
        return (con.groups, con.rows, con.depth)
    return (con.m[0], *con.conv.padded, graph.nodes[con.a].shape[1])


def contraction_of(graph: Graph) -> Contraction:
    """The contraction of a kernel graph that has exactly one."""
    anchors = [i for i, n in enumerate(graph.nodes) if n.kind is OpKind.CONTRACT]
    if len(anchors) != 1:
        raise ValueError(f"the kernel graph has {len(anchors)} contractions, not one")
    return contraction_at(graph, anchors[0])


def contraction_at(graph: Graph, anchor: int) -> Contraction:
    """The contraction that a node is."""
    node = graph.nodes[anchor]
    is_conv = node.op not in ("matmul", "matmul_grouped")
    return _conv(graph, anchor, node) if is_conv else _matmul(graph, anchor, node)


def _matmul(graph: Graph, anchor: int, node: Node) -> Contraction:
    a, b = node.inputs[:2]
    *batch, rows, depth = graph.nodes[a].shape
    return Contraction(
        anchor,
        node.op,
        tuple(batch),
        (rows,),
        node.shape[-1],
        (depth,),
        a,
        b,
        None,
        accumulator(node.dtype),
    )


def _phases(graph: Graph, anchor: int, node: Node) -> Contraction | None:
    """A transposed convolution of stride s and kernel k without the zeros between its input.

    Output o = q s + f is touched by the taps r = o + p (mod s) alone. Tap r = t s - 1 - u s - h,
    with t taps per phase and h counting phases, reads input q + e - (t - 1 - p // s) + u, where
    e = (h + p % s) // s. Taps past the kernel are zeros. None where positions do not divide evenly.
    """
    a, b = node.inputs
    x, kernel, stride = graph.nodes[a].shape, graph.nodes[b].shape[2:], node.attr("stride")
    out, pad, rank = node.shape[2:], node.attr("lo"), len(kernel)
    uneven = any(o % s for o, s in zip(out, stride, strict=True))
    if node.attr("groups") != 1 or max(stride) == 1 or max(node.attr("dilation")) > 1 or uneven:
        return None
    taps = tuple(-(-k // s) for k, s in zip(kernel, stride, strict=True))
    lo = tuple(t - 1 - p // s for t, p, s in zip(taps, pad, stride, strict=True))
    rows = tuple(o // s for o, s in zip(out, stride, strict=True))
    phase = tuple(p % s for p, s in zip(pad, stride, strict=True))
    late = tuple((s - 1 + p) // s for p, s in zip(phase, stride, strict=True))
    padded = tuple(q + e + t - 1 for q, e, t in zip(rows, late, taps, strict=True))
    outside = any(lo) or any(n > m for n, m in zip(padded, x[2:], strict=True))
    ones = (1,) * rank
    return Contraction(
        anchor, "conv_phases", stride, (x[0], *rows), graph.nodes[b].shape[1], (*taps, x[1]), a, b,
        ConvShape(taps, ones, ones, lo, ones, padded, outside, phase), accumulator(node.dtype),
    )  # fmt: skip


def _conv(graph: Graph, anchor: int, node: Node) -> Contraction:
    if node.op == "conv_transpose" and (found := _phases(graph, anchor, node)) is not None:
        return found
    a, b = node.inputs
    x, w = graph.nodes[a].shape, graph.nodes[b].shape
    groups, kernel, dilation = node.attr("groups"), w[2:], node.attr("dilation")
    reach = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
    if node.op == "conv_transpose":
        lo = tuple(r - p for r, p in zip(reach, node.attr("lo"), strict=True))
        stride, dilate = (1,) * len(kernel), tuple(node.attr("stride"))
        per_group = w[1]
    else:
        lo, stride, dilate = tuple(node.attr("lo")), tuple(node.attr("stride")), (1,) * len(kernel)
        per_group = w[0] // groups
    out = node.shape[2:]
    padded = tuple((o - 1) * s + r + 1 for o, s, r in zip(out, stride, reach, strict=True))
    transposed = node.op == "conv_transpose"
    outside = any(lo) or transposed or any(p > i for p, i in zip(padded, x[2:], strict=True))
    conv = ConvShape(kernel, stride, dilation, lo, dilate, padded, outside)
    depthwise = not transposed and groups == x[1] and per_group == 1 and groups > 1
    if depthwise:
        return Contraction(
            anchor,
            "depthwise",
            (1,),
            (x[0], *out),
            groups,
            kernel,
            a,
            b,
            conv,
            accumulator(node.dtype),
        )
    return Contraction(
        anchor, node.op, (groups,), (x[0], *out), per_group, (*kernel, x[1] // groups), a, b, conv,
        accumulator(node.dtype),
    )  # fmt: skip


def constant_operand(graph: Graph, contraction: Contraction) -> tuple[int, Graph] | None:
    """(input index, view graph) when the second operand is only views of one static input.

    None if anything else reads that input.
    """
    found = None if contraction.a == contraction.b else constant_behind(graph, contraction.b)
    if found is None or contraction.form != "conv_phases":
        return found
    index, view = found
    builder = GraphBuilder()
    x = 0
    for node in view.nodes:
        x = builder.again(node, node.inputs)
    return index, builder.finish([_by_phase(builder, x, contraction)])


def constant_behind(graph: Graph, operand: int) -> tuple[int, Graph] | None:
    """(input index, view graph) when ``operand`` is only views of one static input.

    None if anything else reads that input.
    """
    chain: list[int] = []
    at = operand
    users = graph.users()
    while graph.nodes[at].kind is OpKind.VIEW and graph.nodes[at].op != "broadcast":
        if len(users[at]) != 1:
            return None
        chain.append(at)
        at = graph.nodes[at].inputs[0]
    node = graph.nodes[at]
    if node.op != "input" or not node.attr("static") or len(users[at]) != 1:
        return None
    builder = GraphBuilder()
    x = builder.input(0, node.shape, node.dtype)
    for step in reversed(chain):
        view = graph.nodes[step]
        x = builder.again(view, (x,))
    return node.attr("index"), builder.finish([x])


def _by_phase(builder: GraphBuilder, x: int, con: Contraction) -> int:
    """Weights (c, o, *r) as (phase, taps and c, o), the operand of a batched product."""
    channels, columns, *kernel = builder.shape(x)
    taps, stride = con.k[:-1], con.batch
    whole = tuple(t * s for t, s in zip(taps, stride, strict=True))
    if whole != tuple(kernel):
        hi = (0, 0, *(w - k for w, k in zip(whole, kernel, strict=True)))
        shape, none = (channels, columns, *whole), (0,) * len(hi)
        x = builder.append("pad", (x,), shape, builder.dtype(x), lo=none, hi=hi, value=0.0)
    rank = len(whole)
    spatial = tuple(range(2, 2 + rank))
    x = builder.append("flip", (x,), builder.shape(x), builder.dtype(x), dims=spatial)
    split = [n for pair in zip(taps, stride, strict=True) for n in pair]
    x = builder.reshape(x, (channels, columns, *split))
    order = (*range(3, 3 + 2 * rank, 2), *range(2, 2 + 2 * rank, 2), 0, 1)
    return builder.reshape(builder.permute(x, order), (con.groups, con.depth, columns))


def traffic_bytes(graph: Graph) -> int:
    """Bytes of all inputs and outputs of a kernel graph, each counted once."""
    places = (*graph.inputs, *graph.outputs)
    return sum(graph.nodes[i].numel * ITEMSIZE[graph.nodes[i].dtype] for i in places)
