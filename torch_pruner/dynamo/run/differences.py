"""How far results are off from eager's, which may be too large to be kept beside them.

Of results that are, some elements and the sums of all are kept at first (``Sampled``). Where these
leave a doubt, eager's results are kept part by part (``Kept``): of each the elements of one part,
and what is known of the whole. Comparing a block at a time keeps what is computed on the way small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.dynamo.lower.calls import RuntimeValue

FREE_BYTES = 32 << 20
"""Results of eager's that are kept whatever else there is."""
SHARE = 0.05
"""The part of eager's memory that is kept beside a call; what is compared at a time adds to it."""
_BLOCK = 1 << 18  # elements that are compared at a time
_SMALL = 1 << 16  # elements of a result that is kept whole
_SUMMED = 64  # elements of which a sum is kept, or more


def parts_for(inputs: Sequence[RuntimeValue], results: Sequence[RuntimeValue]) -> int:
    """In how many parts ``results`` of a call with ``inputs`` are compared.

    So that one part of them is at most ``SHARE`` of both together, which eager's peak is no less
    than.
    """
    made, given = _bytes(results), _bytes(inputs)
    return math.ceil(made / max(SHARE * (made + given), FREE_BYTES)) if made else 1


def _bytes(values: Sequence[RuntimeValue]) -> int:
    """The bytes of all tensors; memory that several share counts once."""
    found = {v.data_ptr(): v.nbytes for v in values if _comparable(v)}
    return sum(found.values())


