"""Search spaces: which schedules exist for a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.contraction import constant_operand, contraction_of
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.rows import full_node, row_domain
from torch_pruner.tuner.sketch.attention import AttentionSketch
from torch_pruner.tuner.sketch.axpy import AxpySketch
from torch_pruner.tuner.sketch.base import Sketch, Symbols
from torch_pruner.tuner.sketch.contraction import ContractionSketch
from torch_pruner.tuner.sketch.depthwise import DepthwiseSketch
from torch_pruner.tuner.sketch.gpu import (
    GpuAttentionSketch,
    GpuColumnsSketch,
    GpuDirectSketch,
    GpuElementwiseSketch,
    GpuProductSketch,
    GpuRowsSketch,
)
from torch_pruner.tuner.sketch.gradient import GradientSketch
from torch_pruner.tuner.sketch.in_place import InPlaceSketch
from torch_pruner.tuner.sketch.pairs import DotSketch, TilesSketch
from torch_pruner.tuner.sketch.sweeps import (
    AbreastSketch,
    ColumnsSketch,
    InjectiveSketch,
    RowsSketch,
)
from torch_pruner.tuner.sketch.winograd import WinogradSketch, takes_winograd

if TYPE_CHECKING:
    from torch_pruner.task import Task

__all__ = [
    "AbreastSketch",
    "AttentionSketch",
    "AxpySketch",
    "ColumnsSketch",
    "ContractionSketch",
    "DepthwiseSketch",
    "DotSketch",
    "GradientSketch",
    "InPlaceSketch",
    "InjectiveSketch",
    "RowsSketch",
    "Sketch",
    "Symbols",
    "TilesSketch",
    "WinogradSketch",
    "drop_space",
    "sketches_for",
    "use_space",
]

_spaces: list[type[Sketch]] = []


def use_space(space: type[Sketch]) -> None:
    """From now on tune in ``space`` where it ``fits``, in place of the built-in sketch of its name.

    A subclass of a built-in sketch can offer other options (``domains``), exclude points
    (``valid``) or estimate them otherwise (``symbols``). Its name says which emitter makes its
    kernels, which has to be able to emit every point that is valid; decisions say all there is to
    say about a kernel, so other processes run what was found here without knowing the space.
    Of several that fit, the one added last counts. Adding a space again does nothing.
    """
    if space not in _spaces:
        _spaces.append(space)


def drop_space(space: type[Sketch]) -> None:
    """Undo ``use_space``; nothing happens if it was not used."""
    if space in _spaces:
        _spaces.remove(space)


def sketches_for(task: Task) -> list[Sketch]:
    """Every sketch that can express the task, most specific first. Never empty."""
    own = {space.name: space for space in _spaces if space.fits(task)}
    return [own[s.name](task) if s.name in own else s for s in _built_in(task)]


def _built_in(task: Task) -> list[Sketch]:
    spec = task.spec
    kinds = {n.kind for n in spec.nodes}
    if task.target.is_gpu:
        return _on_gpu(task, kinds)
    if OpKind.CONTRACT in kinds and OpKind.REDUCE in kinds:
        return [AttentionSketch(task)]
    if OpKind.CONTRACT in kinds:
        con = contraction_of(spec)
        if con.form == "depthwise" and constant_operand(spec, con) is not None:
            return [DepthwiseSketch(task)]
        pairs = [s(task) for s in (TilesSketch, DotSketch) if s.fits(task)]
        tiles = [WinogradSketch(task)] if takes_winograd(task) else []
        turned = [GradientSketch(task)] if GradientSketch.fits(task) else []
        lying = [s(task) for s in (InPlaceSketch, AxpySketch) if s.fits(task)]
        return [*lying, *turned, *pairs, *tiles, ContractionSketch(task)]
    if OpKind.WINDOW in kinds:
        return [ColumnsSketch(task)]
    if OpKind.REDUCE not in kinds:
        return [InjectiveSketch(task)]
    found: list[Sketch] = []
    domain = row_domain(spec)
    if all(full_node(spec, o, domain.shape) is None for o in spec.outputs) and _same_shape(task):
        found.append(ColumnsSketch(task))
    if AbreastSketch.fits(task):
        found.append(AbreastSketch(task))
    if not any(n.op.startswith("arg") for n in spec.nodes):
        found.append(RowsSketch(task))
    return found


def _on_gpu(task: Task, kinds: set[OpKind]) -> list[Sketch]:
    spec = task.spec
    if OpKind.CONTRACT in kinds and OpKind.REDUCE in kinds:
        return [GpuAttentionSketch(task)]
    if OpKind.CONTRACT in kinds:
        if contraction_of(spec).form == "depthwise":
            return [GpuDirectSketch(task)]
        return [GpuProductSketch(task), GpuDirectSketch(task)]
    if OpKind.WINDOW in kinds:
        return [GpuColumnsSketch(task)]
    if OpKind.REDUCE not in kinds:
        return [GpuElementwiseSketch(task)]
    domain = row_domain(spec)
    found: list[Sketch] = [GpuRowsSketch(task)]
    if all(full_node(spec, o, domain.shape) is None for o in spec.outputs) and _same_shape(task):
        found.append(GpuColumnsSketch(task))
    return found


def _same_shape(task: Task) -> bool:
    return len({task.spec.nodes[o].shape for o in task.spec.outputs}) == 1
