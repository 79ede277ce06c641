"""The pattern-aware network in numpy, forward and backward: features in, one score per point out.

Statement features go through two layers, tokens through one block of attention with roles,
positions and a mask; a head joins both. Written by hand because tuning runs inside somebody's
``torch.compile``: torch's random state, default device, autocast, threads and tracing are not ours
to touch there. Products are done in blocks of as many rows, so a score does not depend on what else
is in the batch, and none is large enough for a threaded BLAS to start threads that the user did not
ask for. The type of the parameters (single precision, but for tests) is the type of everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.tuner.cost_model.pattern import MAX_TOKENS, N_ROLES, STATEMENT, TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping


Numbers = npt.NDArray[Any]  # of any floating type
WIDTH, HEADS, HIDDEN = 32, 2, 64
ROWS = 32  # of one block of a product: 32 x 75 x 64 stays below OpenBLAS's threshold for threads
_EPS = 1e-5
_TEMPERATURE = float(1 / np.sqrt(WIDTH / HEADS))

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
SIZE = sum(int(np.prod(s)) for s in SHAPES.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """Scaled features: statement (b, STATEMENT), tokens (b, t, TOKEN), roles and mask (b, t)."""

    statement: Numbers
    tokens: Numbers
    roles: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]


def named(flat: Numbers) -> dict[str, Numbers]:
    """The parameters in ``flat`` (SIZE,) by name, as views."""
    found, at = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        found[name] = flat[at : at + size].reshape(shape)
        at += size
    return found


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
    rows = np.resize(np.arange(n), -(-n // ROWS) * ROWS)  # whole blocks; the rest is left out again
    whole = Batch(batch.statement[rows], batch.tokens[rows], batch.roles[rows], batch.mask[rows])
    return Pass(named(flat), whole).score[:n]


class Pass:
    """One forward pass over a multiple of ROWS items, and what its backward pass needs."""

    def __init__(self, p: Mapping[str, Numbers], batch: Batch) -> None:
        self.p, self.batch = p, batch
        b, t = batch.roles.shape
        mask = batch.mask
        kind = p["role"].dtype
        start = _affine("token", batch.tokens.astype(kind), p)
        start += p["role"][batch.roles] + p["position"][:t]
        self.n1, self.d1 = _normalise(start)
        qkv = _affine("qkv", self.n1, p).reshape(b, t, 3, HEADS, -1)
        self.q, self.k, self.v = qkv.transpose(2, 0, 3, 1, 4)  # (b, heads, t, width of a head)
        logits = self.q @ self.k.swapaxes(2, 3) * _TEMPERATURE
        logits += np.where(mask, 0.0, -1e9).astype(kind)[:, None, None, :]
        power = np.exp(logits - logits.max(axis=3, keepdims=True))
        self.attention = power / power.sum(axis=3, keepdims=True)
        self.heads = (self.attention @ self.v).transpose(0, 2, 1, 3).reshape(b, t, WIDTH)
        middle = start + _affine("mix", self.heads, p)
        self.n2, self.d2 = _normalise(middle)
        self.up = np.maximum(_affine("up", self.n2, p), 0.0)
        self.n3, self.d3 = _normalise(middle + _affine("down", self.up, p))
        self.share = (mask / mask.sum(axis=1, keepdims=True)).astype(kind)
        pooled = (self.n3 * self.share[:, :, None]).sum(axis=1)

        self.statement = batch.statement.astype(kind)
        self.s1 = np.maximum(_affine("statement1", self.statement, p), 0.0)
        self.s2 = np.maximum(_affine("statement2", self.s1, p), 0.0)
        self.joined = np.concatenate([self.s2, pooled], axis=1)
        self.h = np.maximum(_affine("head1", self.joined, p), 0.0)
        self.score: Numbers = (self.h * p["head2.weight"][:, 0]).sum(axis=1)

    def backward(self, of_scores: Numbers, g: Mapping[str, Numbers]) -> None:
        """Add d loss / d parameters to ``g``, given d loss / d scores (b,)."""
        p, batch = self.p, self.batch
        b, t = batch.roles.shape
        kind = p["role"].dtype
        last = of_scores.astype(kind)[:, None]
        g["head2.weight"][:, 0] += (self.h * last).sum(axis=0)
        dh = last * p["head2.weight"][:, 0] * (self.h > 0)
        joined = _affine_back("head1", self.joined, dh, p, g)
        ds2 = joined[:, :WIDTH] * (self.s2 > 0)
        ds1 = _affine_back("statement2", self.s1, ds2, p, g) * (self.s1 > 0)
        _affine_back("statement1", self.statement, ds1, p, g, inner=False)

        dn3 = joined[:, None, WIDTH:] * self.share[:, :, None]
        end = _normalise_back(dn3, self.n3, self.d3)
        dup = _affine_back("down", self.up, end, p, g) * (self.up > 0)
        middle = end + _normalise_back(_affine_back("up", self.n2, dup, p, g), self.n2, self.d2)
        heads = _affine_back("mix", self.heads, middle, p, g)
        heads = heads.reshape(b, t, HEADS, -1).transpose(0, 2, 1, 3)
        dv = self.attention.swapaxes(2, 3) @ heads
        da = heads @ self.v.swapaxes(2, 3)
        dl = self.attention * (da - (da * self.attention).sum(axis=3, keepdims=True))
        dl *= _TEMPERATURE
        dqkv = np.stack([dl @ self.k, dl.swapaxes(2, 3) @ self.q, dv])
        dqkv = dqkv.transpose(1, 3, 0, 2, 4).reshape(b, t, 3 * WIDTH)
        dn1 = _affine_back("qkv", self.n1, dqkv, p, g)
        start = middle + _normalise_back(dn1, self.n1, self.d1)
        _affine_back("token", batch.tokens.astype(kind), start, p, g, inner=False)
        g["position"][:t] += start.sum(axis=0)
        for role in range(N_ROLES):
            g["role"][role] += start[batch.roles == role].sum(axis=0)


def _normalise(x: Numbers) -> tuple[Numbers, Numbers]:
    """Layer normalisation without parameters, and 1 / deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    square = np.einsum("...i,...i->...", centred, centred)[..., None] / x.shape[-1]
    inverse = 1.0 / np.sqrt(square + _EPS)
    return centred * inverse, inverse


