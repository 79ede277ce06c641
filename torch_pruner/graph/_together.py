"""Elementwise results that one kernel makes: what one of them reads of another is at hand.

An optimizer's step reads a gradient once and not for everything that is made of it, and a forward
that keeps what it goes on with passes over it once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.graph._groups import State
    from torch_pruner.graph.extents import Bounds
    from torch_pruner.graph.layout import Order

_MOST_OUTPUTS, _MOST_INPUTS = 4, 12  # of a kernel: each is a stream, of which a core follows some
_KINDS = frozenset((OpKind.POINTWISE, OpKind.VIEW, OpKind.LEAF))


def together(
    state: State, singles: Sequence[int], orders: dict[int, Order], bounds: Sequence[Bounds]
) -> list[tuple[int, ...]]:
    """``singles``, buffers that nothing else is made with, by kernels; in graph order."""
    several = [o for group in state.groups if len(group.outputs) > 1 for o in group.outputs]
    units = _Units(state, {s: [s] for s in singles}, min(several, default=len(state.graph.nodes)))
    for b in sorted(singles):
        for a in sorted(units.beside(b)):
            first, second = units.of[a], units.of[b]
            alike = (
                state.node(a).dtype == state.node(b).dtype
                and orders[a] == orders[b]
                and not bounds[a]
                and not bounds[b]
            )
            if alike and first is not second and units.may_join(first, second):
                first += second
                units.of |= dict.fromkeys(second, first)
                units.first = min(units.first, *first)
    return sorted({tuple(sorted(unit)) for unit in units.of.values()})


@dataclass(slots=True)
class _Units:
    """What becomes kernels: buffers that are alone so far, and groups."""

    state: State
    of: dict[int, list[int]]  # by buffer those that are made with it
    first: int  # of all that are made with others
    _reads: dict[int, frozenset[int]] = field(default_factory=dict)

    def reads(self, made: int) -> frozenset[int]:
        """Buffers that a buffer is made of."""
        if made not in self._reads:
            # A group may compute for itself what has a buffer that others read.
            group = None if made in self.of else self.state.group_of.get(made)
            members: set[int] = group.members if group is not None else {made}
            found, stack, seen = set[int](), [*members], set(members)
            while stack:
                for j in self.state.node(stack.pop()).inputs:
                    if j in seen:
                        continue
                    seen.add(j)
                    if j in self.state.buffers:
                        found.add(j)
                    else:
                        stack.append(j)
            self._reads[made] = frozenset(found)
        return self._reads[made]

    def beside(self, b: int) -> set[int]:
        """Single buffers of which ``b`` reads each element at its own place, if all that it is made
        of is elementwise."""
        state, shape = self.state, self.state.node(b).shape
        if state.node(b).kind is not OpKind.POINTWISE or not shape:
            return set()
        found, stack, seen = set[int](), [(b, True)], set[int]()
        while stack:
            i, straight = stack.pop()
            straight = straight and state.node(i).kind is OpKind.POINTWISE
            for j in state.node(i).inputs:
                node = state.node(j)
                if j in state.buffers:
                    if straight and node.shape == shape and self._is_elementwise(j):
                        found.add(j)
                elif node.kind not in _KINDS:
                    return set()
                elif j not in seen:
                    seen.add(j)
                    stack.append((j, straight and node.shape == shape))
        return found

    def _is_elementwise(self, a: int) -> bool:
        """Whether a buffer is alone, and made of nothing but elementwise operators and views."""
        state = self.state
        if a not in self.of or state.node(a).kind is not OpKind.POINTWISE:
            return False
        stack, seen = [a], {a}
        while stack:
            for j in state.node(stack.pop()).inputs:
                if j in seen or j in state.buffers:
                    continue
                if state.node(j).kind not in _KINDS:
                    return False
                seen.add(j)
                stack.append(j)
        return True

    def may_join(self, first: list[int], second: list[int]) -> bool:
        """Whether one kernel may make both: it is not too large, and neither waits for what waits
        for the other."""
        inside = {*first, *second}
        outside = frozenset[int]().union(*(self.reads(i) for i in inside)) - inside
        if len(inside) > _MOST_OUTPUTS or len(outside) > _MOST_INPUTS:
            return False
        return not self._depends(outside, inside)

    def _depends(self, some: Iterable[int], on: set[int]) -> bool:
        # Nothing before the first of them waits for them, unless it is made with something behind.
        low, seen, stack = min(*on, self.first), set[int](), list(some)
        while stack:
            i = stack.pop()
            if i in on:
                return True
            if i in seen or self.state.node(i).op == "input":
                continue
            made = self._made_with(i)
            seen.update(made)
            stack += [j for m in made for j in self.reads(m) if j >= low]
        return False

    def _made_with(self, i: int) -> Sequence[int]:
        """The results of the kernel that makes ``i``, itself among them."""
        group = self.state.group_of.get(i)
        return self.of.get(i) or (group.outputs if group is not None else (i,))
