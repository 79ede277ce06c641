"""What a row kernel consists of: a domain of rows, reductions along them, values worth keeping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import EXPENSIVE, ITEMSIZE, OpKind
from torch_pruner.graph.strided import dense, strided

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape


@dataclass(frozen=True, slots=True)
class RowDomain:
    """``reductions`` in order, all over ``axes`` of ``shape``.

    Nodes of that shape are *full*, others have one element per row.
    """

    shape: Shape
    axes: tuple[int, ...]
    reductions: tuple[int, ...]
    kept_values: tuple[int, ...]  # full nodes computed once and read again by a later pass

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.shape)) if a not in self.axes)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[a] for a in self.kept)

    @property
    def width(self) -> int:
        return math.prod(self.shape[a] for a in self.axes)


def row_domain(spec: Graph) -> RowDomain:
    """Read the domain off a kernel graph whose reductions all share one.

    Raises ``ValueError`` if they do not.
    """
    reductions = tuple(i for i, n in enumerate(spec.nodes) if n.kind is OpKind.REDUCE)
    if not reductions:
        raise ValueError("the kernel graph has no reduction")
    first = spec.nodes[reductions[0]]
    shape, axes = spec.nodes[first.inputs[0]].shape, first.attr("axes")
    for r in reductions:
        node = spec.nodes[r]
        if spec.nodes[node.inputs[0]].shape != shape or node.attr("axes") != axes:
            raise ValueError("the reductions are not over the same rows")
    return RowDomain(shape, axes, reductions, _worth_keeping(spec, shape, reductions))


def passes(spec: Graph) -> list[tuple[int, ...]]:
    """The reductions of a row kernel in as few sweeps as they need: those of one do not read each
    other."""
    depth: list[int] = []
    for node in spec.nodes:
        below = max((depth[i] for i in node.inputs), default=0)
        depth.append(below + (node.kind is OpKind.REDUCE))
    found: dict[int, list[int]] = {}
    for i, node in enumerate(spec.nodes):
        if node.kind is OpKind.REDUCE:
            found.setdefault(depth[i], []).append(i)
    return [tuple(found[k]) for k in sorted(found)]


def meet_others(spec: Graph, domain: RowDomain) -> bool:
    """Whether a value that is kept may be read at another place of its row than where it was
    computed."""
    above = set(domain.kept_values)
    for i, node in enumerate(spec.nodes):
        if node.kind is OpKind.REDUCE or not above.intersection(node.inputs):
            continue
        if node.kind is not OpKind.POINTWISE:
            return True
        above.add(i)
    return False


def steps_along(spec: Graph, domain: RowDomain, axis: int) -> list[tuple[int, int, int]]:
    """Of every full value that lies in memory: how many elements it has, the bytes of one, and how
    many elements apart neighbours along ``axis`` are; 0 where they are the same element."""
    found = []
    for i, node in enumerate(spec.nodes):
        if node.shape != domain.shape or not (node.op == "input" or node.kind is OpKind.VIEW):
            continue
        users = (n.kind for n in spec.nodes if i in n.inputs)
        if any(kind in (OpKind.POINTWISE, OpKind.REDUCE) for kind in users):
            place = strided(spec, i)
            steps = dense(node.shape) if place is None else place.strides
            whole = math.prod(e for e, s in zip(node.shape, steps, strict=True) if s)
            found.append((whole, ITEMSIZE[node.dtype], abs(steps[axis])))
    for o in spec.outputs:
        if full_node(spec, o, domain.shape) is not None:
            node = spec.nodes[o]
            step = _written(spec, o, domain.shape)[axis]
            found.append((node.numel, ITEMSIZE[node.dtype], step))
    return found


def _written(spec: Graph, node: int, shape: Shape) -> tuple[int, ...]:
    """The strides of a full output along the axes of what it is a reordering of."""
    _, chain = viewed(spec, node)
    steps = dense(spec.nodes[node].shape)
    for after in reversed(chain):
        n = spec.nodes[after]
        if n.op != "permute":  # neighbours stay neighbours, but for the ends of axes
            return dense(shape)
        perm = n.attr("perm")
        steps = tuple(steps[perm.index(axis)] for axis in range(len(perm)))
    return steps


def full_node(spec: Graph, node: int, shape: Shape) -> int | None:
    """The full node that ``node`` is a bijective view of, or None when it holds one value per row.

    Views are looked through even where they keep the shape: a transposed square is not in row
    order.
    """
    base = viewed(spec, node)[0]
    return base if spec.nodes[base].shape == shape else None


def viewed(spec: Graph, node: int) -> tuple[int, tuple[int, ...]]:
    """What an output is computed from by reordering alone, and the views from there to it."""
    chain: list[int] = []
    while spec.nodes[node].op in ("permute", "reshape"):
        chain.append(node)
        node = spec.nodes[node].inputs[0]
    return node, tuple(reversed(chain))


def _worth_keeping(spec: Graph, shape: Shape, reductions: tuple[int, ...]) -> tuple[int, ...]:
    """Full pointwise nodes with an expensive part that more than one pass over the row reads."""
    passes: dict[int, set[int]] = {}
    roots = [(k, spec.nodes[r].inputs[0]) for k, r in enumerate(reductions)]
    last = len(reductions)
    roots += [(last, o) for o in spec.outputs if full_node(spec, o, shape) is not None]
    for k, root in roots:
        stack, seen = [root], set()
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            passes.setdefault(i, set()).add(k)
            if spec.nodes[i].kind is not OpKind.REDUCE:
                stack.extend(spec.nodes[i].inputs)
    kept: list[int] = []
    hidden: set[int] = set()
    for i in range(len(spec.nodes) - 1, -1, -1):
        node = spec.nodes[i]
        if (
            i in hidden
            or node.kind is not OpKind.POINTWISE
            or node.shape != shape
            or len(passes.get(i, ())) < 2
        ):
            continue
        if _costly(spec, i):
            kept.append(i)
            hidden |= _below(spec, i)
    return tuple(reversed(kept))


def _below(spec: Graph, node: int) -> set[int]:
    found: set[int] = set()
    stack = list(spec.nodes[node].inputs)
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            stack.extend(spec.nodes[i].inputs)
    return found


def _costly(spec: Graph, node: int) -> bool:
    """Whether computing ``node`` again costs more than reading it from the first-level cache."""
    if spec.nodes[node].op in EXPENSIVE:
        return True
    stack, shape = list(spec.nodes[node].inputs), spec.nodes[node].shape
    while stack:
        i = stack.pop()
        n = spec.nodes[i]
        if n.shape != shape or n.kind is not OpKind.POINTWISE:
            continue
        if n.op in EXPENSIVE:
            return True
        stack.extend(n.inputs)
    return False