def _normalise_back(dy: Numbers, y: Numbers, inverse: Numbers) -> Numbers:
    mean = dy.mean(axis=-1, keepdims=True)
    along = np.einsum("...i,...i->...", dy, y)[..., None] / y.shape[-1]
    result: Numbers = inverse * (dy - mean - y * along)
    return result


def _affine(name: str, x: Numbers, p: Mapping[str, Numbers]) -> Numbers:
    return product(x, p[f"{name}.weight"]) + p[f"{name}.bias"]


def _affine_back(
    name: str,
    x: Numbers,
    dy: Numbers,
    p: Mapping[str, Numbers],
    g: Mapping[str, Numbers],
    *,
    inner: bool = True,
) -> Numbers:
    """Gradients of ``x @ weight + bias``; returns that of ``x`` (nothing unless ``inner``)."""
    g[f"{name}.weight"][...] += outer(x, dy)
    g[f"{name}.bias"][...] += dy.reshape(-1, dy.shape[-1]).sum(axis=0)
    return product(dy, p[f"{name}.weight"].T) if inner else dy


def outer(x: Numbers, dy: Numbers) -> Numbers:
    """Sum over rows of x' dy, in blocks of ROWS rows."""
    left, right = _blocks(x), _blocks(dy)
    total: Numbers = (left.swapaxes(1, 2) @ right).sum(axis=0)
    return total


def product(x: Numbers, weight: Numbers) -> Numbers:
    """x @ weight in blocks of ROWS rows; the rows of ``x`` are whole blocks."""
    result: Numbers = (_blocks(x) @ weight).reshape(*x.shape[:-1], weight.shape[1])
    return result


def _blocks(x: Numbers) -> Numbers:
    return x.reshape(-1, ROWS, x.shape[-1])
