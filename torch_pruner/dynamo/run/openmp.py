"""Small operators of eager's between kernels run on one thread, where kernels have other threads.

The threads of torch's OpenMP look for work for milliseconds after each parallel loop, and so do
those of TVM's pool: with as many threads as cores each takes the other's core, and a copy of some
microseconds makes the kernels after it take up to twice as long. How long OpenMP's look is read
when torch is loaded, which no library can change afterwards; with one thread there is no loop after
which any would.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from torch_pruner.devices.openmp import loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from torch_pruner.dynamo.lower.calls import RuntimeValue, StepCall

Result = TypeVar("Result")

SMALL_BYTES: Final = 8 << 20
"""What one thread computes in less time than the kernels after it would lose: it reads and writes
so much in two milliseconds or so."""
_aten = torch.ops.aten
# Beside what is computed element by element, and views: each reads and writes its operands once.
_LIGHT: Final = frozenset(
    (
        _aten.arange, _aten.cat, _aten.clone, _aten._to_copy, _aten.constant_pad_nd, _aten.copy,
        _aten.copy_, _aten.embedding, _aten.embedding_dense_backward, _aten.empty,
        _aten.empty_strided, _aten.fill, _aten.full, _aten.full_like, _aten.gather, _aten.index,
        _aten.index_put, _aten.index_select, _aten.new_zeros, _aten.ones, _aten.repeat,
        _aten.scalar_tensor, _aten.scatter, _aten.select_backward, _aten.slice_backward,
        _aten.stack, _aten.zeros, _aten.zeros_like,
    )
)  # fmt: skip


def on_one_thread(work: Callable[..., Result], *args: object) -> Result:
    """``work(*args)``, whose loops have one thread. Does nothing more with an unknown OpenMP."""
    openmp = loaded()
    if openmp is None or (most := openmp.most()) < 2:
        return work(*args)
    openmp.limit(1)
    try:
        return work(*args)
    finally:
        openmp.limit(most)


def is_light(step: fx.GraphModule) -> bool:
    """Whether an eager step computes something, and reads and writes its values a few times."""
    ops = [n.target for n in step.graph.nodes if n.op not in ("placeholder", "output")]
    return all(map(_is_light, ops)) and not all(map(_is_view, ops))


def _is_light(op: object) -> bool:
    if not isinstance(op, torch._ops.OpOverload):
        return op is operator.getitem
    return op.is_view or torch.Tag.pointwise in op.tags or op.overloadpacket in _LIGHT


def _is_view(op: object) -> bool:
    return op is operator.getitem or (isinstance(op, torch._ops.OpOverload) and op.is_view)


class SmallOnOneThread:
    """A light step of eager's, on one thread when its last call's values were small."""

    def __init__(self, run: StepCall) -> None:
        self._run, self._small = run, False

    def __call__(self, values: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
        results = on_one_thread(self._run, values) if self._small else self._run(values)
        tensors = (v for v in (*values, *results) if isinstance(v, torch.Tensor))
        self._small = sum(t.nbytes for t in tensors) <= SMALL_BYTES
        return results