def _comparable(value: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """One part of a result, and of all of it the number of elements and the largest magnitude."""

    value: RuntimeValue
    where: tuple[int, int, int] | None  # dimension, first index, how many; None: all of it
    shape: tuple[int, ...] = ()
    scale: float = 0.0

    @staticmethod
    def of(result: RuntimeValue, part: int, parts: int, before: Kept | None = None) -> Kept:
        """Part ``part`` of ``parts``: a copy, or the result itself where there is one part.

        ``before``: another part of the same.
        """
        if not _comparable(result):
            return Kept(result, None)
        shape, scale = tuple(result.shape), before.scale if before else _scale(result)
        if parts == 1 or result.numel() <= _SMALL:
            return Kept(result, None, shape, scale)
        dim = max(range(len(shape)), key=lambda d: shape[d])
        first, end = (shape[dim] * k // parts for k in (part, part + 1))
        where = dim, first, end - first
        return Kept(result.narrow(*where).clone(), where, shape, scale)

    def difference(self, got: RuntimeValue) -> float:
        """How far a whole result is off in this part.

        Floats: relative to the largest magnitude, and infinitely if NaN or infinity are elsewhere.
        Integers and booleans: the part of the elements that differ (where floats decide, a sum that
        is zero but for its rounding falls on either side).
        """
        if not _comparable(self.value):
            return 0.0
        assert isinstance(got, torch.Tensor)
        if tuple(got.shape) != self.shape or got.dtype != self.value.dtype:
            return math.inf
        mine = got if self.where is None else got.narrow(*self.where)
        if not self.value.numel():
            return 0.0
        if not (self.value.is_floating_point() or self.value.is_complex()):
            wrong = sum(int((a != b).sum()) for a, b in _blocks(mine, self.value))
            return wrong / math.prod(self.shape)
        error = max(_error(a, b) for a, b in _blocks(mine, self.value))
        return error / max(self.scale, 1e-30) if error else 0.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some elements of a result, and sums over all of its elements."""

    some: Kept  # of the elements at every ``step`` positions of dimension ``dim``
    dim: int
    step: int
    sums: torch.Tensor | None  # None: ``some`` are all elements
    over: tuple[int, ...]  # whole dimensions that sums are over; one alone: of blocks of it
    length: int  # how many elements a sum is of

    @staticmethod
    def of(result: RuntimeValue, parts: int) -> Sampled:
        """Of one part in ``parts``, or all of a small result."""
        if not _comparable(result) or result.numel() <= _SMALL:
            return Sampled(Kept.of(result, 0, 1), 0, 1, None, (), 1)
        shape = tuple(result.shape)
        largest = sorted(range(len(shape)), key=lambda d: -shape[d])
        step = parts | 1  # odd, so that it meets all lanes of a vector
        some = _every(result, largest[0], step).clone()
        over: list[int] = []
        length = 1
        while length < _SUMMED:
            over.append(largest[len(over)])
            length *= shape[over[-1]]
        kept = Kept(some, None, tuple(some.shape), _scale(result))
        length = min(length, 2 * _SUMMED) if len(over) == 1 else length
        return Sampled(kept, largest[0], step, _sums(result, over), tuple(over), length)

    def difference(self, got: RuntimeValue) -> float:
        """How far a whole result is off in these elements and sums, as ``Kept`` says it.

        Errors that have nothing to do with each other add up to the root of their number.
        """
        if self.sums is None:
            return self.some.difference(got)
        assert isinstance(got, torch.Tensor)
        if got.dim() <= self.dim or got.is_complex() is not self.sums.is_complex():
            return math.inf
        sampled = self.some.difference(
            got[(slice(None),) * self.dim + (slice(None, None, self.step),)]
        )
        if sampled == math.inf or self.sums.shape != (sums := _sums(got, self.over)).shape:
            return math.inf
        if not (sums.is_floating_point() or sums.is_complex()):
            return max(sampled, int((sums != self.sums).sum()) / got.numel())
        error = max(_error(a, b) for a, b in _blocks(sums, self.sums))
        return max(sampled, error / max(self.some.scale * math.sqrt(self.length), 1e-30))


def _every(value: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """A view of what lies at every ``step`` positions of ``dim``."""
    return value[(slice(None),) * dim + (slice(None, None, step),)]


def _sums(value: torch.Tensor, over: Sequence[int]) -> torch.Tensor:
    """Of all elements, in sums over these dimensions, or over blocks of a single one."""
    value = value.detach()
    dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else None
    if len(over) > 1:
        return value.sum(tuple(over), dtype=dtype)
    (dim,) = over
    blocks = max(1, value.shape[dim] // _SUMMED)
    whole = (blocks - 1) * _SUMMED  # the last block is as long as what is left
    last = value.narrow(dim, whole, value.shape[dim] - whole).sum(dim, keepdim=True, dtype=dtype)
    if not whole:
        return last
    first = value.narrow(dim, 0, whole).unfold(dim, _SUMMED, _SUMMED).sum(-1, dtype=dtype)
    return torch.cat([first, last], dim)


def differences(
    got: Sequence[RuntimeValue], expected: Sequence[Kept] | Sequence[Sampled]
) -> list[float]:
    """How far each result is off."""
    known: Sequence[Kept | Sampled] = expected
    return [of.difference(value) for value, of in zip(got, known, strict=True)]


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape, block by block."""
    first = tensors[0]
    if first.numel() <= _BLOCK:
        yield tensors
        return
    dim = max(range(first.dim()), key=lambda d: first.shape[d])
    step = max(1, first.shape[dim] * _BLOCK // first.numel())
    for pieces in zip(*(torch.split(t, step, dim) for t in tensors), strict=True):
        yield from _blocks(*pieces)


def _scale(value: torch.Tensor) -> float:
    """The largest finite magnitude of floats."""
    if value.is_complex():
        return max(_scale(value.real), _scale(value.imag))
    if not value.is_floating_point() or not value.numel():
        return 0.0
    return max(_largest(block.detach().double()) for (block,) in _blocks(value))


def _largest(value: torch.Tensor) -> float:
    magnitudes = torch.nan_to_num(value.abs(), nan=0.0, posinf=0.0)
    return float(magnitudes.max().item())


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference of finite elements; infinite if others are elsewhere."""
    if b.is_complex():
        return max(_error(a.real, b.real), _error(a.imag, b.imag))
    x, y = a.detach().double(), b.detach().double()
    infinite = torch.isinf(y)
    if not torch.equal(torch.isnan(x), torch.isnan(y)):
        return math.inf
    if not torch.equal(x[infinite], y[infinite]):
        return math.inf
    difference = torch.nan_to_num((x - y).abs_(), nan=0.0, posinf=math.inf)
    return float(torch.where(infinite, 0.0, difference).max().item())
