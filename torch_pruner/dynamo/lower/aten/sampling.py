"""Values at computed positions between elements: ``grid_sample`` of images and volumes.

A position names a few neighbouring elements and their weights. Whatever is read is read as a row of
all channels, since those of one position share all of the arithmetic.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.aten.registry import OpCall, rule
from torch_pruner.dynamo.lower.aten.rejection import arguments
from torch_pruner.dynamo.lower.aten.value import Value, iota

if TYPE_CHECKING:
    from collections.abc import Callable

    Padded = Callable[[Value], Value]
    Neighbour = tuple[Value, Value | None]  # a place along an axis, whole but a float; its weight

aten = torch.ops.aten

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
_CUBIC_A = -0.75


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    _call: OpCall, x: Value, grid: Value, interpolation: int, padding: int, align_corners: bool
) -> Value:
    """``grid``: (images, *positions, axes), the last axis of ``x`` first, from -1 to 1."""
    if x.dtype != "float32" or grid.dtype != "float32":
        raise arguments("grid_sample of other than float32")
    if x.fake is None or x.fake.stride(1) != 1:
        raise arguments("grid_sample of channels that lie apart, which eager reads faster")
    spatial, axes = x.shape[2:], grid.ndim - 2
    choices = []
    for k, size in enumerate(spatial):
        at = _elements(grid.select(grid.ndim - 1, axes - 1 - k), size, align_corners)
        choices.append(_neighbours(at, interpolation, _padding(size, padding, align_corners)))
    rows = x.permute([0, *range(2, x.ndim), 1]).reshape((_rows(x), x.shape[1]))
    image = iota(x.builder, x.shape[0]).reshape((x.shape[0], *[1] * axes))
    total: Value | None = None
    for corner in itertools.product(*choices):
        term = _read(rows, image, corner, spatial)
        total = term if total is None else total + term
    assert total is not None
    return total.moved(total.ndim - 1, 1)


def _rows(x: Value) -> int:
    return x.shape[0] * math.prod(x.shape[2:])


def _elements(coordinate: Value, size: int, align_corners: bool) -> Value:
    """From -1 to 1 to places of elements, which are at whole numbers."""
    if align_corners:
        return (coordinate + 1.0) / 2.0 * float(size - 1)
    return ((coordinate + 1.0) * float(size) - 1.0) / 2.0


def _padding(size: int, padding: int, align_corners: bool) -> Padded:
    """What a place outside stands for; zeros are seen to when elements are read."""

    def border(at: Value) -> Value:  # of what is no number: the first element
        return (at > 0.0).where(at, 0.0).minimum(float(size - 1))

    def reflection(at: Value) -> Value:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span == 0:
            return border(at)
        away = (at - low).apply("abs")
        times, rest = (away / span).apply("floor"), away.apply("fmod", span)
        even = times.apply("fmod", 2.0).equals(0.0)
        return border(even.where(rest + low, (span - rest) + low))

    return {_ZEROS: lambda at: at, _BORDER: border, _REFLECTION: reflection}[padding]


def _neighbours(at: Value, interpolation: int, padded: Padded) -> list[Neighbour]:
    """The places along an axis that a result is made of."""
    if interpolation == _NEAREST:
        return [(padded(at).apply("round"), None)]
    if interpolation == _LINEAR:
        inside = padded(at)
        low = inside.apply("floor")
        share = inside - low
        return [(low, 1.0 - share), (low + 1.0, share)]
    low = at.apply("floor")
    share = at - low
    weights = (
        _far(share + 1.0), _near(share), _near(1.0 - share), _far(2.0 - share),
    )  # fmt: skip
    return [(padded(low + float(j - 1)), weight) for j, weight in enumerate(weights)]


def _near(t: Value) -> Value:
    """The weight of an element at a distance of up to one (cubic convolution)."""
    return ((_CUBIC_A + 2) * t - (_CUBIC_A + 3)) * t * t + 1.0


def _far(t: Value) -> Value:
    """And of one to two."""
    return ((_CUBIC_A * t - 5 * _CUBIC_A) * t + 8 * _CUBIC_A) * t - 4 * _CUBIC_A


def _read(
    rows: Value, image: Value, corner: tuple[Neighbour, ...], spatial: tuple[int, ...]
) -> Value:
    """Channels of one neighbour of each position, times its weight: nothing where it is outside."""
    inside: Value | None = None
    weight: Value | None = None
    for (place, share), size in zip(corner, spatial, strict=True):
        within = (place >= 0.0) & (place <= float(size - 1))
        inside = within if inside is None else inside & within
        if share is not None:
            weight = share if weight is None else weight * share
    assert inside is not None
    flat = image
    for (place, _), size in zip(corner, spatial, strict=True):
        flat = flat * size + inside.where(place, 0.0).cast("int64")
    found = rows.take(0, flat)
    shown = inside.unsqueeze(inside.ndim).where(found, 0.0)
    return shown if weight is None else shown * weight.unsqueeze(weight.ndim)
