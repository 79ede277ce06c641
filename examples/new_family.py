"""A kernel family of one's own, emitter included: sums with a transposed operand, tile by tile.

``x.t() + y`` reads x against the order in which it lies. The built-in family of elementwise kernels
goes along the rows of the result, so that each element of x comes from another line of the cache.
The family below goes through the result tile by tile: a tile's lines of x stay in the cache until
all of their elements are used. It is one class for the space, one for the family, and the loops.

python examples/new_family.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

import torch_pruner
from torch_pruner.families import drop_family, machine, use_family
from torch_pruner.families.base import Family
from torch_pruner.families.kinds import is_elementwise
from torch_pruner.families.space import Sketch, Symbols

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task

N = TypeVar("N")


class TiledDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    side: N  # rows and columns of a tile, elements
    par: N  # 1: rows of tiles are shared out to threads


class TiledSketch(Sketch):
    """Square tiles, rows of tiles in parallel."""

    name = "tiled"
    decisions = TiledDecisions

    @cached_property
    def domains(self) -> tuple[np.ndarray, ...]:
        parallel = [0, 1] if self.task.threads > 1 else [0]
        return np.array([8, 16, 32, 64]), np.array(parallel)

    def symbols(self, decisions: np.ndarray) -> Symbols:
        """Pruner's symbols: a tile is re-read from the level-1 cache if its lines fit there."""
        c, spec, target = self.columns(decisions), self.task.spec, self.task.target
        rows, columns = spec.nodes[spec.outputs[0]].shape
        tiles = np.ceil(rows / c.side) * np.ceil(columns / c.side)
        cycles = 1.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes)))) / 4
        held = c.side * np.maximum(c.side * 4.0, 64.0)  # lines of 64 bytes
        moved = float(machine.input_bytes(spec) + machine.output_bytes(spec)) * np.ones(len(c.side))
        again = np.where(held <= target.l1_bytes / 2, 1.0, 2.0) * (1 + 4 / c.side)
        work = tiles * c.side**2 * cycles / target.frequency_hz
        total = np.maximum(work / 4, again * moved / target.dram_bytes_per_s)
        tasks = np.where(c.par == 1, np.ceil(rows / c.side), 1.0)
        seconds, rounds = machine.parallel_seconds(tasks, total / tasks, c.par, self.task.threads)
        ones = np.ones(len(c.side))
        return Symbols(
            ones, c.side**2, held, tasks, moved, rounds, 4 * c.side, rows * columns * ones, seconds
        )

    def default(self) -> np.ndarray:
        return self.best_predicted()


class Tiled(Family):
    """Elementwise kernels of matrices, some of them transposed."""

    name = "tiled"
    decisions = TiledDecisions

    def matches(self, task: Task) -> bool:
        nodes, outputs = task.spec.nodes, task.spec.outputs
        matrices = all(len(nodes[o].shape) == 2 for o in outputs)
        alike = len({nodes[o].shape for o in outputs}) == 1
        turned = any(n.op == "permute" for n in nodes)
        return is_elementwise(task.spec) and matrices and alike and turned

    def space(self) -> type[Sketch]:
        return TiledSketch

    def emit(
        self, spec: Graph, decisions: Any, signature: Signature, *, host: bool = False
    ) -> Emitted:
        from torch_pruner.codegen.parts.kernel import Emitted, parameters
        from torch_pruner.codegen.parts.sweeps import store_outputs
        from torch_pruner.codegen.tir.builders import PARALLEL, SERIAL, loop
        from torch_pruner.codegen.tir.reader import Reader

        inputs, outputs, scratch = parameters(signature)
        reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
        (rows, columns), side = spec.nodes[spec.outputs[0]].shape, decisions.side

        def tile(top: Any, left: Any, height: int, width: int) -> Any:
            def element(i: Any, j: Any) -> Any:
                return store_outputs(spec, reader, outputs, (top + i, left + j))

            return loop(height, lambda i: loop(width, lambda j: element(i, j), SERIAL, "j"))

        body = over_tiles(rows, columns, side, PARALLEL if decisions.par else SERIAL, tile)
        return Emitted(body, inputs, outputs, scratch)


def over_tiles(rows: int, columns: int, side: int, kind: Any, tile: Any) -> Any:
    """Rows of whole tiles in loops of ``kind``, then what is left at the right and below."""
    from torch_pruner.codegen.tir.builders import loop, seq

    across, right = divmod(columns, side)
    down, below = divmod(rows, side)

    def line(top: Any, height: int) -> Any:
        whole = [loop(across, lambda t: tile(top, t * side, height, side))] if across else []
        rest = [tile(top, across * side, height, right)] if right else []
        return seq([*whole, *rest])

    whole = [loop(down, lambda t: line(t * side, side), kind)] if down else []
    return seq([*whole, *([line(down * side, below)] if below else [])])


def tuned(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Any:
    """The compiled function, tuned into a cache of its own, and what its kernel runs as."""
    with tempfile.TemporaryDirectory(prefix="new-family-") as folder:
        torch._dynamo.reset()
        options = {"cache_dir": folder, "time_budget_s": 10.0, "library": False}
        compiled = torch.compile(function, backend="pruner", options=options)
        compiled(*inputs)
    return compiled, torch_pruner.last_report().tasks[0].sketch


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1900, 2100), torch.randn(2100, 1900)

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.t() + y)

    calls, family = {"eager": add}, Tiled()
    calls["built-in families"], built_in = tuned(add, x, y)
    use_family(family)
    calls["with the new one"], new = tuned(add, x, y)
    drop_family(family)
    print(f"kernels: {built_in} of the built-in families, {new} with the new one")
    for name, seconds in latencies(calls, (x, y)).items():
        error = (calls[name](x, y) - add(x, y)).abs().max().item()
        print(f"{name:>20}: {1e3 * seconds:7.2f} ms a call, off by {error:.1e}")


def latencies(calls: dict, inputs: tuple) -> dict[str, float]:
    """Median seconds per call; all take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(50):
        for name, call in calls.items():
            start = time.perf_counter()
            call(*inputs)
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    main()
