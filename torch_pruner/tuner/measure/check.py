"""Inputs on which candidates are checked and timed, and which difference is an error.

Only numpy. Inputs come from a seed, so every worker makes the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.graph.extents import Bound, false_beyond, unneeded, unspecified
from torch_pruner.graph.ops import FLOATS, OpKind
from torch_pruner.graph.precision import is_fast, is_tf32
from torch_pruner.graph.reference import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.graph.ir import Graph, Node
    from torch_pruner.tuner.measure.base import EvaluatorSpec

Array = np.ndarray[Any, Any]

# Rounding of a dtype relative to float32's, capped: how much wider its tolerance is.
_LOOSER = {"float64": 1.0, "float32": 1.0, "float16": 10.0, "bfloat16": 50.0}
_TF32 = _LOOSER["float16"]  # which has as many bits of mantissa
_POSITIVE = frozenset(("sqrt", "rsqrt", "log", "log2", "log10", "reciprocal"))
# A rounding difference before one of these can move the result by a whole step.
_STEPS = frozenset(
    (
        "floor",
        "ceil",
        "trunc",
        "round",
        "sign",
        "floordiv",
        "mod",
        "truncdiv",
        "fmod",
        "argmax",
        "argmin",
    )
) | frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
MAX_STEPPED = 1e-3  # share of elements that such a step may change


LESS = 8  # times less that counts, at the smaller one of two sizes
ALIGNMENT = 64  # bytes, as generated code assumes


def aligned(shape: Sequence[int], dtype: str) -> Array:
    """A dense array on an address that kernels take, of zeros."""
    kind = numpy_dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(kind).reshape(tuple(shape))


def aligned_copy(value: Array) -> Array:
    copy = aligned(value.shape, value.dtype.name)
    copy[...] = value
    return copy


def aligned_copies(value: Array, count: int, spare: list[Array]) -> list[Array]:
    """``count`` aligned copies, in memory taken from ``spare`` where it fits: fresh pages cost."""
    fits = [a for a in spare if a.nbytes == value.nbytes][:count]
    spare[:] = [a for a in spare if not any(a is taken for taken in fits)]
    copies = [a.reshape(-1).view(value.dtype).reshape(value.shape) for a in fits]
    for copy in copies:
        copy[...] = value
    return copies + [aligned_copy(value) for _ in range(count - len(copies))]


def random_inputs(spec: Graph, seed: int) -> list[Array]:
    """One array per input of ``spec``, in index order: valid where an input is used as an index."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, int(spec.digest()[:8], 16)]))
    limits = _index_limits(spec)
    positive = set(_sources(spec, (n.inputs[0] for n in spec.nodes if n.op in _POSITIVE)))
    positive |= set(_sources(spec, (n.inputs[1] for n in spec.nodes if n.op == "div")))
    counts = counted(spec)
    shares = _shares(spec)
    words = {n.inputs[1] for n in spec.nodes if n.op == "matmul_grouped"}
    ends = _rows_of_ends(spec)
    arrays = []
    for position in spec.inputs:
        node = spec.nodes[position]
        if node.dtype == "bool":
            value: Array = rng.random(node.shape) < 0.5
        elif node.dtype in FLOATS:
            value = rng.standard_normal(node.shape, dtype=np.float32)
            if position in positive:
                value = np.abs(value) + np.float32(0.1)
            value *= np.float32(shares.get(position, 1.0))
        elif position in counts:
            value = np.full(node.shape, counts[position])
        elif position in ends:
            value = np.sort(rng.integers(0, ends[position] + 1, size=node.shape))
            value[-1] = ends[position]
        elif position in words:
            value = rng.integers(-(2**31), 2**31, size=node.shape)
        else:
            value = rng.integers(0, max(1, limits.get(position, 8)), size=node.shape)
        arrays.append(
            np.ascontiguousarray(value, dtype=numpy_dtype(node.dtype)).reshape(node.shape)
        )
    return arrays


def _shares(spec: Graph) -> dict[int, float]:
    """By input that holds weights of a recurrence what they are multiplied by: so small that states
    forget where they began, else differences of rounding would grow from step to step."""
    weights = [n.inputs[1] for n in spec.nodes if n.kind is OpKind.RECURRENCE]
    return {
        source: 0.5 / math.sqrt(spec.nodes[w].shape[1])
        for w in weights
        for source in _sources(spec, (w,))
    }


def _rows_of_ends(spec: Graph) -> dict[int, int]:
    """By input that says where groups of rows end, how many rows there are."""
    return {
        source: node.shape[0]
        for node in spec.nodes
        if node.kind is OpKind.GROUPED
        for source in _sources(spec, (node.inputs[2],))
    }


def counted(spec: Graph) -> dict[int, int]:
    """Inputs that say how much of a value counts at run time, and how much that is at most."""
    bounds = _bounds(spec)
    return {b.number: b.extent for b in bounds if spec.nodes[b.number].op == "input"}


def fewer(spec: Graph) -> dict[int, Array]:
    """By input that says how much counts: the number with which about an eighth of all does."""
    most = counted(spec)
    share = LESS ** (1 / len(most)) if most else 1.0
    found = {}
    for position, extent in most.items():
        node = spec.nodes[position]
        found[position] = aligned(node.shape, node.dtype)
        found[position][...] = math.ceil(extent / share)
    return found


