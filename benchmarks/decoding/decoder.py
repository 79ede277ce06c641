"""What every contestant offers: a cache that is filled to a position, and tokens from there."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """Of which model, and how it is run.

    ``length`` is that of the cache in tokens. A turn begins at position ``start``, after a prompt
    of as many tokens. ``folder`` has the weights and what was converted from them; ``options`` are
    those of our backend.
    """

    model: str
    folder: Path
    threads: int
    length: int
    start: int
    layers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "weights.pt"

    def scores(self, *, rounded: bool) -> Path:
        """Where eager's scores after the prompt are kept: a file for each prompt and model."""
        told = json.dumps([self.model, self.layers, self.prompt()])
        key = hashlib.sha256(told.encode()).hexdigest()[:12]
        return self.folder / f"scores-{'rounded' if rounded else 'float32'}-{key}.npy"

    @property
    def has_reference(self) -> bool:
        """Whether weights and eager's scores with them are there."""
        files = [self.checkpoint, *(self.scores(rounded=r) for r in (False, True))]
        return all(file.exists() for file in files)

    def prompt(self, count: int | None = None) -> list[int]:
        """Random tokens, the same for everybody; by default as many as ``start``."""
        return np.random.default_rng(0).integers(1000, size=count or self.start).tolist()


class Decoder(ABC):
    """One model in one runtime, ready to decode.

    Contract: ``fill`` leaves the cache with the prompt in it, whatever was in it before, and gives
    the scores of the token that follows; ``step`` then decodes one greedy token and may be called
    until the cache is full. ``weight_bytes`` are those of its own format that a step reads.
    """

    weight_bytes: int

    @abstractmethod
    def fill(self, prompt: Sequence[int]) -> np.ndarray:
        """Float32 scores, as many as the vocabulary has words."""

    @abstractmethod
    def step(self) -> None:
        """Decodes one token; it has been chosen when this returns."""

    def steps(self, count: int) -> list[float]:
        """Seconds of each of the next tokens."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def rewind(self, prompt: Sequence[int]) -> None:
        """As after ``fill``, which it calls unless a contestant knows a shorter way."""
        self.fill(prompt)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds for the scores after a prompt, from an empty cache."""
        begin = time.perf_counter()
        self.fill(prompt)
        return time.perf_counter() - begin
