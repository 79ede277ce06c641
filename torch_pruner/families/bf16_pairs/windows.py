"""The copy of a convolution's input whose windows are read: padded, channels last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Expr, ForKind, Stmt, T, loop, seq, when
from torch_pruner.codegen.tir.reader import imm, linear, unlinear
from torch_pruner.families.bf16_pairs.form import LINES
from torch_pruner.families.bf16_pairs.rows import line_of, zeros

if TYPE_CHECKING:
    from torch_pruner.families.bf16_pairs.nest import PairNest


def pad(nest: PairNest, kind: ForKind) -> Stmt:
    """The input with its padding, and with zeros between elements that are dilated."""
    con, conv, shape = nest.con, nest.con.conv, nest.form.copy
    assert conv is not None
    lines, (width, channels) = shape[:-2], shape[-2:]
    extents = nest.spec.nodes[con.a].shape[2:]

    def line(p: Expr) -> Stmt:
        image, *outer = unlinear(p, lines)

        def point(x: Expr) -> Stmt:
            inside, at = [], []
            places = zip((*outer, x), conv.lo, conv.dilate_input, extents, conv.padded, strict=True)
            for place, lo, apart, size, padded in places:
                shifted = place - lo
                if lo > 0:
                    inside.append(shifted >= 0)
                if padded - lo > (size - 1) * apart + 1:
                    inside.append(shifted < (size - 1) * apart + 1)
                if apart != 1:
                    inside.append(T.floormod(shifted, apart) == 0)
                at.append(T.floordiv(shifted, apart) if apart != 1 else shifted)
            base = linear((image, *outer, x, imm(0)), shape)
            read = line_of(nest, base, channels, lambda c: (image, c, *at))
            return when(T.all(*inside), read, zeros(nest, base, channels)) if inside else read

        return loop(width, point, name="x")

    copied = loop(math.prod(lines), line, kind, name="line")
    if nest.form.way != LINES:
        return copied
    # What is behind the copy meets weights that are zero, so it has to be a number.
    return seq([zeros(nest, imm(math.prod(shape)), nest.form.inner), copied])
