"""Weights that are not constant, transformed at every call into the panels that products read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.operands import second_index
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    Stmt,
    buffer,
    loop,
    seq,
    stack,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.winograd.form import Winograd, places
from torch_pruner.families.winograd.transform import transformed

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

_CHANNELS = 16  # of a task, at most: their taps share lines of the cache


def pack_weights(
    spec: Graph,
    plan: Winograd,
    reader: Reader,
    panels: Buffer,
    width: tuple[int, int],
    kind: ForKind,
) -> Stmt:
    """Transform all weights into ``panels``, (group, panel, position, channel, column).

    ``width``: lanes of a vector and vectors of a panel.
    """
    con, (vl, nv) = plan.con, width
    assert con.conv is not None
    each, blocks = math.gcd(_CHANNELS, plan.channels), con.n // (vl * nv)
    shares = plan.channels // each
    taps = {place: k for k, place in enumerate(places(con.conv.kernel))}
    order = {place: k for k, place in enumerate(places(plan.tile))}

    def vector(nb: Expr, channel: Expr, j: Expr) -> Stmt:
        raw = buffer(len(taps) * vl, con.acc_dtype, "taps", scope="local")

        def fetch(place: Shape) -> Stmt:
            def element(v: Expr) -> Stmt:
                g, own = unlinear(nb, (plan.groups, blocks))
                column, k = (own * nv + j) * vl + v, (*map(imm, place), channel)
                value = reader.at(con.b, second_index(con, g, k, column))
                return store(raw, taps[place] * vl + v, value)

            return reader.scope(lambda: [loop(vl, element, VECTORIZED, "v")])

        def read(place: Shape, v: Expr) -> Expr:
            return raw[taps[place] * vl + v]

        def keep(place: Shape, v: Expr, value: Expr) -> Stmt:
            row = (nb * plan.positions + order[place]) * plan.channels + channel
            return store(panels, (row * nv + j) * vl + v, value)

        steps = transformed(vl, con.acc_dtype, plan.weight_transform(), read, keep)
        return seq([stack(raw), *map(fetch, taps), *steps])

    def share(p: Expr) -> Stmt:
        nb, at = unlinear(p, (plan.groups * blocks, shares))

        def channel(c: Expr) -> Stmt:
            return loop(nv, lambda j: vector(nb, at * each + c, j), UNROLLED, "j")

        return loop(each, channel, name="c")

    return loop(plan.groups * blocks * shares, share, kind, "p")
