"""One line on a terminal that tells how far compiling has come; nothing elsewhere."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch_pruner.task import MeasureResult, Task

WIDTH = 79


@dataclass(slots=True)
class StatusLine:
    """A line that is rewritten. ``wanted`` is the option ``progress``."""

    wanted: bool | str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    shown: bool = False

    @property
    def enabled(self) -> bool:
        return self.stream.isatty() if self.wanted == "auto" else bool(self.wanted)

    def show(self, text: str) -> None:
        """Have it say ``text``, cut to its width."""
        if self.enabled:
            self.shown = True
            self.stream.write("\r" + text[:WIDTH].ljust(WIDTH))
            self.stream.flush()

    def close(self) -> None:
        """Leave the line empty for whoever writes next."""
        if self.shown:
            self.shown = False
            self.stream.write("\r" + " " * WIDTH + "\r")
            self.stream.flush()


@dataclass(slots=True)
class ProgressLine:
    """How far tuning has come, after every measurement. ``wanted`` as of ``StatusLine``."""

    wanted: bool | str
    n_tasks: int
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    trials: int = 0
    seen: set[str] = field(default_factory=set)
    _line: StatusLine = field(init=False)

    def __post_init__(self) -> None:
        self._line = StatusLine(self.wanted, self.stream)

    def update(self, task: Task, result: MeasureResult) -> None:
        """Count one measured candidate of ``task``."""
        self.trials += 1
        self.seen.add(task.workload)
        took = f"{result.latency_s * 1e6:.0f} us" if math.isfinite(result.latency_s) else "failed"
        text = f"tuning: {len(self.seen)}/{self.n_tasks} kernels, {self.trials} trials; "
        self._line.show(f"{text}{task.name} {took}")

    def close(self) -> None:
        """Leave the line empty for whoever writes next."""
        self._line.close()
