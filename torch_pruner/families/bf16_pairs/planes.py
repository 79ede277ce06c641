"""How positions of a convolution's input lie for the gradient of its weights.

``dw[c, t, o] = sum over images and positions p of x[c, n, p * stride + t * dilation - lo] g[n, p,
o]``. Each channel of the input is a plane: all images one after another, padded, so that one number
says where a position is, and another how far a tap is from it. Where the convolution had a stride,
positions modulo it (phases) have planes of their own. Or each tap has planes of its own, which
need no padding: of small images that is much of a plane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.graph.ir import Shape

_LINE = 32  # elements of a line of the cache


@dataclass(frozen=True, slots=True)
class Planes:
    """Geometry of the copied input; shapes are by spatial dimension."""

    images: int
    phases: Shape  # that taps read, or taps that have planes of their own
    apart: Shape  # positions of the input from a phase, or such a tap, to the next
    alone: bool  # whether taps have planes of their own
    extent: Shape  # positions of an image in a plane
    depth: int  # positions of all images, padded to whole steps
    length: int  # of a plane: as many more as the furthest tap is away
    row: int  # elements from a channel to the next: an odd number of the cache's lines

    @property
    def pitch(self) -> Shape:
        """Distance of neighbours, by dimension."""
        return tuple(math.prod(self.extent[d + 1 :]) for d in range(len(self.extent)))


def planes_of(con: Contraction, step: int, *, alone: bool) -> Planes:
    """The planes for a reduction in steps of ``step`` positions, an even number."""
    conv = con.conv
    assert conv is not None
    taps, positions, images = con.m[1:], con.k[:-1], con.k[-1]
    # The gradient's dilation is the stride of its convolution, and the other way round.
    dims = zip(taps, conv.stride, conv.dilation, strict=True)
    far = [[divmod(t * d, s) for t in range(n)] for n, d, s in dims]
    reach = [0 if alone else max(q for q, _ in each) for each in far]
    phases = taps if alone else tuple(max(r for _, r in each) + 1 for each in far)
    apart = conv.stride if alone else (1,) * len(taps)
    extent = [p + r for p, r in zip(positions, reach, strict=True)]
    extent[-1] += extent[-1] % 2  # no pair is of two lines
    depth = -(-images * math.prod(extent) // step) * step
    found = Planes(images, phases, apart, alone, tuple(extent), depth, 0, 0)
    beyond = sum(r * p for r, p in zip(reach, found.pitch, strict=True))
    length = -(-(depth + beyond) // _LINE) * _LINE
    lines = math.prod(phases) * length // _LINE
    return replace(found, length=length, row=(lines + 1 - lines % 2) * _LINE)
