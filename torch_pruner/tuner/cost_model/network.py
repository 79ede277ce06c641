"""The pattern-aware network in numpy, forward and backward: features in, one score per point out.

Statement features go through two layers, tokens through one block of attention with roles,
positions and a mask; a head joins both. Written by hand because tuning runs inside somebody's
``torch.compile``: torch's random state, default device, autocast, threads and tracing are not ours
to touch there. The type of the parameters (single precision, but for tests) is the type of
everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.layers import (
    Attention,
    affine,
    affine_back,
    normalise,
    normalise_back,
    size_of,
    views,
    whole_blocks,
)
from torch_pruner.tuner.cost_model.pattern import MAX_TOKENS, N_ROLES, STATEMENT, TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from torch_pruner.tuner.cost_model.layers import Numbers

WIDTH, HEADS, HIDDEN = 32, 2, 64

SHAPES: Mapping[str, tuple[int, ...]] = {
    "token.weight": (TOKEN, WIDTH),
    "token.bias": (WIDTH,),
    "role": (N_ROLES, WIDTH),
    "position": (MAX_TOKENS, WIDTH),
    "qkv.weight": (WIDTH, 3 * WIDTH),
    "qkv.bias": (3 * WIDTH,),
    "mix.weight": (WIDTH, WIDTH),
    "mix.bias": (WIDTH,),
    "up.weight": (WIDTH, WIDTH),
    "up.bias": (WIDTH,),
    "down.weight": (WIDTH, WIDTH),
    "down.bias": (WIDTH,),
    "statement1.weight": (STATEMENT, HIDDEN),
    "statement1.bias": (HIDDEN,),
    "statement2.weight": (HIDDEN, WIDTH),
    "statement2.bias": (WIDTH,),
    "head1.weight": (2 * WIDTH, HIDDEN),
    "head1.bias": (HIDDEN,),
    "head2.weight": (HIDDEN, 1),
}
SIZE = size_of(SHAPES)


@dataclass(frozen=True, slots=True)
class Batch:
    """Scaled features: statement (b, STATEMENT), tokens (b, t, TOKEN), roles and mask (b, t)."""

    statement: Numbers
    tokens: Numbers
    roles: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]


def named(flat: Numbers) -> dict[str, Numbers]:
    """The parameters in ``flat`` (SIZE,) by name, as views."""
    return views(flat, SHAPES)


def initial(rng: np.random.Generator, dtype: str = "float32") -> Numbers:
    """Parameters to start from. The last layer is zero: an untrained network corrects nothing."""
    flat = np.zeros(SIZE, dtype)
    for name, view in named(flat).items():
        if name in ("role", "position"):
            view[...] = 0.1 * rng.standard_normal(view.shape)
        elif name.endswith("weight") and name != "head2.weight":
            view[...] = rng.standard_normal(view.shape) * np.sqrt(1.0 / view.shape[0])
    return flat


def forward(flat: Numbers, batch: Batch) -> Numbers:
    """Scores (b,)."""
    n = len(batch.statement)
    rows = whole_blocks(n)  # the rest is left out again
    whole = Batch(batch.statement[rows], batch.tokens[rows], batch.roles[rows], batch.mask[rows])
    return Pass(named(flat), whole).score[:n]


class Pass:
    """One forward pass over a multiple of ROWS items, and what its backward pass needs."""

    def __init__(self, p: Mapping[str, Numbers], batch: Batch) -> None:
        self.p, self.batch = p, batch
        t, mask = batch.roles.shape[1], batch.mask
        kind = p["role"].dtype
        start = affine("token", batch.tokens.astype(kind), p)
        start += p["role"][batch.roles] + p["position"][:t]
        self.n1, self.d1 = normalise(start)
        self.attention = Attention(self.n1, mask, p, HEADS)
        middle = start + self.attention.out
        self.n2, self.d2 = normalise(middle)
        self.up = np.maximum(affine("up", self.n2, p), 0.0)
        self.n3, self.d3 = normalise(middle + affine("down", self.up, p))
        self.share = (mask / mask.sum(axis=1, keepdims=True)).astype(kind)
        pooled = (self.n3 * self.share[:, :, None]).sum(axis=1)

        self.statement = batch.statement.astype(kind)
        self.s1 = np.maximum(affine("statement1", self.statement, p), 0.0)
        self.s2 = np.maximum(affine("statement2", self.s1, p), 0.0)
        self.joined = np.concatenate([self.s2, pooled], axis=1)
        self.h = np.maximum(affine("head1", self.joined, p), 0.0)
        self.score: Numbers = (self.h * p["head2.weight"][:, 0]).sum(axis=1)

    def backward(self, of_scores: Numbers, g: Mapping[str, Numbers]) -> None:
        """Add d loss / d parameters to ``g``, given d loss / d scores (b,)."""
        p, batch = self.p, self.batch
        t = batch.roles.shape[1]
        kind = p["role"].dtype
        last = of_scores.astype(kind)[:, None]
        g["head2.weight"][:, 0] += (self.h * last).sum(axis=0)
        dh = last * p["head2.weight"][:, 0] * (self.h > 0)
        joined = affine_back("head1", self.joined, dh, p, g)
        ds2 = joined[:, :WIDTH] * (self.s2 > 0)
        ds1 = affine_back("statement2", self.s1, ds2, p, g) * (self.s1 > 0)
        affine_back("statement1", self.statement, ds1, p, g, inner=False)

        dn3 = joined[:, None, WIDTH:] * self.share[:, :, None]
        end = normalise_back(dn3, self.n3, self.d3)
        dup = affine_back("down", self.up, end, p, g) * (self.up > 0)
        middle = end + normalise_back(affine_back("up", self.n2, dup, p, g), self.n2, self.d2)
        dn1 = self.attention.backward(middle, p, g)
        start = middle + normalise_back(dn1, self.n1, self.d1)
        affine_back("token", batch.tokens.astype(kind), start, p, g, inner=False)
        g["position"][:t] += start.sum(axis=0)
        for role in range(N_ROLES):
            g["role"][role] += start[batch.roles == role].sum(axis=0)
