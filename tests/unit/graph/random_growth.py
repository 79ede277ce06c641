"""A random graph while it grows: its values, with a bound of each, and choices among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_LARGEST = 2.0**12  # magnitude


_EXACT_BITS = {"float64": 40, "float32": 22, "float16": 9, "bfloat16": 6}


@dataclass(frozen=True, slots=True)
class Bound:
    """``bits`` fractional bits hold every value exactly; None where rounding happened."""

    magnitude: float
    bits: int | None


@dataclass(slots=True)
class Growth:
    """A graph under construction. ``choose(n)`` gives a number below n."""

    choose: Callable[[int], int]
    numel: int
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    dims: tuple[int, ...] = (1, 2, 3, 4, 5, 8)
    bounds: dict[int, Bound] = field(default_factory=dict)
    pool: list[int] = field(default_factory=list)
    n_inputs: int = 0

    def graph(self, moves: int, kinds: Sequence[Callable[[Growth], None]]) -> Graph:
        self.fresh(self.shape(self.choose(4) + 1))
        for _ in range(moves):
            kinds[self.choose(len(kinds))](self)
        return self.builder.finish(self.outputs())

    def outputs(self) -> list[int]:
        """What nothing reads, and a few others: values read inside, inputs, views of inputs."""
        read = {j for n in self.builder.nodes for j in n.inputs}
        values = [i for i in dict.fromkeys(self.pool) if self.builder.nodes[i].op != "const"]
        found = [i for i in values if i not in read and self.builder.nodes[i].op != "input"]
        found = found[-4:]
        for _ in range(self.choose(3)):
            found.insert(self.choose(len(found) + 1), values[self.choose(len(values))])
        return found or [values[-1]]

    def one_of(self, options: Sequence[str]) -> str:
        return options[self.choose(len(options))]

    def shape(self, rank: int) -> tuple[int, ...]:
        found: list[int] = []
        left = self.numel
        for _ in range(rank):
            options = [d for d in self.dims if d <= left] or [1]
            found.append(options[self.choose(len(options))])
            left //= found[-1]
        return tuple(found)

    # Every value enters through ``add``, which keeps the book on bounds.

    def add(self, node: int, magnitude: float, bits: int | None) -> int:
        dtype = self.builder.dtype(node)
        if dtype in FLOATS and bits is not None:
            room = _EXACT_BITS[dtype]
            bits = bits if magnitude * 2.0**bits < 2.0**room else None
        self.bounds[node] = Bound(magnitude, bits)
        self.pool.append(node)
        return node

    def bound(self, node: int) -> Bound:
        return self.bounds[node]

    def fresh(self, shape: Sequence[int], dtype: str = "", *, static: bool = False) -> int:
        """A new input."""
        dtype = dtype or ("float32", "float32", "float32", "bfloat16", "int64", "int32", "bool",
                          "float64", "float16")[self.choose(9)]  # fmt: skip
        node = self.builder.input(self.n_inputs, shape, dtype, static=static)
        self.n_inputs += 1
        return self.add(node, 3.0 if dtype not in FLOATS else 2.0, 1 if dtype in FLOATS else 0)

    def pick(self, accept: Callable[[int], bool] = lambda _: True) -> int | None:
        """A value, more often a late one."""
        fitting = [i for i in self.pool if accept(i)]
        if not fitting:
            return None
        recent = fitting[-3:] if self.choose(3) else fitting
        return recent[-1 - self.choose(len(recent))]

    def floating(self, accept: Callable[[int], bool] = lambda _: True) -> int:
        """A floating value; a new one if there is none."""
        found = self.pick(lambda i: self.builder.dtype(i) in FLOATS and accept(i))
        if found is None:
            found = self.fresh(self.shape(self.choose(4) + 1), "float32")
        return found

    def const(self, value: float, dtype: str) -> int:
        node = self.builder.const(value, dtype)
        self.bounds[node] = Bound(abs(value), 0 if float(value).is_integer() else None)
        return node

    def apply(self, op: str, *args: int, dtype: str | None = None) -> int:
        """A pointwise operator with its bound."""
        b = self.builder
        node = b.pointwise(op, *args, dtype=dtype)
        for a in args:  # broadcasts of operands
            self.bounds.setdefault(a, Bound(3.0, None))
        bounds = [self.bound(a) for a in args]
        bits = [x.bits for x in bounds]
        exact = None if None in bits else max(bits)
        top = max(x.magnitude for x in bounds)
        if op in ("add", "sub"):
            return self.add(node, sum(x.magnitude for x in bounds), exact)
        if op == "mul":
            product = bounds[0].magnitude * bounds[1].magnitude
            return self.add(node, product, None if exact is None else sum(bits))
        if op in (
            "neg",
            "abs",
            "relu",
            "maximum",
            "minimum",
            "where",
            "floor",
            "ceil",
            "round",
            "cast",
        ):
            return self.add(node, top, exact)
        if self.builder.dtype(node) not in FLOATS:
            return self.add(node, top, 0)
        return self.add(node, {"exp": 2.0**12}.get(op, top + 1), None)

    def tamed(self, x: int, limit: float) -> int:
        """``x``, or its tanh if it may be larger than ``limit``."""
        if self.bound(x).magnitude <= limit or self.builder.dtype(x) not in FLOATS:
            return x
        node = self.builder.pointwise("tanh", x)
        return self.add(node, 1.0, None)

    def view(self, node: int, source: int) -> int:
        return self.add(node, self.bound(source).magnitude, self.bound(source).bits)
