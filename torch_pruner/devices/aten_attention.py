"""Attention as one of ATen's operators, ``scaled_dot_product_attention``, in a kernel graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Nodes that are its operands, and those that are ``read`` where it is one operator.

    ``keys`` is turned, as a product reads it; ``mask``, which may be missing, is full, and true
    where keys count or else added to scores.
    """

    queries: int
    keys: int
    values: int
    mask: int | None
    causal: bool
    scale: float
    out: int
    read: frozenset[int]

    def run(self, values: list[torch.Tensor]) -> torch.Tensor:
        """The result, where ``values`` has what each node before it is."""
        query, key, value = (values[i] for i in (self.queries, self.keys, self.values))
        mask = None if self.mask is None else values[self.mask]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
        found = torch.nn.functional.scaled_dot_product_attention(
            _in_four(query),
            _in_four(key.transpose(-2, -1)),
            _in_four(value),
            None if mask is None else _in_four(mask),
            is_causal=self.causal,
            scale=self.scale,
        )
        return found.reshape(*query.shape[:-1], value.shape[-1])


def _in_four(x: torch.Tensor) -> torch.Tensor:
    """Fused kernels take (batch, heads, length, width) alone."""
    if x.dim() < 4:
        return x.reshape((1,) * (4 - x.dim()) + x.shape)
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def attention_call(spec: Graph) -> AttentionCall | None:
    """The attention that a kernel graph has, if the operator computes just that; else None.

    Scores are scaled, then masked once: by -inf where a condition does not hold, by what is added,
    or where a key comes after the query. Rows in which no key counts are left to the operator.
    """
    att = attention_of(spec)
    if att is None or att.row is not None or att.factor is not None:
        return None
    nodes = spec.nodes
    queries, keys = nodes[att.scores].inputs
    values = nodes[att.out].inputs[1]
    if len({nodes[i].dtype for i in (queries, keys, values)}) > 1:
        return None
    if nodes[att.powers].op != "exp" or not (_is_top(spec, att) and _is_total(spec, att)):
        return None
    at, mask, causal = att.masked, None, False
    node = nodes[at]
    if att.causal:
        at, causal = node.inputs[1], True
    elif node.op == "where":
        otherwise = nodes[node.inputs[2]]
        if otherwise.op != "const" or const_value(otherwise) != -math.inf:
            return None
        mask, at = node.inputs[0], node.inputs[1]
    elif node.op == "add":
        inside = [i for i in node.inputs if i in att.inner]
        others = [i for i in node.inputs if i not in att.inner]
        if len(inside) != 1 or not _exact(spec, others[0], nodes[queries].dtype):
            return None
        (at,), (mask,) = inside, others
    scale = _scale(spec, at, att)
    if scale is None or (mask is not None and nodes[mask].shape != att.shape):
        return None
    operands = (queries, keys, values) if mask is None else (queries, keys, values, mask)
    read = _read(spec, att.out, operands)
    return AttentionCall(queries, keys, values, mask, causal, scale, att.out, read)


def _read(spec: Graph, out: int, operands: Sequence[int]) -> frozenset[int]:
    """What the outputs depend on, where ``out`` depends on ``operands`` alone."""
    found: set[int] = set()
    stack = list(spec.outputs)
    while stack:
        if (i := stack.pop()) not in found:
            found.add(i)
            stack += operands if i == out else spec.nodes[i].inputs
    return frozenset(found)


def _scale(spec: Graph, at: int, att: Attention) -> float | None:
    """What the products are multiplied by on their way to ``at``."""
    scale, nodes = 1.0, spec.nodes
    while at != att.scores:
        node = nodes[at]
        if node.op in ("mul", "div"):
            by = [i for i in node.inputs if nodes[i].op == "const"]
            rest = [i for i in node.inputs if nodes[i].op != "const"]
            if len(rest) != 1 or (node.op == "div" and node.inputs[0] != rest[0]):
                return None
            value = float(const_value(nodes[by[0]]))
            if node.op == "div" and value == 0:
                return None
            scale = scale * value if node.op == "mul" else scale / value
            (at,) = rest
        elif node.op in ("cast", "reshape"):
            (at,) = node.inputs
        else:
            return None
    return scale


def _is_top(spec: Graph, att: Attention) -> bool:
    """Whether powers subtract the largest score, or 0 where it is -inf."""
    return all(_plainly(spec, spec.nodes[i].inputs[0], att.top, -math.inf) for i in att.spread)


def _is_total(spec: Graph, att: Attention) -> bool:
    """Whether the result is divided by the sum of powers, or by 1 where it is 0."""
    return _plainly(spec, spec.nodes[att.divisor].inputs[0], att.total, 0.0)


def _plainly(spec: Graph, at: int, wanted: int, unless: float) -> bool:
    """Whether a value is ``wanted`` itself, but for where that is ``unless``."""
    nodes = spec.nodes
    while at != wanted:
        node = nodes[at]
        if node.op == "reshape":
            (at,) = node.inputs
            continue
        if node.op != "where" or nodes[node.inputs[1]].op != "const":
            return False
        test = nodes[node.inputs[0]]
        bound = [nodes[i] for i in test.inputs if nodes[i].op == "const"] if test.inputs else []
        if test.op != "eq" or [const_value(n) for n in bound] != [unless]:
            return False
        at = node.inputs[2]
    return True


def _exact(spec: Graph, at: int, dtype: str) -> bool:
    """Whether numbers are of ``dtype``, or were until they were cast."""
    node = spec.nodes[at]
    while node.kind is OpKind.VIEW or node.op == "cast":
        if node.dtype == dtype:
            return True
        node = spec.nodes[node.inputs[0]]
    return node.dtype == dtype