def _bounds(spec: Graph) -> set[Bound]:
    """Whatever ``spec`` says of the extents of values: all of each is computed and compared."""
    known = (*unneeded(spec), *false_beyond(spec), *(unspecified(spec, o) for o in spec.outputs))
    return set().union(*known)


def _index_limits(spec: Graph) -> dict[int, int]:
    """For each input that indexes something, the smallest dimension that it indexes."""
    limits: dict[int, int] = {}
    for node in spec.nodes:
        if node.op in ("take", "gather"):
            extent = spec.nodes[node.inputs[0]].shape[node.attr("dim")]
            for source in _sources(spec, (node.inputs[1],)):
                limits[source] = min(limits.get(source, extent), extent)
        elif node.kind is OpKind.UPDATE:
            extents = node.shape[node.attr("dim") :]
            for extent, index in zip(extents, node.inputs[2:], strict=False):
                for source in _sources(spec, (index,)):
                    limits[source] = min(limits.get(source, extent), extent)
    return limits


def _sources(spec: Graph, positions: Iterable[int]) -> list[int]:
    """Inputs whose values reach ``positions`` through views, casts and pointwise arithmetic."""
    found, stack, seen = [], list(positions), set[int]()
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        node = spec.nodes[i]
        if node.op == "input":
            found.append(i)
        elif node.kind in (OpKind.VIEW, OpKind.POINTWISE):
            stack.extend(node.inputs)
    return found


def reduction_length(spec: Graph) -> int:
    """Elements that the longest sum of the kernel adds up."""
    return max((_terms(spec, node) for node in spec.nodes), default=1)


def _terms(spec: Graph, node: Node) -> int:
    if node.op in ("matmul", "matmul_grouped"):
        return spec.nodes[node.inputs[0]].shape[-1]
    if node.op in ("conv", "conv_transpose"):
        weight = spec.nodes[node.inputs[1]].shape
        channels = weight[1] if node.op == "conv" else weight[0]
        return channels * math.prod(weight[2:])
    if node.kind in (OpKind.RECURRENCE, OpKind.GROUPED):
        return spec.nodes[node.inputs[1]].shape[1]
    if node.op in ("sum", "prod"):
        return max(1, spec.nodes[node.inputs[0]].numel // max(1, node.numel))
    if node.op == "window_sum":
        return math.prod(node.attr("kernel"))
    return 1


@dataclass(frozen=True, slots=True)
class Expectation:
    """One reference output and, for floats, how far from it each element may be."""

    value: Array
    limit: Array | None
    stepped: int


def expectations(
    spec: Graph, outputs: Sequence[Array], evaluator: EvaluatorSpec
) -> list[Expectation]:
    """Tolerances of ``evaluator``, wider for coarser dtypes, longer sums and larger values."""
    dtypes = {n.dtype for n in spec.nodes if n.dtype in FLOATS}
    looser = max((_LOOSER[d] for d in dtypes), default=1.0)
    if any(is_tf32(n) for n in spec.nodes):
        looser = max(looser, _TF32)
    if any(is_fast(n) and n.kind is OpKind.CONTRACT for n in spec.nodes):
        looser = max(looser, _LOOSER["bfloat16"])
    growth = max(1.0, math.sqrt(reduction_length(spec) / 256))
    steps = bool(dtypes) and any(_is_step(spec, n) for n in spec.nodes)
    found = []
    for value in map(np.asarray, outputs):
        stepped = int(value.size * MAX_STEPPED) if steps else 0
        if value.dtype.kind in "biu":
            found.append(Expectation(value, None, stepped))
            continue
        wide = value.astype(np.float64 if value.dtype == np.float64 else np.float32)
        size = np.abs(wide[np.isfinite(wide)])
        largest = float(size.max()) if size.size else 0.0
        with np.errstate(invalid="ignore"):
            limit = looser * (
                evaluator.rtol * np.abs(wide) + evaluator.atol * growth * max(1.0, largest)
            )
        limit = np.where(np.isfinite(wide), limit, 0)  # infinity and NaN must be met exactly
        found.append(Expectation(wide, limit.astype(wide.dtype), stepped))
    return found


def _is_step(spec: Graph, node: Node) -> bool:
    if node.op == "cast":
        return node.dtype not in FLOATS and spec.nodes[node.inputs[0]].dtype in FLOATS
    return node.op in _STEPS


def mismatch(expected: Sequence[Expectation], outputs: Sequence[Array]) -> str:
    """Why ``outputs`` are wrong, in a sentence; empty when they are right."""
    for i, (want, got) in enumerate(zip(expected, outputs, strict=True)):
        if got.shape != want.value.shape:
            return f"output {i} has shape {got.shape}, expected {want.value.shape}"
        bad = _wrong_elements(want, got)
        count = int(np.count_nonzero(bad))
        if count > want.stepped:
            where = np.unravel_index(int(np.argmax(bad)), bad.shape)
            return (
                f"output {i}: {count} of {bad.size} elements differ, first at "
                f"{tuple(int(w) for w in where)}: {got[where]} instead of {want.value[where]}"
            )
    return ""


def _wrong_elements(want: Expectation, got: Array) -> Array:
    if want.limit is None:
        return np.asarray(got != want.value)
    wide = got.astype(want.value.dtype, copy=False)
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(wide - want.value) <= want.limit)
    if (
        bad.any()
    ):  # infinities of one sign and NaN in both are equal; their difference is not a number
        bad &= ~((wide == want.value) | (np.isnan(wide) & np.isnan(want.value)))
    return np.asarray(bad)
