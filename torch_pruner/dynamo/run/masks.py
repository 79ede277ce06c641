"""Masks of dropout by a compiled program, from the numbers that eager's generator would give.

The mask is eager's to the bit, and so is the generator's state afterwards; eager draws one number
after another. How torch keeps that state, and that it draws in this way (it may ask MKL instead),
is no interface: it is tried once, and eager goes on drawing where anything differs.

Another thread that draws from the same generator meanwhile is noticed, and eager draws then.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import torch
from torch import fx

from torch_pruner import fork_locks
from torch_pruner.graph.masks import WORDS, Draw
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    Entry = Callable[[int], object]

log = logger(__name__)

WORTH = 8192
"""Elements from which on a program is faster than eager, the state coming and going."""
_LEFT, _NEXT, _STATE, _BYTES = 8, 16, 24, 5056  # where torch's state has what, and its size
_bernoulli = torch.ops.aten.bernoulli.p
_drawing = fork_locks.lock()


class _Table(threading.local):
    """What each calling thread hands to the program."""

    given: ctypes.Array[ctypes.c_int64] | None = None


class MaskDrawer:
    """``aten.bernoulli.p`` by the entry ``graph.memory.MASKS`` of a program."""

    def __init__(self, entry: Entry) -> None:
        self._entry, self._local = entry, _Table()
        self._faithful: bool | None = None  # not tried yet
        self.__name__ = "bernoulli"  # as graphs' code shows it

    def __call__(
        self, x: torch.Tensor, p: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """A mask like ``x``, true with probability ``p``, which is from 0 to 1."""
        if self._takes(x, p, generator):
            with _drawing:
                if self._faithful is None:
                    self._faithful = self._tried()
                mask = self._drawn(x, p, torch.default_generator) if self._faithful else None
            if mask is not None:
                return mask
        eagers: torch.Tensor = _bernoulli(x, p, generator=generator)
        return eagers

    @staticmethod
    def _takes(x: torch.Tensor, p: float, generator: torch.Generator | None) -> bool:
        plain = generator is None and type(x) is torch.Tensor and x.device.type == "cpu"
        fits = x.dtype == torch.bool and x.is_contiguous() and x.numel() >= WORTH
        return plain and fits and 0 <= p <= 1

    def _drawn(self, x: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor | None:
        """The mask, the generator being as eager would leave it; None and nothing changed where
        its state is none that we know, or another thread drew meanwhile."""
        before = generator.get_state()
        if before.numel() != _BYTES:
            return None
        after = before.clone()
        address = after.data_ptr()
        left = ctypes.c_int32.from_address(address + _LEFT)
        following = ctypes.c_uint64.from_address(address + _NEXT)
        if not 1 <= left.value <= WORDS or (left.value > 1 and left.value + following.value != 625):
            return None
        mask = torch.empty_like(x)
        draw = Draw.of(mask.numel(), p, left.value, following.value)
        left.value, following.value = draw.state_after(left.value)
        given = self._local.given
        if given is None:
            given = self._local.given = (ctypes.c_int64 * (2 + len(draw)))()
        given[:] = [address + _STATE, mask.data_ptr(), *draw]
        self._entry(ctypes.addressof(given))
        if not torch.equal(generator.get_state(), before):
            return None
        generator.set_state(after)
        return mask

    def _tried(self) -> bool:
        """Whether masks and states are eager's, from several states on."""
        try:
            faithful = all(self._agrees(*case) for case in _CASES)
        except RuntimeError as err:
            log.debug("masks of dropout were tried: %s", err)
            faithful = False
        if not faithful:
            log.info("eager draws masks of dropout: torch draws in another way than expected")
        return faithful

    def _agrees(self, drawn_before: int, count: int, p: float) -> bool:
        ours, eagers = (torch.Generator().manual_seed(7) for _ in range(2))
        for generator in (ours, eagers):
            torch.rand(drawn_before, generator=generator)
        x = torch.empty(count, dtype=torch.bool)
        mask = self._drawn(x, p, ours)
        expected = _bernoulli(x, p, generator=eagers)
        return (
            mask is not None
            and torch.equal(mask, expected)
            and torch.equal(ours.get_state(), eagers.get_state())
        )


_CASES = ((0, 1500, 0.9), (3, 3001, 0.3), (9, 100, 0.5), (624, 312, 0.9))
"""Numbers drawn before, elements and probability."""


def draws(step: fx.GraphModule) -> bool:
    """Whether a step draws masks of a size that a program is faster for, or of an unknown one."""
    return any(_is_large(node) for node in step.graph.nodes if node.target is _bernoulli)


def _is_large(node: fx.Node) -> bool:
    mask = node.meta.get("val")
    return not isinstance(mask, torch.Tensor) or mask.numel() >= WORTH


def with_drawer(step: fx.GraphModule, drawer: MaskDrawer) -> fx.GraphModule:
    """An eager step whose masks ``drawer`` draws; ``step`` itself where it draws none."""
    if not draws(step):
        return step
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in step.graph.nodes:
        copy = graph.node_copy(node, copies.__getitem__)
        if node.target is _bernoulli:
            copy.target = drawer
        copies[node] = copy
    return fx.GraphModule(step, graph)
