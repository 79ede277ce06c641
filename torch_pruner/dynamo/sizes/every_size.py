"""A graph's program at any of its sizes, from what it is at three of them.

Written down at a size, a graph of symbolic sizes is a ``Program``; that takes a tenth of a second
and more, and a service sees hundreds of sizes. Where all extents are polynomials of the symbols
(``sizes/formulas.py``) the graph does the same at every size, so a program at one size differs from
that at another in numbers alone. They are found at the size of the kernels and at two smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_pruner.dynamo.lower.program import Program, ProgramStep, RegionStep
from torch_pruner.dynamo.lower.tensors import TensorSpec
from torch_pruner.dynamo.sizes.formulas import Formulas, UnknownNumberError
from torch_pruner.graph.bucket import Bucket, NotAlikeError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch_pruner.dynamo.sizes.varying import Varying
    from torch_pruner.graph._padding import Pair

__all__ = ["EverySize", "Sample", "whole"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A graph at one size: the numbers of its symbols, and its program there."""

    symbols: Mapping[Hashable, int]
    program: Program


class EverySize:
    """The program of a graph, and the counts of its buckets, at all sizes up to ``most``.

    ``samples`` are the graph at three sizes, ``buckets`` what each of its regions is there in the
    kernels. These may be those of another capture of the same graph, for other sizes. Raises
    ``NotAlikeError`` where three sizes do not tell what the graph is at others.
    """

    def __init__(
        self,
        formulas: Formulas,
        varying: Varying,
        most: Mapping[Hashable, int],
        samples: Sequence[Sample],
        buckets: Sequence[Sequence[Bucket]],
    ) -> None:
        self._varying, self._most = varying, most
        programs = [s.program for s in samples]
        self._like, self.buckets = programs[1], buckets[1]
        texts = [_eager_texts(p) for p in programs]
        if any(text != texts[0] for text in texts):
            raise NotAlikeError("what eager runs depends on the size")
        _, first, second = programs
        if any(second.constants.get(k) is not v for k, v in first.constants.items()):
            raise NotAlikeError("constants that depend on the size")
        for alike in zip(*buckets, strict=True):
            if len({bucket.graph.digest() for bucket in alike}) > 1:
                raise NotAlikeError("other kernels at another size")
        try:
            self._read(formulas, programs, buckets)
        except UnknownNumberError as err:
            raise NotAlikeError(str(err)) from err
        self._values = formulas.compiled()

    def _read(
        self,
        formulas: Formulas,
        programs: Sequence[Program],
        buckets: Sequence[Sequence[Bucket]],
    ) -> None:
        def numbers(*of: Sequence[int]) -> tuple[int, ...]:
            return tuple(formulas.number(at) for at in zip(*of, strict=True))

        self._specs: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []
        for regions in zip(*(p.regions for p in programs), strict=True):
            _, first, second = regions
            if (first.checks, first.flags) != (second.checks, second.flags):
                raise NotAlikeError("bounds of indices that depend on the size")
            specs = zip(*((*r.inputs, *r.outputs) for r in regions), strict=True)
            self._specs.append(
                [(numbers(*(t.shape for t in s)), numbers(*(t.strides for t in s))) for s in specs]
            )
        self._counts = [
            numbers(*([n for _, n in bucket.counts] for bucket in alike))
            for alike in zip(*buckets, strict=True)
        ]
        self._outputs: list[int | None] = []
        for places in zip(*(p.outputs for p in programs), strict=True):
            values = [value for _, value in places]
            known = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
            self._outputs.append(formulas.number(values) if known else None)

    @property
    def most(self) -> Mapping[Hashable, int]:
        """The numbers of the symbols that the kernels are made for."""
        return self._most

    def covers(self, symbols: Mapping[Hashable, int]) -> bool:
        """Whether these numbers of the symbols are at most those of the kernels."""
        return self._varying.covers(symbols, self._most)

    def at(self, symbols: Mapping[Hashable, int]) -> tuple[Program, list[Bucket]] | None:
        """The program, and the buckets with their counts; None where something would be empty."""
        values = self._values(symbols)
        buckets = []
        for bucket, places in zip(self.buckets, self._counts, strict=True):
            counts: list[Pair] = [
                (most, values[k]) for (most, _), k in zip(bucket.counts, places, strict=True)
            ]
            if any(not 1 <= n <= most for most, n in counts):
                return None
            buckets.append(replace(bucket, counts=tuple(counts)))
        steps, regions = list[ProgramStep](), iter(self._specs)
        for step in self._like.steps:
            if isinstance(step.does, RegionStep):
                step = replace(step, does=_sized(step.does, next(regions), values))
            steps.append(step)
        outputs = [
            (number, value) if k is None else (number, values[k])
            for (number, value), k in zip(self._like.outputs, self._outputs, strict=True)
        ]
        return replace(self._like, steps=tuple(steps), outputs=tuple(outputs)), buckets


def whole(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The same buckets at the size that their kernels are made for."""
    return [replace(b, counts=tuple((most, most) for most, _ in b.counts)) for b in buckets]


def _eager_texts(program: Program) -> list[str]:
    """What eager runs, with all numbers that it has among its arguments."""
    return [str(s.does.graph) for s in program.steps if not isinstance(s.does, RegionStep)]


def _sized(
    region: RegionStep,
    places: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    values: Sequence[int],
) -> RegionStep:
    specs = [
        TensorSpec.make([values[k] for k in shape], [values[k] for k in strides], spec.dtype)
        for spec, (shape, strides) in zip((*region.inputs, *region.outputs), places, strict=True)
    ]
    n = len(region.inputs)
    return replace(region, inputs=tuple(specs[:n]), outputs=tuple(specs[n:]))
