"""Attention and rotary embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from torch_pruner.onnx.operators.registry import OperatorCall, Result, Tensor, op


@op("RotaryEmbedding")
def _rotary(
    n: OperatorCall, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> Tensor:
    flat = x.dim() == 3
    heads = n.attr("num_heads", 0)
    value = x
    if flat:  # (batch, sequence, hidden)
        value = x.reshape(x.shape[0], x.shape[1], heads, -1).permute(0, 2, 1, 3)
    size = value.shape[-1]
    turned = n.attr("rotary_embedding_dim", 0) or size
    part, rest = value[..., :turned], value[..., turned:]
    if positions is not None:
        cos, sin = cos[positions.to(torch.int64)], sin[positions.to(torch.int64)]
    cos, sin = (t[..., : turned // 2].unsqueeze(1) for t in (cos, sin))
    if n.attr("interleaved", 0):
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part[..., : turned // 2], part[..., turned // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if n.attr("interleaved", 0):
        made = torch.stack([real, imaginary], dim=-1).reshape(part.shape)
    else:
        made = torch.cat([real, imaginary], dim=-1)
    result = torch.cat([made, rest], dim=-1)
    return result.permute(0, 2, 1, 3).reshape(x.shape) if flat else result


@op("Attention")
def _attention(
    n: OperatorCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Result:
    flat = q.dim() == 3
    if flat:
        heads, others = n.attr("q_num_heads"), n.attr("kv_num_heads")
        q = q.reshape(q.shape[0], q.shape[1], heads, -1).permute(0, 2, 1, 3)
        k, v = (t.reshape(t.shape[0], t.shape[1], others, -1).permute(0, 2, 1, 3) for t in (k, v))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], dim=2), torch.cat([past_value, v], dim=2)
    present = k, v
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
    scale = n.attr("scale") or 1.0 / math.sqrt(q.shape[-1])
    root = math.sqrt(scale)
    scores = torch.matmul(q * root, (k * root).transpose(-1, -2))
    bias = _attention_bias(n, scores, mask, past_key, lengths)
    cap = n.attr("softcap", 0.0)
    capped = cap * torch.tanh(scores / cap) if cap else scores
    final = capped + bias if bias is not None else capped
    weights = torch.softmax(final.float(), dim=-1).to(q.dtype)
    # A query that sees no key at all gives zeros.
    blind = torch.isneginf(final).all(dim=-1, keepdim=True)
    weights = torch.where(blind, torch.zeros_like(weights), weights)
    result = torch.matmul(weights, v)
    if flat:
        result = result.permute(0, 2, 1, 3).reshape(result.shape[0], result.shape[2], -1)
    stages = scores, capped, final, weights
    return result, *present, stages[n.attr("qk_matmul_output_mode", 0)]


def _attention_bias(
    n: OperatorCall,
    scores: Tensor,
    mask: Tensor | None,
    past: Tensor | None,
    lengths: Tensor | None,
) -> Tensor | None:
    queries, keys = scores.shape[-2:]
    bias: Tensor | None = None
    low = float("-inf")
    if mask is not None:
        if mask.dtype == torch.bool:
            bias = torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, low)
        else:
            bias = mask
        if bias.shape[-1] < keys:
            bias = F.pad(bias, [0, keys - bias.shape[-1]], value=low)
    before, after = n.attr("left_window_size", -1), n.attr("right_window_size", -1)
    after = 0 if n.attr("is_causal", 0) else after
    if before >= 0 or after >= 0:
        place = torch.arange(queries)[:, None]
        if past is not None:
            place = place + past.shape[2]
        elif lengths is not None:  # of each row of the batch
            place = place + (lengths.to(torch.int64) - queries)[:, None, None, None]
        key = torch.arange(keys)[None, :]
        seen = torch.ones_like(key, dtype=torch.bool)
        seen = seen & (key >= place - before) if before >= 0 else seen
        seen = seen & (key <= place + after) if after >= 0 else seen
        band = torch.zeros(seen.shape, dtype=scores.dtype).masked_fill(~seen, low)
        bias = band if bias is None else bias + band
    if lengths is not None:
        seen = torch.arange(keys)[None, :] < lengths.to(torch.int64)[:, None]
        limit = torch.zeros(seen.shape, dtype=scores.dtype).masked_fill(~seen, low)
        limit = limit[:, None, None, :]
        bias = limit if bias is None else bias + limit
    return bias
