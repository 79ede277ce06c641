"""The generator: how likely a schedule is, schedules at random, and training on what is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner import tensors
from torch_pruner.tuner.cost_model.layers import ROWS, views, whole_blocks
from torch_pruner.tuner.cost_model.training import Adam
from torch_pruner.tuner.generator import network
from torch_pruner.tuner.generator.sentence import VERSION, inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.cost_model.layers import Numbers
    from torch_pruner.tuner.generator.sentence import Prompt
    from torch_pruner.tuner.search.space import Rows

RATE, DECAY = 2e-3, 1e-4
MAX_BYTES = 8 << 20  # of a file: two million parameters


class Generator:
    """``flat`` (network.SIZE,) are its parameters; without any it knows nothing.

    Example:
        prompt = Prompt.of(task, sketches)
        for i, rows in enumerate(generator.write(prompt, 64, rng)):
            candidates += SketchSpace(sketches[i]).candidates(rows)
    """

    def __init__(self, flat: Numbers | None = None, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, 0x71E])
        self.flat = network.initial(rng) if flat is None else flat

    def log_probability(self, prompt: Prompt, i: int, rows: Rows) -> Numbers:
        """(n,): of the points ``rows`` (n, d) of sketch ``i``, that of the sketch included."""
        n = len(rows)
        if not n:
            return np.zeros(0)
        padded = rows[whole_blocks(n)]
        run = self._run(prompt, i, padded)
        total = np.zeros(len(padded))
        for logits, options in zip(run.logits, network.chosen(padded, i), strict=True):
            total += network.log_shares(logits)[np.arange(len(padded)), options]
        return total[:n]

    def write(self, prompt: Prompt, n: int, rng: np.random.Generator) -> list[Rows]:
        """``n`` sentences drawn at random, for each sketch its rows. Some may not be valid."""
        first = self._run(prompt, 0, np.zeros((ROWS, 0), np.int64)).logits[0][0]
        share = np.exp(network.log_shares(first))
        counts = rng.multinomial(n, share / share.sum())
        return [self._written(prompt, i, int(count), rng) for i, count in enumerate(counts)]

    def step(self, optimiser: Adam, batch: Sequence[tuple[Prompt, int, Rows, Numbers]]) -> float:
        """One step on sentences (prompt, sketch, rows, weights (n,)); the loss before it.

        The loss is the mean over the batch of minus the weighted mean logarithm of a sentence's
        probability.
        """
        gradient, loss = np.zeros_like(self.flat), 0.0
        for prompt, i, rows, weights in batch:
            at = whole_blocks(len(rows))
            padded = rows[at]
            share = np.where(np.arange(len(at)) < len(rows), weights[at], 0.0)
            share = share / (share.sum() * len(batch))
            run, pulls = self._run(prompt, i, padded), []
            for logits, options in zip(run.logits, network.chosen(padded, i), strict=True):
                logs, n = network.log_shares(logits), np.arange(len(padded))
                loss -= float((logs[n, options] * share).sum())
                pull = np.exp(logs)
                pull[n, options] -= 1.0
                pulls.append(pull * share[:, None])
            run.backward(pulls, views(gradient, network.SHAPES))
        optimiser.step(self.flat, gradient)
        return loss

    def to_bytes(self) -> bytes:
        """The parameters in the layout of safetensors."""
        notes = {"format": "torch_pruner schedule generator", "features": str(VERSION)}
        return tensors.to_bytes(views(self.flat, network.SHAPES), notes)

    @staticmethod
    def from_bytes(content: bytes) -> Generator:
        """Inverse of ``to_bytes``. Raises ``ValueError`` for anything else, damage included."""
        found, _ = tensors.from_bytes(content, network.SHAPES, VERSION, MAX_BYTES)
        flat = np.zeros(network.SIZE, np.float32)
        for name, view in views(flat, network.SHAPES).items():
            view[...] = found[name]
        return Generator(flat)

    def _run(self, prompt: Prompt, i: int, rows: Rows) -> network.Pass:
        """Over the first steps: as many as ``rows`` has, and the one after them, if there is."""
        positions = inputs(prompt, i, rows)
        options = prompt.options[i][: positions.shape[1]]
        return network.Pass(views(self.flat, network.SHAPES), positions, options)

    def _written(self, prompt: Prompt, i: int, n: int, rng: np.random.Generator) -> Rows:
        decisions = len(prompt.kinds[i]) - 1
        rows = np.zeros((-(-n // ROWS) * ROWS, decisions), np.int64)
        for j in range(decisions if n else 0):
            logits = self._run(prompt, i, rows[:, :j]).logits[1 + j]
            rows[:, j] = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        return rows[:n]


def optimiser() -> Adam:
    return Adam(RATE, DECAY, size=network.SIZE)
