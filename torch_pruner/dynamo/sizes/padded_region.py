"""A region at one size, computed by kernels for a larger one: what goes in, and what comes out.

Inputs are copied into the first elements of larger tensors, results are cut. The larger tensors
are kept for the next call, whatever its size, so that few zeros are written. What a result was
copied from is kept for it: a cache that comes back to grow by one more token is there already.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from torch_pruner.dynamo.lower.tensors import TensorSpec, dense_strides
from torch_pruner.dynamo.run.row_copies import Rows
from torch_pruner.graph.bucket import Bucket, bucketed
from torch_pruner.graph.memory import ALIGNMENT
from torch_pruner.graph.updates import written_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.calls import RuntimeValue, StepCall
    from torch_pruner.dynamo.lower.program import RegionStep
    from torch_pruner.dynamo.run.row_copies import RowCopier
    from torch_pruner.graph.ir import Graph

__all__ = ["PaddedRegion", "Spare", "bucket_of", "with_room"]

GRAIN = 32768  # elements from which on torch divides a copy among threads
MUCH = 64 * GRAIN
CHAINS = 4  # calls whose results are looked for among the inputs of later ones


def bucket_of(large: RegionStep, small: RegionStep) -> Bucket:
    """The graph that computes both; padded inputs are copies that end with zeros.

    Raises ``NotAlikeError``.
    """
    pairs = zip(large.inputs, small.inputs, strict=True)
    zeroed = [k for k, (a, b) in enumerate(pairs) if a.shape != b.shape]
    written = [k for k in zeroed if _row_major(large.inputs[k])]
    bucket = bucketed(large.graph, small.graph, zeroed, written)
    if all(_row_major(large.outputs[j]) for j in written_inputs(bucket.graph)):
        return bucket
    return bucketed(large.graph, small.graph, zeroed)


def _row_major(spec: TensorSpec) -> bool:
    return spec.dense and spec.order == tuple(range(len(spec.shape)))


def with_room(region: RegionStep, graph: Graph) -> RegionStep:
    """``region`` with its inputs as large as those of a bucket's ``graph``."""
    shapes = [graph.nodes[i].shape for i in graph.inputs]
    inputs = [
        spec
        if spec.shape == shape
        else TensorSpec.make(shape, dense_strides(shape, spec.order), spec.dtype)
        for spec, shape in zip(region.inputs, shapes, strict=False)
    ]
    return replace(region, inputs=tuple(inputs))


class _Source(NamedTuple):
    """What a result was copied from: ``large``, as it was then, begins with the same elements."""

    result: weakref.ref[torch.Tensor]
    version: int
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    spec: TensorSpec
    large: torch.Tensor

    def serves(self, given: torch.Tensor, spec: TensorSpec) -> bool:
        """Whether ``given`` is the result and nobody wrote to it.

        Its version tells, by which autograd knows what it may still use.
        """
        return (
            self.result() is given
            and given._version == self.version
            and given.data_ptr() == self.address
            and given.shape == self.shape
            and given.stride() == self.strides
            and self.spec is spec
        )


class Spare:
    """Tensors that padded inputs lay in, to be used again: as many as calls had at one time.

    Safe for several threads.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], list[tuple[torch.Tensor, tuple[int, ...]]]] = {}
        self._sources: OrderedDict[int, _Source] = OrderedDict()  # by the identity of the result
        self._specs: dict[TensorSpec, TensorSpec] = {}

    def known(self, spec: TensorSpec) -> TensorSpec:
        """The one of all specs that are like this."""
        return self._specs.setdefault(spec, spec)

    def take(self, spec: TensorSpec, given: torch.Tensor) -> torch.Tensor:
        """A tensor as ``spec`` says that begins with ``given`` along each axis; zeros follow."""
        source = self._sources.pop(id(given), None)
        if source is not None:
            if source.serves(given, spec):
                return source.large
            self._give_back(source)
        large, filled = self._unused(spec, given)
        for axis, size in enumerate(given.shape):
            if filled[axis] > size:
                _clear(large.narrow(axis, size, filled[axis] - size))
        _copy(large.as_strided(given.shape, large.stride()), given.detach())
        return large

    def give(self, spec: TensorSpec, tensor: torch.Tensor, filled: Sequence[int]) -> None:
        """Nobody reads or writes ``tensor`` any more; what is not zeros lies in its first elements,
        ``filled`` along each axis."""
        if tensor.device.type == "cpu":  # elsewhere kernels may still be running
            self._kept.setdefault(_kind(spec, tensor), []).append((tensor, tuple(filled)))

    def keep(self, copied: Sequence[tuple[TensorSpec, torch.Tensor, torch.Tensor]]) -> None:
        """As ``give``, of tensors that begin with the elements of results of a call, and hold zeros
        behind them: (spec, tensor, result). ``take`` finds them there when the result comes back,
        once, unless somebody wrote to it or many others came in between."""
        for spec, large, result in copied:
            if large.device.type != "cpu" or result.is_inference():  # without a version
                self.give(spec, large, result.shape)
                continue
            source = _Source(
                weakref.ref(result), result._version, result.data_ptr(), result.shape,
                result.stride(), spec, large,
            )  # fmt: skip
            before, self._sources[id(result)] = self._sources.pop(id(result), None), source
            if before is not None:
                self._give_back(before)
        while len(self._sources) > CHAINS * len(copied):
            self._give_back(self._sources.popitem(last=False)[1])

    def _unused(self, spec: TensorSpec, like: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A tensor that nobody uses, and how far it is filled."""
        kept = self._kept.setdefault(_kind(spec, like), [])
        if not kept:
            for key, source in list(self._sources.items()):
                if source.result() is None and self._sources.pop(key, None) is not None:
                    self._give_back(source)
        try:
            return kept.pop()
        except IndexError:
            return _zeros(spec, like.device), tuple(like.shape)

    def _give_back(self, source: _Source) -> None:
        self.give(source.spec, source.large, source.shape)


