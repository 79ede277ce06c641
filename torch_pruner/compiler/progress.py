"""One line on a terminal that tells how far tuning has come; nothing elsewhere."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch_pruner.task import MeasureResult, Task

WIDTH = 79


@dataclass(slots=True)
class ProgressLine:
    """Rewrites its line after every measurement. ``wanted`` is the option ``progress``."""

    wanted: bool | str
    n_tasks: int
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    trials: int = 0
    seen: set[str] = field(default_factory=set)

    @property
    def enabled(self) -> bool:
        return self.stream.isatty() if self.wanted == "auto" else bool(self.wanted)

    def update(self, task: Task, result: MeasureResult) -> None:
        """Count one measured candidate of ``task``."""
        self.trials += 1
        self.seen.add(task.workload)
        if not self.enabled:
            return
        took = f"{result.latency_s * 1e6:.0f} us" if math.isfinite(result.latency_s) else "failed"
        text = f"tuning: {len(self.seen)}/{self.n_tasks} kernels, {self.trials} trials; "
        self.stream.write("\r" + f"{text}{task.name} {took}"[:WIDTH].ljust(WIDTH))
        self.stream.flush()

    def close(self) -> None:
        """Leave the line empty for whoever writes next."""
        if self.enabled and self.trials:
            self.stream.write("\r" + " " * WIDTH + "\r")
            self.stream.flush()
