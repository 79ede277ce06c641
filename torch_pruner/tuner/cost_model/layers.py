"""Layers of small networks in numpy, each forward and backward; parameters are arrays by name.

Products are done in blocks of ROWS rows, so a score does not depend on what else is in the batch,
and none is large enough for a threaded BLAS to start threads that the user did not ask for. The
type of the parameters is the type of everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

Numbers = npt.NDArray[Any]  # of any floating type
ROWS = 32  # of one block of a product: 32 x 75 x 64 stays below OpenBLAS's threshold for threads
_EPS = 1e-5


class Attention:
    """Attention of ``x`` (b, t, w) to itself, and what its backward pass needs.

    Parameters "qkv" (w, 3w) and "mix" (w, w), weight and bias each; b * t rows are whole blocks.
    What ``mask`` (b, t) leaves out is not attended to; ``causal``: nor is what comes later.
    """

    def __init__(
        self,
        x: Numbers,
        mask: npt.NDArray[np.bool_],
        p: Mapping[str, Numbers],
        heads: int,
        *,
        causal: bool = False,
    ) -> None:
        b, t, width = x.shape
        self._x, self._temperature = x, float(1 / np.sqrt(width / heads))
        qkv = affine("qkv", x, p).reshape(b, t, 3, heads, -1)
        self._q, self._k, self._v = qkv.transpose(2, 0, 3, 1, 4)  # (b, heads, t, width of a head)
        logits = self._q @ self._k.swapaxes(2, 3) * self._temperature
        logits += np.where(mask, 0.0, -1e9).astype(x.dtype)[:, None, None, :]
        if causal:
            logits += np.triu(np.full((t, t), -1e9, x.dtype), 1)
        power = np.exp(logits - logits.max(axis=3, keepdims=True))
        self._share = power / power.sum(axis=3, keepdims=True)
        self._heads = (self._share @ self._v).transpose(0, 2, 1, 3).reshape(b, t, width)
        self.out = affine("mix", self._heads, p)

    def backward(self, dy: Numbers, p: Mapping[str, Numbers], g: Mapping[str, Numbers]) -> Numbers:
        """Adds to the gradients ``g``, given that of ``out``; returns that of ``x``."""
        b, t, width = self._x.shape
        n = self._share.shape[1]
        heads = affine_back("mix", self._heads, dy, p, g)
        heads = heads.reshape(b, t, n, -1).transpose(0, 2, 1, 3)
        dv = self._share.swapaxes(2, 3) @ heads
        da = heads @ self._v.swapaxes(2, 3)
        dl = self._share * (da - (da * self._share).sum(axis=3, keepdims=True))
        dl *= self._temperature
        dqkv = np.stack([dl @ self._k, dl.swapaxes(2, 3) @ self._q, dv])
        dqkv = dqkv.transpose(1, 3, 0, 2, 4).reshape(b, t, 3 * width)
        return affine_back("qkv", self._x, dqkv, p, g)


def normalise(x: Numbers) -> tuple[Numbers, Numbers]:
    """Layer normalisation without parameters, and 1 / deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    square = np.einsum("...i,...i->...", centred, centred)[..., None] / x.shape[-1]
    inverse = 1.0 / np.sqrt(square + _EPS)
    return centred * inverse, inverse


def normalise_back(dy: Numbers, y: Numbers, inverse: Numbers) -> Numbers:
    mean = dy.mean(axis=-1, keepdims=True)
    along = np.einsum("...i,...i->...", dy, y)[..., None] / y.shape[-1]
    result: Numbers = inverse * (dy - mean - y * along)
    return result


def affine(name: str, x: Numbers, p: Mapping[str, Numbers]) -> Numbers:
    return product(x, p[f"{name}.weight"]) + p[f"{name}.bias"]


def affine_back(
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


def whole_blocks(n: int) -> npt.NDArray[np.intp]:
    """Indices of ``n`` rows, some of them again until they are whole blocks."""
    return np.resize(np.arange(n), -(-n // ROWS) * ROWS)


def size_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(s)) for s in shapes.values())


def views(flat: Numbers, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Numbers]:
    """The parameters in ``flat`` (the sum of their sizes,) by name, as views."""
    found, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = flat[at : at + size].reshape(shape)
        at += size
    return found