def _zeros(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Zeros; on the host pages that nobody touches take no memory, so that room costs none."""
    shape, strides = spec.shape, spec.kernel_strides
    if device.type != "cpu":
        return torch.empty_strided(shape, strides, dtype=spec.dtype, device=device).zero_()
    size = math.prod(shape) * spec.dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    flat = torch.from_numpy(memory[first : first + size]).view(spec.dtype)
    return flat.as_strided(shape, strides)


def _kind(spec: TensorSpec, like: torch.Tensor) -> tuple[object, ...]:
    return spec.shape, spec.kernel_strides, spec.dtype, like.device


class PaddedRegion:
    """A region at one size as a function of its inputs, by the region of a larger one."""

    def __init__(
        self,
        run: StepCall,
        large: RegionStep,
        small: RegionStep,
        counts: Sequence[torch.Tensor],
        spare: Spare,
        copier: RowCopier | None = None,
    ) -> None:
        """``counts`` are the inputs that ``run`` has besides those of ``large``."""
        self._run, self._counts, self._spare = run, tuple(counts), spare
        self._copier = copier
        pairs = enumerate(zip(large.inputs, small.inputs, strict=True))
        self._pads = tuple(
            (i, spare.known(new)) for i, (new, old) in pairs if new.shape != old.shape
        )
        self._cuts = tuple(
            (old, new, None if copier is None else _divided(old, new))
            for old, new in zip(large.outputs, small.outputs, strict=True)
        )

    def __call__(self, inputs: Sequence[RuntimeValue]) -> list[torch.Tensor]:
        given = [*cast("Sequence[torch.Tensor]", inputs), *self._counts]
        filled = {}
        for i, spec in self._pads:
            tensor = given[i]
            given[i] = large = self._spare.take(spec, tensor)
            filled[large.data_ptr()] = spec, large, tuple(tensor.shape)
        made = cast("Sequence[torch.Tensor]", self._run(given))
        results, copied, divided = [], [], []
        for m, (old, new, rows) in zip(made, self._cuts, strict=True):
            if rows is None:
                result = _cut(m, old, new)
            else:
                result = torch.empty_strided(new.shape, new.strides, dtype=new.dtype)
                divided.append((result, m, rows))
            if (address := m.data_ptr()) in filled:  # a padded input, written into
                spec, large, _ = filled.pop(address)
                if result.data_ptr() != address:
                    copied.append((spec, large, result))
            results.append(result)
        if divided:
            cast("RowCopier", self._copier)(divided)
        for spec, large, shape in filled.values():
            self._spare.give(spec, large, shape)
        if copied:
            self._spare.keep(copied)
        return results


def _divided(old: TensorSpec, new: TensorSpec) -> Rows | None:
    """How threads share the copy of what counts of a result; None where one makes it, or none."""
    rows = Rows.of(new, old)
    much = rows is not None and rows.rows > 1 and math.prod(new.shape) >= GRAIN
    return rows if much else None


def _cut(made: torch.Tensor, old: TensorSpec, new: TensorSpec) -> torch.Tensor:
    """What counts of a result, as eager lays it out."""
    if old.shape == new.shape:
        return made
    strides = made.stride()
    pairs = zip(new.shape, strides, new.strides, strict=True)
    wasteful = math.prod(old.shape) > 2 * math.prod(new.shape)  # to keep alive for a view of it
    if not wasteful and all(size == 1 or mine == wanted for size, mine, wanted in pairs):
        return made.as_strided(new.shape, new.strides)
    result = torch.empty_strided(new.shape, new.strides, dtype=new.dtype, device=made.device)
    _copy(result, made.as_strided(new.shape, strides))
    return result


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies on this thread, unless it is much: torch's other threads go on waiting for work for a
    while after they had some, where those of our kernels want to run."""
    if not _better_alone(source):
        target.copy_(source)
    elif source.dtype == torch.bfloat16:  # which numpy has not
        np.copyto(target.view(torch.int16).numpy(), source.view(torch.int16).numpy())
    else:
        np.copyto(target.numpy(), source.numpy())


def _clear(target: torch.Tensor) -> None:
    """Writes zeros, as ``_copy`` copies."""
    if not _better_alone(target):
        target.zero_()
    elif target.dtype == torch.bfloat16:
        target.view(torch.int16).numpy().fill(0)
    else:
        target.numpy().fill(0)


def _better_alone(tensor: torch.Tensor) -> bool:
    """Whether torch would wake its threads for these elements, and it is not much."""
    return GRAIN <= tensor.numel() <= MUCH and tensor.device.type == "cpu"
