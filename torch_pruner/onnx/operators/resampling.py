"""Images at other sizes and places: Resize, GridSample, RoiAlign, Col2Im."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.operators.registry import OperatorCall, Tensor, in_range, op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Array = np.ndarray[Any, Any]


@op("Upsample")
def _upsample(n: OperatorCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    scales = n.attr("scales") if n.opset < 9 else np.asarray(n.host(1)).tolist()
    mode = n.attr("mode", "nearest")
    for axis, scale in enumerate(scales):
        size = math.floor(x.shape[axis] * scale)
        n.afford(8 * size)
        place = np.arange(size) / scale
        kind = "linear" if mode == "linear" else "nearest"
        x = _taken(n, x, axis, place, kind, "floor", -0.75)
    return x


@op("Resize")
def _resize(n: OperatorCall, x: Tensor, *_: Tensor | None) -> Tensor:
    first = 1 if n.opset >= 11 else -1
    scales = n.host(2 if first == 1 else 1)
    sizes = n.ints(3) if first == 1 else None
    region = n.host(1) if first == 1 else None
    axes = n.attr("axes")
    axes = list(range(x.dim())) if axes is None else [in_range(a, x.dim()) for a in axes]
    if sizes:
        factors, sizes = _keeping_ratio(n, x, axes, sizes)
    else:
        factors = [float(s) for s in np.asarray(scales).reshape(-1)]
        sizes = [math.floor(x.shape[a] * f) for a, f in zip(axes, factors, strict=True)]
    whole = x
    integer = not x.is_floating_point()
    whole = whole.float() if integer and n.attr("mode", "nearest") != "nearest" else whole
    for k, (axis, factor, size) in enumerate(zip(axes, factors, sizes, strict=True)):
        if factor == 1.0 and size == x.shape[axis] and region is None:
            continue
        bounds = None
        if n.attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
            assert region is not None
            bounds = float(region[k]), float(region[k + len(axes)])
        whole = _resized(n, whole, axis, factor, size, bounds)
    return whole.round().to(x.dtype) if integer and whole.is_floating_point() else whole


def _keeping_ratio(
    n: OperatorCall, x: Tensor, axes: list[int], sizes: list[int]
) -> tuple[list[float], list[int]]:
    factors = [s / x.shape[a] for a, s in zip(axes, sizes, strict=True)]
    policy = n.attr("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        common = min(factors) if policy == "not_larger" else max(factors)
        factors = [common] * len(factors)
        sizes = [math.floor(x.shape[a] * common + 0.5) for a in axes]
    return factors, sizes


def _resized(
    n: OperatorCall,
    x: Tensor,
    axis: int,
    factor: float,
    size: int,
    bounds: tuple[float, float] | None,
) -> Tensor:
    length = x.shape[axis]
    n.afford(8 * size)
    out = np.arange(size, dtype=np.float64)
    how = n.attr("coordinate_transformation_mode", "half_pixel" if n.opset >= 11 else "asymmetric")
    if how == "align_corners":
        span = factor * length - 1  # not of the rounded size
        place = out * (length - 1) / span if span > 0 else out * 0
    elif how == "asymmetric":
        place = out / factor
    elif how == "pytorch_half_pixel":
        place = (out + 0.5) / factor - 0.5 if size > 1 else out * 0
    elif how == "tf_half_pixel_for_nn":
        place = (out + 0.5) / factor
    elif how == "half_pixel_symmetric":
        adjusted = size / (factor * length)
        centre = length / 2
        place = centre * (1 - adjusted) + (out + 0.5) / factor - 0.5
    elif bounds is not None:
        begin, end = bounds
        if size > 1:
            place = begin * (length - 1) + out * (end - begin) * (length - 1) / (size - 1)
        else:
            place = out * 0 + 0.5 * (begin + end) * (length - 1)
    else:
        place = (out + 0.5) / factor - 0.5
    result = _taken(
        n,
        x,
        axis,
        place,
        n.attr("mode", "nearest"),
        n.attr("nearest_mode", "round_prefer_floor" if n.opset >= 11 else "floor"),
        n.attr("cubic_coeff_a", -0.75),
        antialias=factor if n.attr("antialias", 0) and factor < 1 else 1.0,
        outside=bool(n.attr("exclude_outside", 0)),
    )
    if bounds is None:
        return result
    beyond = torch.from_numpy((place < 0) | (place > length - 1))
    shape = [1] * x.dim()
    shape[axis] = -1
    fill = torch.full((), n.attr("extrapolation_value", 0.0), dtype=result.dtype)
    return torch.where(beyond.reshape(shape), fill, result)


_ROUNDINGS: Mapping[str, Callable[[Array], Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_ceil": lambda p: np.floor(p + 0.5),
    "round_prefer_floor": lambda p: np.ceil(p - 0.5),
}


def _taken(
    n: OperatorCall,
    x: Tensor,
    axis: int,
    place: Array,
    mode: str,
    nearest: str,
    cubic: float,
    *,
    antialias: float = 1.0,
    outside: bool = False,
) -> Tensor:
    """Values of ``x`` along an axis at fractional places."""
    length = x.shape[axis]
    if mode == "nearest":
        where = _ROUNDINGS[nearest](place).clip(0, length - 1).astype(np.int64)
        return x.index_select(axis, torch.from_numpy(where))
    half = {"linear": 1, "cubic": 2}[mode]
    reach = math.ceil(half / antialias)
    n.afford(8 * len(place) * max(length, 2 * reach))
    base = np.floor(place)
    offsets = np.arange(-reach + 1, reach + 1)
    where = base[:, None] + offsets[None, :]
    away = (where - place[:, None]) * antialias
    weight = np.maximum(1 - np.abs(away), 0) if mode == "linear" else _cubic(np.abs(away), cubic)
    if outside:
        weight = np.where((where < 0) | (where > length - 1), 0.0, weight)
    if outside or antialias < 1:
        weight = weight / weight.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(place), length))
    rows = np.broadcast_to(np.arange(len(place))[:, None], where.shape)
    np.add.at(matrix, (rows, where.clip(0, length - 1).astype(np.int64)), weight)
    product = torch.from_numpy(matrix).to(x.dtype)
    return torch.tensordot(x, product, dims=([axis], [1])).movedim(-1, axis)


def _cubic(t: Array, a: float) -> Array:
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


@op("GridSample")
def _grid_sample(n: OperatorCall, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        n.attr("mode", "linear"), n.attr("mode", "linear")
    )
    return F.grid_sample(
        x,
        grid.to(x.dtype),
        mode=mode,
        padding_mode=n.attr("padding_mode", "zeros"),
        align_corners=bool(n.attr("align_corners", 0)),
    )


@op("RoiAlign")
def _roi_align(n: OperatorCall, x: Tensor, rois: Tensor, batch: Tensor) -> Tensor:
    if n.attr("mode", "avg") != "avg":  # ONNX means the largest of weighted corners
        raise UnsupportedModel("RoiAlign", "of the largest value", "")
    height, width = n.attr("output_height", 1), n.attr("output_width", 1)
    ratio, scale = n.attr("sampling_ratio", 0), n.attr("spatial_scale", 1.0)
    half = 0.5 if n.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel" else 0.0
    boxes = np.asarray(n.host(1), dtype=np.float64) * scale - half
    which = np.asarray(n.host(2)).astype(int)
    results = []
    for box, image in zip(boxes, which, strict=True):
        x1, y1, x2, y2 = box
        w, h = x2 - x1, y2 - y1
        if not half:
            w, h = max(w, 1.0), max(h, 1.0)
        down = ratio or math.ceil(h / height)
        across = ratio or math.ceil(w / width)
        n.afford(8 * (height * down * x.shape[2] + width * across * x.shape[3]))
        n.afford(x.element_size() * x.shape[1] * height * down * width * across)
        ys = y1 + (np.arange(height * down) + 0.5) * h / (height * down)
        xs = x1 + (np.arange(width * across) + 0.5) * w / (width * across)
        points = _bilinear(x[image], ys, xs)
        cells = points.reshape(-1, height, down, width, across).permute(0, 1, 3, 2, 4)
        results.append(cells.reshape(-1, height, width, down * across).mean(-1))
    shape = (0, x.shape[1], height, width)
    return torch.stack(results) if results else torch.zeros(shape, dtype=x.dtype)


def _bilinear(image: Tensor, ys: Array, xs: Array) -> Tensor:
    """``image`` (c, h, w) at all pairs of places; zero far outside."""

    def matrix(places: Array, length: int) -> Tensor:
        inside = (places >= -1) & (places <= length)
        p = places.clip(0, length - 1)
        low = np.floor(p).astype(int)
        high = np.minimum(low + 1, length - 1)
        made = np.zeros((len(places), length))
        rows = np.arange(len(places))
        np.add.at(made, (rows, low), np.where(inside, 1 - (p - low), 0))
        np.add.at(made, (rows, high), np.where(inside, p - low, 0))
        return torch.from_numpy(made).to(image.dtype)

    return matrix(ys, image.shape[1]) @ image @ matrix(xs, image.shape[2]).T


@op("Col2Im")
def _col2im(n: OperatorCall, x: Tensor, *_: Tensor) -> Tensor:
    size, block = n.ints(1) or [], n.ints(2) or []
    rank = len(size)
    pads: list[int] = n.attr("pads") or [0] * (2 * rank)
    dilation, stride = n.attr("dilations") or [1] * rank, n.attr("strides") or [1] * rank
    grown = [s + pads[k] + pads[k + rank] for k, s in enumerate(size)]
    steps = [
        (g - d * (b - 1) - 1) // s + 1
        for g, d, b, s in zip(grown, dilation, block, stride, strict=True)
    ]
    batch, channels = x.shape[0], x.shape[1] // math.prod(block)
    where = torch.zeros((1, 1), dtype=torch.int64)
    for g, d, b, s, t in zip(grown, dilation, block, stride, steps, strict=True):
        line = torch.arange(b)[:, None] * d + torch.arange(t)[None, :] * s
        where = (where[:, None, :, None] * g + line[None, :, None, :]).reshape(
            where.shape[0] * b, where.shape[1] * t
        )
    flat = torch.zeros(batch, channels, math.prod(grown), dtype=x.dtype)
    values = x.reshape(batch, channels, -1)
    flat = flat.scatter_add(2, where.reshape(1, 1, -1).expand_as(values), values)
    result = flat.reshape(batch, channels, *grown)
    for k, s in enumerate(size):
        result = result.narrow(2 + k, pads[k], s)
    return result


@op("NonMaxSuppression")
def _non_max_suppression(
    n: OperatorCall, boxes: Tensor, scores: Tensor, *_: Tensor | None
) -> Tensor:
    most, overlap = int(n.scalar(2, 0)), float(n.scalar(3, 0.0))
    least = n.scalar(4)
    corners = np.asarray(n.host(0), dtype=np.float64)
    if n.attr("center_point_box", 0):
        centre, half = corners[..., :2], corners[..., 2:] / 2
        corners = np.concatenate([centre - half, centre + half], axis=-1)
    low = np.minimum(corners[..., :2], corners[..., 2:])
    high = np.maximum(corners[..., :2], corners[..., 2:])
    values = np.asarray(n.host(1))
    chosen: list[tuple[int, int, int]] = []
    for batch in range(values.shape[0]):
        for kind in range(values.shape[1]):
            kept: list[int] = []
            for k in np.argsort(-values[batch, kind], kind="stable"):
                if len(kept) >= most or (least is not None and values[batch, kind, k] <= least):
                    break
                if (_overlaps(low[batch], high[batch], k, kept) <= overlap).all():
                    kept.append(int(k))
            chosen += [(batch, kind, k) for k in kept]
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, 3)


def _overlaps(low: Array, high: Array, a: int, others: list[int]) -> Array:
    """Intersection over union of one box with others."""
    sides = np.minimum(high[a], high[others]) - np.maximum(low[a], low[others])
    common = np.maximum(sides, 0.0).prod(axis=-1)
    areas = (high[a] - low[a]).prod() + (high[others] - low[others]).prod(axis=-1)
    return np.divide(common, areas - common, out=np.zeros_like(common), where=common > 0)
