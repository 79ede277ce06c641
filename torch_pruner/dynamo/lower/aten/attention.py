"""Scaled dot-product attention, forward and backward, from matrix products and a softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import RejectionKind, Unsupported

if TYPE_CHECKING:
    from torch_pruner.dynamo.lower.aten.value import Value

aten = torch.ops.aten


def _scale(q: Value, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _repeated(x: Value, heads: int) -> Value:
    """Key or value heads repeated to the number of query heads."""
    batch, own, length, width = x.shape
    if own == heads:
        return x
    times = heads // own
    wide = x.unsqueeze(2).broadcast((batch, own, times, length, width))
    return wide.reshape((batch, heads, length, width))


def _scores(
    call: OpCall, q: Value, k: Value, mask: Value | None, causal: bool, scale: float | None
) -> Value:
    """Scaled and masked products of queries and keys, in the accumulator's dtype."""
    out = q.matmul(k.swapped(), q.widened().dtype) * _scale(q, scale)
    if mask is not None and mask.dtype == "bool":
        out = mask.where(out, -math.inf)
    elif mask is not None:
        out = out + mask.cast(out.dtype)
    if causal:
        pairs = out.shape[-2:]
        visible = call.iota(pairs, 1) <= call.iota(pairs, 0)
        out = visible.where(out, -math.inf)
    return out


def _attention(
    call: OpCall,
    q: Value,
    k: Value,
    v: Value,
    dropout: float,
    causal: bool,
    mask: Value | None,
    scale: float | None,
) -> tuple[Value, Value]:
    """Output and log-sum-exp of the scores. Rows that see nothing give zeros."""
    if dropout:
        raise Unsupported(RejectionKind.RANDOM, "attention with dropout draws random numbers")
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    scores = _scores(call, q, k, mask, causal, scale)
    axis = scores.ndim - 1
    top = scores.reduce("max", (axis,), keepdim=True)
    if mask is not None:
        top = top.equals(-math.inf).where(0.0, top)
    powers = (scores - top).apply("exp")
    total = powers.sum((axis,), keepdim=True)
    logsumexp = (total.apply("log") + top).reshape(scores.shape[:-1])
    if mask is not None:
        total = total.equals(0.0).where(1.0, total)
    weights = (powers / total).cast(v.dtype)
    return weights.matmul(v), logsumexp


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_cpu(
    call: OpCall,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value]:
    return _attention(call, q, k, v, dropout_p, is_causal, attn_mask, scale)


@rule(aten.scaled_dot_product_attention.default)
def attention(
    call: OpCall,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    del enable_gqa
    if q.ndim != 4:
        raise Unsupported(RejectionKind.ARGUMENTS, "attention of other than 4-d tensors")
    return _attention(call, q, k, v, dropout_p, is_causal, attn_mask, scale)[0]


@rule(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    call: OpCall,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    del compute_log_sumexp
    _only_output(call)
    out, _ = _attention(call, q, k, v, dropout_p, is_causal, attn_bias, scale)
    return out, None, None, None


@rule(aten._scaled_dot_product_flash_attention.default)
def flash_attention(
    call: OpCall,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    del return_debug_mask
    _only_output(call)
    out, _ = _attention(call, q, k, v, dropout_p, is_causal, None, scale)
    return out, *[None] * (len(call.outputs) - 1)


@rule(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(
    call: OpCall,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    del compute_log_sumexp, return_debug_mask
    _only_output(call)
    out, _ = _attention(call, q, k, v, dropout_p, is_causal, attn_bias, scale)
    return out, *[None] * (len(call.outputs) - 1)


def _only_output(call: OpCall) -> None:
    if call.used - {0}:
        raise Unsupported(
            RejectionKind.ARGUMENTS, "attention whose random state or log-sum-exp is used"
        )


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_cpu_backward(
    call: OpCall,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    logsumexp: Value,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, ...]:
    if dropout_p:
        raise Unsupported(RejectionKind.RANDOM, "attention with dropout draws random numbers")
    if k.shape[1] != q.shape[1]:
        raise Unsupported(RejectionKind.ARGUMENTS, "gradient of grouped-query attention")
    scores = _scores(call, q, k, attn_mask, is_causal, scale)
    row = logsumexp.cast(scores.dtype).unsqueeze(3)
    row = row.apply("isinf", dtype="bool").where(0.0, row)
    weights = (scores - row).apply("exp")
    dtype, wide = v.dtype, scores.dtype
    into_v = weights.cast(dtype).swapped().matmul(grad, wide)
    along = grad.matmul(v.swapped(), wide)
    delta = (grad.widened() * out.widened()).sum((3,), keepdim=True)
    into_scores = (weights * (along - delta) * _scale(q, scale)).cast(dtype)
    into_q = into_scores.matmul(k, wide)
    into_k = into_scores.swapped().matmul(q, wide)
    return into_q, into_k, into_v
