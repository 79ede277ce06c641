"""The network that writes: blocks of causal attention, and a score for each option of a step.

In numpy, forward and backward, for the reasons that ``cost_model.network`` has. A step's state is
compared with what a small network makes of each option, so steps may have any number of them.
"""

from __future__ import annotations

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
from torch_pruner.tuner.generator.sentence import OPTION, STEP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.tuner.cost_model.layers import Numbers
    from torch_pruner.tuner.search.space import Rows

WIDTH, HEADS, BLOCKS, HIDDEN = 96, 4, 2, 192

_BLOCK: Mapping[str, tuple[int, ...]] = {
    "qkv.weight": (WIDTH, 3 * WIDTH),
    "qkv.bias": (3 * WIDTH,),
    "mix.weight": (WIDTH, WIDTH),
    "mix.bias": (WIDTH,),
    "up.weight": (WIDTH, HIDDEN),
    "up.bias": (HIDDEN,),
    "down.weight": (HIDDEN, WIDTH),
    "down.bias": (WIDTH,),
}
SHAPES: Mapping[str, tuple[int, ...]] = {
    "step.weight": (STEP, WIDTH),
    "step.bias": (WIDTH,),
    **{f"{b}.{name}": shape for b in range(BLOCKS) for name, shape in _BLOCK.items()},
    "option1.weight": (OPTION, WIDTH),
    "option1.bias": (WIDTH,),
    "option2.weight": (WIDTH, WIDTH),
    "option2.bias": (WIDTH,),
}
SIZE = size_of(SHAPES)
_TEMPERATURE = WIDTH**-0.5


def initial(rng: np.random.Generator, dtype: str = "float32") -> Numbers:
    """Parameters to start from: nearly every option is as likely as any other."""
    flat = np.zeros(SIZE, dtype)
    for name, view in views(flat, SHAPES).items():
        if name.endswith("weight"):
            scale = 0.1 if name.startswith("option2") else 1.0
            view[...] = scale * rng.standard_normal(view.shape) * view.shape[0] ** -0.5
    return flat


class Pass:
    """One forward pass over positions (n, t, STEP), n a multiple of ROWS.

    ``logits[j]`` (n, options) are those of step j, whose options are ``options[j]`` (m, OPTION).
    """

    def __init__(
        self, p: Mapping[str, Numbers], positions: Numbers, options: Sequence[Numbers]
    ) -> None:
        self._p, self._positions = p, positions.astype(p["step.bias"].dtype)
        there = np.ones(positions.shape[:2], dtype=bool)
        x = affine("step", self._positions, p)
        self._blocks = []
        for b in range(BLOCKS):
            block = _Block(_of(p, b), x, there)
            self._blocks.append(block)
            x = block.out
        self._state, self._deviation = normalise(x)
        self._options = [_Options(p, o.astype(x.dtype)) for o in options]
        self.logits = [
            self._state[:, j] @ option.out.T * _TEMPERATURE
            for j, option in enumerate(self._options)
        ]

    def backward(self, of_logits: Sequence[Numbers], g: Mapping[str, Numbers]) -> None:
        """Add d loss / d parameters to ``g``, given d loss / d logits of each step."""
        state = np.zeros_like(self._state)
        for j, (option, dl) in enumerate(zip(self._options, of_logits, strict=True)):
            scaled = dl.astype(state.dtype) * _TEMPERATURE
            state[:, j] = scaled @ option.out
            option.backward(scaled.T @ self._state[:, j], self._p, g)
        dx = normalise_back(state, self._state, self._deviation)
        for b in reversed(range(BLOCKS)):
            dx = self._blocks[b].backward(dx, _of(self._p, b), _of(g, b))
        affine_back("step", self._positions, dx, self._p, g, inner=False)


class _Block:
    """Attention and two layers, each on what is normalised, added to what comes in."""

    def __init__(self, p: Mapping[str, Numbers], x: Numbers, there: np.ndarray) -> None:
        self._n1, self._d1 = normalise(x)
        self._attention = Attention(self._n1, there, p, HEADS, causal=True)
        middle = x + self._attention.out
        self._n2, self._d2 = normalise(middle)
        self._up = np.maximum(affine("up", self._n2, p), 0.0)
        self.out = middle + affine("down", self._up, p)

    def backward(self, dy: Numbers, p: Mapping[str, Numbers], g: Mapping[str, Numbers]) -> Numbers:
        dup = affine_back("down", self._up, dy, p, g) * (self._up > 0)
        middle = dy + normalise_back(affine_back("up", self._n2, dup, p, g), self._n2, self._d2)
        dn1 = self._attention.backward(middle, p, g)
        result: Numbers = middle + normalise_back(dn1, self._n1, self._d1)
        return result


class _Options:
    """What the network makes of a step's options: (m, WIDTH)."""

    def __init__(self, p: Mapping[str, Numbers], options: Numbers) -> None:
        self._m = len(options)
        self._given = options[whole_blocks(self._m)]
        self._hidden = np.maximum(affine("option1", self._given, p), 0.0)
        self.out = affine("option2", self._hidden, p)[: self._m]

    def backward(self, dy: Numbers, p: Mapping[str, Numbers], g: Mapping[str, Numbers]) -> None:
        padded = np.zeros((len(self._given), dy.shape[1]), dy.dtype)
        padded[: self._m] = dy
        dh = affine_back("option2", self._hidden, padded, p, g) * (self._hidden > 0)
        affine_back("option1", self._given, dh, p, g, inner=False)


def _of(p: Mapping[str, Numbers], block: int) -> dict[str, Numbers]:
    return {name: p[f"{block}.{name}"] for name in _BLOCK}


def log_shares(logits: Numbers) -> Numbers:
    """Logarithms of probabilities along the last axis."""
    above = logits - logits.max(axis=-1, keepdims=True)
    result: Numbers = above - np.log(np.exp(above).sum(axis=-1, keepdims=True))
    return result


def chosen(rows: Rows, first: int) -> list[np.ndarray]:
    """The option of every step of sentences: sketch ``first``, then ``rows`` (n, d)."""
    return [np.full(len(rows), first), *(rows[:, j] for j in range(rows.shape[1]))]
