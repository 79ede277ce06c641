"""Classification losses, and their gradients as a comparison with the class, without a scatter."""

from __future__ import annotations

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.value import Value, iota

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


def _classes(call: OpCall, x: Value, target: Value, ignore_index: int) -> tuple[Value, Value]:
    """Which targets count, and the targets, 0 in place of others, as positions along the axis of
    classes; eager raises for those that are no class."""
    axis = 0 if x.ndim == 1 else 1
    counts = target.differs(ignore_index)
    kept = counts.where(target, 0)
    call.demand_index(kept, x.shape, axis, "nll_loss")
    return counts, kept.reshape((*x.shape[:axis], 1, *x.shape[axis + 1 :]))


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    call: OpCall,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Value, Value]:
    axis = 0 if x.ndim == 1 else 1
    counts, labels = _classes(call, x, target, ignore_index)

    def chosen(of: Value) -> Value:
        """What ``of`` has for the class of each target."""
        ids = of.builder.append("gather", (of.id, labels.id), labels.shape, of.dtype, dim=axis)
        return Value(of.builder, ids).reshape(target.shape)

    wide = x.widened()
    shares: Value | None = None
    if weight is not None:
        along = [weight.shape[0] if d == axis else 1 for d in range(x.ndim)]
        shares = weight.cast(wide.dtype).reshape(along)
        wide = wide * shares
    losses = counts.where(-chosen(wide), 0.0)
    if reduction not in (_MEAN, _SUM) and x.ndim > 1:
        return losses, wide.const(0)
    every = range(losses.ndim)
    if shares is None:
        total = counts.cast("int64").sum(every).cast(wide.dtype)
    else:
        total = counts.where(chosen(shares.broadcast(x.shape)), 0.0).sum(every)
    if reduction == _MEAN:
        return losses.sum(every) / total, total
    return (losses.sum(every) if reduction == _SUM else losses), total


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    call: OpCall,
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
    _classes(call, x, target, ignore_index)
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
