"""What a kernel graph is about, as families ask it: its anchor operators, not its shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.attention_gradient import gradient_of
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.depthwise_gradient import gradient_of as depthwise_gradient_of
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.rows import full_node, row_domain
from torch_pruner.graph.strided import strided

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph


_ANCHORS = {
    OpKind.CONTRACT, OpKind.WINDOW, OpKind.REDUCE, OpKind.UPDATE, OpKind.RECURRENCE,
    OpKind.GROUPED,
}  # fmt: skip


def is_attention(spec: Graph) -> bool:
    """Products with a reduction between them."""
    kinds = _kinds(spec)
    return OpKind.CONTRACT in kinds and OpKind.REDUCE in kinds


def weights_are_scaled(spec: Graph) -> bool:
    """Whether something is multiplied to attention's weights, as scales of int8 values are."""
    found = attention_of(spec)
    return found is not None and found.factor is not None


def is_attention_gradient(spec: Graph) -> bool:
    """The products that lead from attention's result back to queries, keys and values."""
    return gradient_of(spec) is not None


def is_contraction(spec: Graph) -> bool:
    """A product of matrices, a convolution, or a gradient of one, of numbers of whole bytes."""
    kinds = _kinds(spec)
    alone = OpKind.CONTRACT in kinds and OpKind.REDUCE not in kinds
    return alone and not is_int4_product(spec) and gradient_of(spec) is None


def has_one_dtype(spec: Graph) -> bool:
    """Whether the operands of a contraction have one, as instructions for whole tiles want it."""
    con = contraction_of(spec)
    return spec.nodes[con.a].dtype == spec.nodes[con.b].dtype


def is_int4_product(spec: Graph) -> bool:
    """A product with weights of four bits."""
    return any(n.op == "matmul_grouped" for n in spec.nodes)


def is_depthwise(spec: Graph, *, constant: bool) -> bool:
    """A convolution of each channel for itself; ``constant``: only one with constant weights."""
    if not is_contraction(spec):
        return False
    con = contraction_of(spec)
    return con.form == "depthwise" and not (constant and constant_operand(spec, con) is None)


_MOST_APART = 4  # positions of a transposed convolution's input: tiles of so many at least


def is_channelwise(spec: Graph) -> bool:
    """A convolution of each channel for itself, or a transposed one, whatever the weights are."""
    if not is_contraction(spec):
        return False
    con = contraction_of(spec)
    if not con.channelwise or depthwise_gradient_of(spec) is not None:
        return False
    near = con.conv is not None and max(con.conv.dilate_input) <= _MOST_APART
    return near and not any(n.is_count for n in spec.nodes)


def is_depthwise_gradient(spec: Graph) -> bool:
    """The gradient of the weights of a convolution of each channel for itself."""
    return is_contraction(spec) and depthwise_gradient_of(spec) is not None


_NARROW = 32  # channels: more are columns enough for register tiles of several vectors


def has_narrow_groups(spec: Graph) -> bool:
    """A float32 convolution in groups of a few channels, whole vectors of four at least, with
    constant weights."""
    if not is_contraction(spec):
        return False
    con = contraction_of(spec)
    narrow = con.form == "conv" and con.groups > 1 and con.n <= _NARROW and con.n % 4 == 0
    narrow = narrow and {spec.nodes[i].dtype for i in (con.a, con.b)} == {"float32"}
    return narrow and constant_operand(spec, con) is not None


_MOST_TAPS = 512  # kernel offsets: more are written out as too much code
_SPATIAL_RANKS = (3, 4, 5)  # of values with one to three spatial axes


def in_planes(spec: Graph) -> bool:
    """A float32 convolution with constant weights, perhaps a strided transposed one, whose operand
    and result lie channels first."""
    if not is_contraction(spec) or len(spec.outputs) != 1 or any(n.is_count for n in spec.nodes):
        return False
    con = contraction_of(spec)
    if con.form not in ("conv", "depthwise", "conv_phases") or con.conv is None:
        return False
    anchor, given = spec.nodes[con.anchor], spec.nodes[con.a]
    if {given.dtype, spec.nodes[con.b].dtype} != {"float32"} or min(con.conv.lo) < 0:
        return False
    if constant_operand(spec, con) is None:
        return False
    place, taps = strided(spec, con.a), math.prod(spec.nodes[con.b].shape[2:])
    if place is None or place.strides[-1] != 1 or len(given.shape) not in _SPATIAL_RANKS:
        return False
    if min(given.shape[-1], con.m[-1]) == 1 or taps > _MOST_TAPS:
        return False
    reach = {con.anchor}
    for i, node in enumerate(spec.nodes):  # elementwise all the way: results lie as computed
        if any(j in reach for j in node.inputs):
            if node.kind is not OpKind.POINTWISE or node.shape != anchor.shape:
                return False
            reach.add(i)
    return True


def is_product(spec: Graph) -> bool:
    """A contraction that is no convolution of each channel for itself, and no gradient of one."""
    each = is_depthwise(spec, constant=True) or is_channelwise(spec)
    return is_contraction(spec) and not each and not is_depthwise_gradient(spec)


def is_window(spec: Graph) -> bool:
    """Pooling."""
    kinds = _kinds(spec)
    return OpKind.WINDOW in kinds and OpKind.CONTRACT not in kinds


def is_reduction(spec: Graph) -> bool:
    """Rows that are reduced, and perhaps finished."""
    return _kinds(spec) & {OpKind.CONTRACT, OpKind.WINDOW, OpKind.REDUCE} == {OpKind.REDUCE}


def is_elementwise(spec: Graph) -> bool:
    """Neither products, nor windows, nor reductions, nor an update, nor a recurrence, nor rows in
    groups."""
    return not _kinds(spec) & _ANCHORS


def is_update(spec: Graph) -> bool:
    """Rows that replace those at positions of a value, whole or where it lies."""
    return OpKind.UPDATE in _kinds(spec)


def is_recurrence(spec: Graph) -> bool:
    """The steps of a recurrent layer."""
    return OpKind.RECURRENCE in _kinds(spec)


def is_grouped(spec: Graph) -> bool:
    """Rows in groups, each group times a matrix of its own."""
    return OpKind.GROUPED in _kinds(spec)


def ends_reduced(spec: Graph) -> bool:
    """A reduction whose outputs are all of one shape, none as large as what is reduced."""
    if not is_reduction(spec):
        return False
    shape = row_domain(spec).shape
    if any(full_node(spec, o, shape) is not None for o in spec.outputs):
        return False
    return len({spec.nodes[o].shape for o in spec.outputs}) == 1


def _kinds(spec: Graph) -> set[OpKind]:
    return {n.kind for n in spec.nodes}
