"""Kernels of few rows that read weights in a layout that another program has in memory.

Decoding follows a prompt: the prompt's kernels want packed panels, those of a step would read the
weights where they lie, and so both would be in memory. A product of few rows takes as long as its
weights take to come from memory, in whichever order they lie. Where memory is what counts
(``weights="frozen"``), it therefore reads the copy that is there, and the original can be freed;
not where it would read a copy of fewer bytes, as weights in twelve bits are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.compiler.choice import Choice
from torch_pruner.families.contraction import FAMILY
from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.quantize import FEW_ROWS
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch_pruner.families.space import Decisions, Mask, Sketch
    from torch_pruner.graph.packing import PackLayout
    from torch_pruner.task import Task


def keep_to(
    tasks: Iterable[Task], choices: Mapping[str, Choice], held: Collection[PackLayout]
) -> dict[str, Choice]:
    """``choices``, by workload, with others for products of few rows that ``held`` will do for.

    These are drafts: nothing is timed.
    """
    found = dict(choices)
    for task in tasks if held else ():
        chosen = choices[task.workload].candidate
        packs = _packs(task, chosen)
        if packs and all(p in held for p in packs):
            continue
        other = _reading(task, held)
        if other is None or (packs and _nbytes(packs) < _nbytes(_packs(task, other))):
            continue  # nothing to keep to, or weights in fewer bits than that has
        found[task.workload] = Choice(other, "untuned")
    return found


def _packs(task: Task, candidate: Candidate) -> list[PackLayout]:
    found = families.signature_of(task.spec, candidate).packs
    return [layout for layout in found if layout is not None]


def _nbytes(layouts: Iterable[PackLayout]) -> int:
    return sum(layout.nbytes for layout in layouts)


def _reading(task: Task, held: Collection[PackLayout]) -> Candidate | None:
    """The best draft of a product of few rows whose weights lie as one of ``held`` says."""
    sketch = next((s for s in families.sketches_for(task) if s.name == FAMILY.name), None)
    if sketch is None:
        return None
    product = contraction_of(task.spec)
    if product.rows > FEW_ROWS or constant_operand(task.spec, product) is None:
        return None
    best: tuple[float, Candidate] | None = None
    for block in sorted({layout.block for layout in held}):
        point = sketch.best_within(partial(_of_width, sketch, block))
        if point is None:
            continue
        candidate = Candidate(sketch.name, tuple(sorted(sketch.named(point).items())))
        packs = _packs(task, candidate)
        seconds = float(sketch.symbols(point[None]).latency_s[0])
        if all(p in held for p in packs) and (best is None or seconds < best[0]):
            best = seconds, candidate
    return None if best is None else best[1]


def _of_width(sketch: Sketch, block: int, points: Decisions) -> Mask:
    """Which points have panels of so many columns."""
    c = sketch.columns(points)
    found: Mask = c.vl * c.nv == block
    return found
