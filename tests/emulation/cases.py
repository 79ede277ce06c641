"""What is run on emulated processors: kernels of each family, random ones, and each operator."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.families import kernels as K
from tests.families.test_families import SPECS
from tests.unit.graph.attention_graphs import Case, attention, narrow
from tests.unit.graph.random_graphs import inputs_for, random_graph, run_kernels
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner import families
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.ops import BINARY, COMPARISONS, FLOATS, ITEMSIZE, UNARY
from torch_pruner.graph.precision import allow_fast
from torch_pruner.graph.reference import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

DIMS = (1, 2, 3, 4, 7, 16, 17, 40)
SEEDS = 40  # of random graphs
GROUP = 8  # seeds under one name


@dataclass(frozen=True, slots=True)
class Kernel:
    """A graph and what is given to it. ``family``: whose schedules are run; "": of all."""

    spec: Graph
    arrays: list[Any]
    family: str = ""
    label: str = field(default="", compare=False)


def searched() -> list[str]:
    """The families for CPUs that are searched."""
    return [n for n in SPECS if families.named(n).target_kind == "llvm"]


def names() -> list[str]:
    """What ``kernels`` takes."""
    random = [f"random-{first}" for first in range(0, SEEDS, GROUP)]
    dtypes = [f"{what}-{dtype}" for what in ("pointwise", "cast") for dtype in ITEMSIZE]
    return [*searched(), *random, *(d for d in dtypes if d != "pointwise-bool")]


def kernels(name: str) -> Iterator[Kernel]:
    """The kernels of a name."""
    what, _, which = name.partition("-")
    if what == "random":
        for seed in range(int(which), int(which) + GROUP):
            yield from _random(seed)
    elif what == "pointwise":
        for op in (*UNARY, *BINARY):
            if op != "cast" and (found := _pointwise(op, which)):
                yield found
    elif what == "cast":
        for to in ITEMSIZE:
            if to != which:
                yield _cast(which, to)
    else:
        for k, spec in enumerate([SPECS[name], *MORE.get(name, ())]):
            yield Kernel(spec, _inputs(spec), name, f"{name} {k}")


def _random(seed: int) -> Iterator[Kernel]:
    graph = random_graph(seed, moves=1 + seed % 9, numel=4096, dims=DIMS)
    seen = set()
    for kernel, given, _ in run_kernels(fuse(graph), inputs_for(graph)):
        if (digest := kernel.spec.digest()) not in seen:
            seen.add(digest)
            yield Kernel(kernel.spec, list(given), label=f"seed {seed} {digest[:8]}")


# Beside the graph of each family's contract: other dtypes, sizes that fill no vector, other modes.
MORE: dict[str, list[Graph]] = {
    "attention": [
        attention(Case(mask="add", causal=True, kv=2)),
        attention(Case(queries=70, keys=96, depth=24, width=40, mask="heads", guard=True, batch=2)),
        attention(Case(queries=37, keys=197, depth=80, width=80, mask="bool", guard=True)),
        attention(Case(queries=20, keys=33, depth=5, width=7, flat=True)),
        attention(Case(dtype="bfloat16")),
        attention(Case(dtype="float64", causal=True)),
    ],
    "decode_attention": [
        attention(Case(queries=1, keys=128)),
        attention(Case(queries=1, heads=8, kv=2, keys=197, depth=80, width=72, mask="add")),
        attention(Case(queries=5, heads=8, kv=2, keys=50, causal=True)),
        narrow("bfloat16"),
        narrow("float16"),
    ],
    "depthwise": [
        K.conv(24, 10, 24, 3, 1, 1, 24),
        K.conv(20, 13, 20, 5, 2, 2, 20),
        K.conv(7, 9, 7, 3, 1, 1, 7),
        K.conv(24, 10, 24, 3, 1, 1, 24, dtype="bfloat16"),
        K.conv(32, 9, 32, 3, 1, 1, 8),  # groups of 4
        K.conv(24, 10, 48, 3, 2, 1, 3),
        K.conv(20, 13, 20, 5, 2, 2, 20, static=False),
        G.depthwise_transposed(20, (7, 6), 3, 2, 1, more=1, batch=2),
        G.depthwise_transposed(9, (8, 8), 5, 1, 2),
    ],
    "depthwise_gradient": [
        G.depthwise_gradient(40, (9, 8), 5, 2, 2, batch=3),
        G.depthwise_gradient(7, (9, 9), 3, batch=1),
        G.depthwise_gradient(24, (10, 10), 3, dtype="bfloat16"),
    ],
    "planar": [
        K.planar(5, (9, 9), 7, (3, 3), 2, 1, residual=True),
        K.planar(6, (13, 13), 6, (5, 5), 1, 2, 6),
        K.planar(8, (4, 5, 6), 16, (3, 3, 3), 1, 1, 2),
        K.planar(4, (40,), 9, (3,), dilation=2),
    ],
    "in_place": [
        *(G.few_rows(rows, 67, 35, dtype) for rows in (1, 3, 16) for dtype in sorted(FLOATS)),
        G.keys(),
    ],
    "axpy": [G.matmul(r, 67, 72, dtype=d) for r in (1, 3) for d in sorted(FLOATS)],
    "int4_rows": [G.int4(1, 65, 100), G.int4(5, 48, 33, offsets=True), G.int4(16, 200, 40)],
    "int4_panels": [G.int4(40, 130, 96, offsets=True), G.int4(20, 65, 33)],
    "int8_products": [
        G.byte_product(rows, depth, columns, first)
        for rows, depth, columns in ((1, 64, 48), (33, 130, 35))
        for first in ("int8", "uint8")
    ],
    "filtered_gradient": [
        K.weight_gradient(16, 9, 32, 3, 1, 1),
        K.weight_gradient(16, 7, 16, 3, 1, 0, rank=1),
    ],
    "gradient": [
        K.weight_gradient(5, 9, 20, 3, 2, 1),
        K.weight_gradient(16, 8, 24, 1, 1, 0),
        K.weight_gradient(4, 7, 9, 3, 1, 1, rank=1),
    ],
    "outer_products": [K.turned(37, 50, 41), K.turned(9, 64, 33, batch=2, dtype="bfloat16")],
    "bf16_tiles": [K.linear(37, 50, 70, dtype="bfloat16")],
    "bf16_pairs": [K.linear(37, 50, 70, dtype="bfloat16"), K.linear(3, 72, 33, dtype="bfloat16")],
    "winograd": [K.conv(32, 20, 32, 3, 1, 1), K.conv(5, 11, 9, 3, 1, 1), K.conv(8, 9, 8, 3, 1, 0)],
    "winograd4": [allow_fast(K.conv(32, 20, 32, 3, 1, 1)), allow_fast(K.conv(8, 9, 8, 3, 1, 0))],
    "contraction": [
        *(K.linear(20, 33, 67, dtype=dtype) for dtype in sorted(FLOATS)),
        K.linear(4, 72, 50),
        K.neighbours(1, 96, 64),
        K.attention_scores(2, 21, 24),
        K.conv(16, 10, 24, 5, 1, 2),
        K.conv(3, 15, 10, 7, 2, 3),
        K.conv(16, 9, 24, 3, 2, 1, 4),
        K.conv(8, 9, 12, 3, 1, 1, rank=1),
        K.conv(4, 6, 8, 3, 1, 1, rank=3),
        K.conv_transpose(8, 5, 12, 3, 2, 1),
        K.turned(20, 33, 50, batch=2),
    ],
    "columns": [
        *(G.reduction((0,), op) for op in ("max", "min", "prod", "argmax", "argmin")),
        *(G.reduction((0, 1), "sum", dtype) for dtype in sorted(FLOATS)),
        K.max_pool(8, 16),
        G.pooling(),
        G.located_pooling(),
    ],
    "transposed": [
        G.crossed((33, 50), (1, 0), dtype) for dtype in sorted({*FLOATS, "float64"} - {"float16"})
    ],
    "elementwise": [G.pointwise((6, 50), dtype) for dtype in sorted(FLOATS)],
    "update": [G.update(in_place=False)],
    "recurrence": [
        G.recurrence("lstm", 33, rows=3, directions=1),
        G.recurrence("gru", 33, rows=1),
        G.recurrence("rnn_tanh", 5, rows=6, static=False),
        G.recurrence("rnn_relu", 16),
    ],
    "grouped_product": [
        G.grouped(),
        G.grouped(9, 33, 20, along_k=False),
        G.grouped(70, 64, 40, dtype="bfloat16"),
    ],
    "lane_per_row": [G.reduction((1, 2)), G.softmax((17, 5, 3)), K.layer_norm((40, 5))],
    "rows": [
        *(G.softmax((4, 9, 70), 2, dtype) for dtype in sorted(FLOATS)),
        *(G.reduction((2,), op) for op in ("max", "min", "prod", "argmax", "argmin")),
        K.layer_norm((3, 5, 64)),
        K.layer_norm((3, 5, 37)),
    ],
}  # fmt: skip


def _inputs(spec: Graph) -> list[Any]:
    """Normal numbers; bytes and words of all bits; places that are there."""
    arrays = K.inputs_for(spec)
    rng = np.random.default_rng(zlib.crc32(spec.digest().encode()))
    for array in arrays:
        kind = array.dtype
        if kind in (np.int8, np.uint8, np.int32):
            whole = np.iinfo(kind)
            array[...] = rng.integers(whole.min, whole.max, array.shape, kind, endpoint=True)
        elif kind.kind == "b":
            array[...] = rng.integers(0, 3, array.shape) > 0
        elif kind == np.int64:
            array[...] = rng.permutation(16)[: array.size].reshape(array.shape)
    return arrays


_SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-3, -1e-3, 87.0, 88.8, -88.0, -104.0,
    1e4, -1e4, 1e9, 1e-30, -1e-30, 3e38, -3e38, np.inf, -np.inf, np.nan,
)  # fmt: skip
_PREDICATES = COMPARISONS | {
    "isnan", "isinf", "logical_not", "logical_and", "logical_or", "logical_xor",
}  # fmt: skip
_NOT_FLOAT = frozenset(op for op in (*UNARY, *BINARY) if op.startswith(("bitwise", "shift")))
_NUMEL = 1024


def _operands(dtype: str) -> list[Any]:
    """Two arrays of numbers, the special ones among them in all pairs."""
    rng = np.random.default_rng(3)
    kind = numpy_dtype(dtype)
    if dtype in FLOATS:
        special, spread = np.array(_SPECIAL), rng.choice([0.1, 1, 10, 300], _NUMEL)
        found = rng.normal(size=(2, _NUMEL)) * spread
    elif dtype == "bool":
        return [np.asarray(rng.integers(0, 2, _NUMEL), bool) for _ in range(2)]
    else:
        whole = np.iinfo(kind)
        special = np.array([whole.min, 0, 1, 2, 3, 5, 31, 63, whole.max], kind)
        found = rng.integers(whole.min, whole.max, (2, _NUMEL), kind, endpoint=True)
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1)
    found[:, : pairs.shape[1]] = pairs
    with np.errstate(over="ignore"):
        return [row.astype(kind) for row in found]


def _pointwise(op: str, dtype: str) -> Kernel | None:
    from tests.families.test_scalar import FLOAT_ONLY

    if op in (_NOT_FLOAT if dtype in FLOATS else FLOAT_ONLY):
        return None
    b = GraphBuilder()
    arrays = _operands(dtype)[: 1 if op in UNARY else 2]
    operands = [b.input(i, a.shape, dtype) for i, a in enumerate(arrays)]
    given = "bool" if op in _PREDICATES else dtype
    out = b.append(op, tuple(operands), arrays[0].shape, given)
    return Kernel(b.finish([out]), arrays, label=op)


def _cast(dtype: str, to: str) -> Kernel:
    b = GraphBuilder()
    array = _operands(dtype)[0]
    if dtype in FLOATS and to not in FLOATS:  # what lies outside is nobody's
        array = np.nan_to_num(np.clip(array, 0, 100).astype(array.dtype))
    return Kernel(b.finish([b.cast(b.input(0, array.shape, dtype), to)]), [array], label=to)
