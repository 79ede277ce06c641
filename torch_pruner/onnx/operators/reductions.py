"""Sums and other things over axes, running sums, the largest few."""

from __future__ import annotations

import torch

from torch_pruner.onnx.operators.registry import OperatorCall, Result, Tensor, in_range, op, wide


def _axes(n: OperatorCall, rank: int) -> list[int] | None:
    """The axes, from the attribute of old opsets or from the second input; None: nothing to do."""
    since = 13 if n.op == "ReduceSum" else 18
    axes = n.ints(1) if n.opset >= since else n.attr("axes")
    if not axes:
        if n.attr("noop_with_empty_axes", 0):
            return None
        return list(range(rank))
    return [in_range(a, rank) for a in axes]


def _total(x: Tensor, axes: list[int]) -> Tensor:
    return x.sum(dim=axes, keepdim=True, dtype=x.dtype) if axes else x


def _extreme(x: Tensor, axes: list[int], *, largest: bool) -> Tensor:
    if not axes:
        return x
    if x.dtype == torch.bool:
        return _extreme(x.to(torch.uint8), axes, largest=largest).to(torch.bool)
    if any(x.shape[a] == 0 for a in axes):
        shape = [1 if a in axes else d for a, d in enumerate(x.shape)]
        if x.is_floating_point():
            return torch.full(shape, float("-inf" if largest else "inf"), dtype=x.dtype)
        limits = torch.iinfo(x.dtype)
        return torch.full(shape, limits.min if largest else limits.max, dtype=x.dtype)
    return x.amax(dim=axes, keepdim=True) if largest else x.amin(dim=axes, keepdim=True)


def _product(x: Tensor, axes: list[int]) -> Tensor:
    for a in axes:
        x = x.prod(dim=a, keepdim=True, dtype=x.dtype)
    return x


def _before(n: OperatorCall, x: Tensor) -> Tensor:
    """What is done to every element first."""
    if n.op == "ReduceL1":
        return x.abs()
    if n.op in ("ReduceL2", "ReduceSumSquare"):
        return x * x
    return x


def _reduced(n: OperatorCall, x: Tensor, axes: list[int]) -> Tensor:
    if n.op in ("ReduceMax", "ReduceMin"):
        return _extreme(x, axes, largest=n.op == "ReduceMax")
    if n.op == "ReduceProd":
        return _product(x, axes)
    if n.op == "ReduceLogSumExp":
        return torch.logsumexp(x, dim=axes, keepdim=True) if axes else x
    total = _total(_before(n, x), axes)
    if n.op == "ReduceMean":
        count = 1
        for a in axes:
            count *= x.shape[a]
        return (
            total / count
            if x.is_floating_point()
            else torch.div(total, count, rounding_mode="trunc")
        )
    if n.op == "ReduceL2":
        return (
            total.to(torch.float64).sqrt().to(x.dtype)
            if not x.is_floating_point()
            else total.sqrt()
        )
    return total.log() if n.op == "ReduceLogSum" else total


@op(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
def _reduce(n: OperatorCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    axes = _axes(n, x.dim())
    if axes is None:
        return _before(n, x).sqrt() if n.op == "ReduceL2" else (
            _before(n, x).log() if n.op == "ReduceLogSum" else _before(n, x).clone()
        )  # fmt: skip

    def reduce(_: OperatorCall, value: Tensor) -> Tensor:
        result = _reduced(n, value, axes)
        if n.attr("keepdims", 1):
            return result
        return result.reshape([d for a, d in enumerate(result.shape) if a not in axes])

    return wide(reduce)(n, x)


@op("ArgMax", "ArgMin")
def _arg(n: OperatorCall, x: Tensor) -> Tensor:
    axis, keep = in_range(n.attr("axis", 0), x.dim()), bool(n.attr("keepdims", 1))
    find = torch.argmax if n.op == "ArgMax" else torch.argmin
    if n.attr("select_last_index", 0):
        last = x.shape[axis] - 1
        return last - find(x.flip(axis), dim=axis, keepdim=keep)
    return find(x, dim=axis, keepdim=keep)


@op("CumSum", "CumProd")
def _running(n: OperatorCall, x: Tensor, _: Tensor) -> Tensor:
    axis = in_range(int(n.scalar(1)), x.dim())
    run = torch.cumsum if n.op == "CumSum" else torch.cumprod
    reverse = n.attr("reverse", 0)
    value = x.flip(axis) if reverse else x
    if n.attr("exclusive", 0):
        first = torch.full_like(value.narrow(axis, 0, 1), 0 if n.op == "CumSum" else 1)
        value = torch.cat([first, value.narrow(axis, 0, x.shape[axis] - 1)], dim=axis)
    result = run(value, dim=axis).to(x.dtype)
    return result.flip(axis) if reverse else result


@op("TopK")
def _top(n: OperatorCall, x: Tensor, _: Tensor) -> Result:
    count, axis = int(n.scalar(1)), in_range(n.attr("axis", -1), x.dim())
    largest = bool(n.attr("largest", 1))

    def find(_: OperatorCall, value: Tensor) -> Result:
        # Equal elements in order of their indices, which torch's own topk does not promise.
        order = torch.sort(value, dim=axis, descending=largest, stable=True)
        return order.values.narrow(axis, 0, count), order.indices.narrow(axis, 0, count)

    return wide(find)(n, x)
