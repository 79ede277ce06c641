"""Gradients of classification losses, as a comparison with the class instead of a scatter."""

from __future__ import annotations

import torch

from torch_pruner.dynamo.aten.registry import Call, rule
from torch_pruner.dynamo.aten.value import Value, iota

aten = torch.ops.aten

_MEAN = 1


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    _call: Call,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    wide = grad.widened()
    axis = 0 if x.ndim == 1 else 1
    classes = iota(x.builder, x.shape[axis])
    classes = classes.reshape([classes.shape[0] if d == axis else 1 for d in range(x.ndim)])
    labels = target.reshape((*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    hit = classes.cast(labels.dtype).equals(labels) & labels.differs(ignore_index)
    share = -wide
    if reduction == _MEAN:
        share = share / total_weight.cast(wide.dtype)
    if share.ndim:
        share = share.reshape(labels.shape)
    if weight is not None:
        share = share * weight.cast(wide.dtype).reshape(classes.shape)
    return hit.where(share, 0.0)
