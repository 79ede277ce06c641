"""A kernel's text around its lines: its parameters, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.triton.expressions import Tile
from torch_pruner.codegen.parts.triton.kernel import (
    EARLY,
    GO_ON,
    HEADER,
    POINTEES,
    SYMBOL,
    WAIT,
    TritonKernel,
)
from torch_pruner.codegen.tir.builders import S, Stmt
from torch_pruner.codegen.tir.reader import Index, Reader, linear
from torch_pruner.codegen.tir.values import value_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.tir.builders import Buffer, Expr
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


@dataclass(slots=True)
class Source:
    """Makes kernels on the buffers of ``signature``, whose names are those of ``buffers``.

    ``width``: the dtype of indices.
    """

    signature: Signature
    buffers: Sequence[Buffer]
    width: str
    _names: list[str] = field(init=False)
    _dtypes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        s = self.signature
        self._names = [str(b.name) for b in self.buffers]
        self._dtypes = [b.dtype for b in (*s.inputs, *s.outputs, *s.scratch)]

    @property
    def block(self) -> str:
        """The number of a block."""
        return "tl.program_id(0)" + (".to(tl.int64)" if self.width == "int64" else "")

    def wide(self, number: str) -> str:
        """A loop's number, which has 32 bits, as an index."""
        return number if self.width == "int32" else f"(tl.full((), 0, tl.int64) + {number})"

    def tile(self, axes: dict[str, int]) -> Tile:
        """What prints a kernel's first lines."""
        pairs = zip(self._names, self._dtypes, strict=True)
        return Tile(axes, {name: (name, dtype) for name, dtype in pairs})

    def kernel(self, tile: Tile, blocks: int, warps: int, stages: int) -> TritonKernel:
        """Of the lines that ``tile`` has printed."""
        heads = ", ".join([*self._names, f"{EARLY}: tl.constexpr"])
        body = "\n".join(tile.lines)
        text = f"{HEADER}@triton.jit\ndef {SYMBOL}({heads}):\n{WAIT}{body}\n{GO_ON}"
        types = tuple(POINTEES[d] for d in self._dtypes)
        return TritonKernel(text, tuple(range(len(types))), types, blocks, warps, stages)


def write(
    tile: Tile, spec: Graph, reader: Reader, anchor: int, index: Index, value: Expr, out: Buffer
) -> None:
    """``value``, that of node ``anchor`` at ``index``, through the rest of the graph, stored."""
    path, dtype = output_path(spec, anchor), spec.nodes[anchor].dtype
    at = along(spec, path, index)
    reader.overrides[anchor] = lambda _: value.astype(value_dtype(dtype))
    made: list[Expr] = []

    def emit() -> list[Stmt]:
        made.append(reader.at(path[-1], at))
        return [S.Evaluate(made[0])]

    tile.run(reader.scope(emit))
    del reader.overrides[anchor]
    tile.store(out, linear(at, spec.nodes[path[-1]].shape), made[0])
