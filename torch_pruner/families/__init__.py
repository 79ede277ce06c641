"""The kernel families, in order: the only place that lists them.

A new family is a folder (or a file) with a ``FAMILY`` and its name below. Where several match a
task, all of their spaces are searched; the order decides between kernels that are as fast as each
other.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from torch_pruner.families.sources import family_at, source_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.families.base import Family
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate, Scheduled, Task

NAMES = (
    "attention",
    "decode_attention",
    "attention_gradient",
    "depthwise",
    "depthwise_gradient",
    "planar",
    "in_place",
    "coded_rows",
    "axpy",
    "int4_rows",
    "int4_panels",
    "int8_products",
    "filtered_gradient",
    "gradient",
    "bf16_tiles",
    "bf16_pairs",
    "winograd",
    "winograd4",
    "outer_products",
    "contraction",
    "columns",
    "transposed",
    "elementwise",
    "update",
    "recurrence",
    "grouped_product",
    "lane_per_row",
    "rows",
    "gpu_attention",
    "gpu_triton_attention",
    "gpu_dots",
    "gpu_warpgroup",
    "gpu_product",
    "gpu_triton_product",
    "gpu_direct",
    "gpu_elementwise",
    "gpu_rows",
    "gpu_columns",
    "gpu_update",
    "metaschedule",
    "library",
)

_own_families: list[Family] = []
_own_spaces: list[type[Sketch]] = []


@cache
def _built_in(name: str) -> Family:
    found: Family = import_module(f"{__name__}.{name}").FAMILY
    assert found.name == name
    return found


def scheduled(kernel: Scheduled, target: TargetSpec) -> ScheduledKernel:
    """The loops of ``kernel``. Raises ``KeyError``, and what ``Family.schedule`` raises."""
    return named(kernel.candidate.sketch).schedule(
        kernel.spec, kernel.candidate, target, past_caches=kernel.past_caches
    )


def families() -> list[Family]:
    """Every family, those of ``use_family`` first."""
    return [*_own_families, *(_built_in(name) for name in NAMES)]


def named(name: str) -> Family:
    """The family of that name. Raises ``KeyError``."""
    for family in _own_families:
        if family.name == name:
            return family
    if name not in NAMES:
        raise KeyError(name)
    return _built_in(name)


def signature_of(spec: Graph, candidate: Candidate) -> Signature:
    """What a kernel takes that runs ``spec`` as ``candidate`` says. Raises ``KeyError`` for a
    family that nobody knows here."""
    return named(candidate.sketch).signature(spec, dict(candidate.decisions))


def knows(name: str) -> bool:
    """Whether kernels of a family of that name can be made here."""
    return name in NAMES or any(family.name == name for family in _own_families)


def use_family(family: Family) -> None:
    """From now on search and emit kernels of ``family``, too, before the built-in ones.

    The class of ``family`` is called without arguments in the processes that build candidates, so
    it must be in a module or a script. A process that runs such kernels uses the family before it
    compiles; elsewhere they are a miss. Adding a family again does nothing.

    Raises:
        ValueError: Another family has the name, or other processes could not find the class.

    Example:
        use_family(Tiled())  # a class of examples/new_family.py
        report = torch_pruner.tune(model, (x,))
    """
    if family in _own_families:
        return
    if knows(family.name):
        raise ValueError(f"there is a family named {family.name!r} already")
    source_of(family)
    _own_families.insert(0, family)


def own() -> list[Family]:
    """The families of ``use_family``, the one added last first."""
    return list(_own_families)


def drop_family(family: Family) -> None:
    """Undo ``use_family``; nothing happens if it was not used.

    Example:
        family = Tiled()
        use_family(family)
        report = torch_pruner.tune(model, (x,))
        drop_family(family)
    """
    if family in _own_families:
        _own_families.remove(family)


def own_sources() -> list[dict[str, str]]:
    """Where the families of ``use_family`` are defined, the one added first first."""
    return [source_of(family) for family in reversed(_own_families)]


def use_sources(sources: Sequence[Mapping[str, str]]) -> None:
    """Make exactly the families of ``sources`` the own ones of this process.

    Raises whatever importing them raises.
    """
    if list(sources) == own_sources():
        return
    wanted = [family_at(source) for source in sources]
    _own_families.clear()
    for family in wanted:
        use_family(family)


def use_space(space: type[Sketch]) -> None:
    """From now on tune in ``space`` where it ``fits``, in place of the built-in sketch of its name.

    A subclass of a built-in sketch can offer other options (``domains``), exclude points
    (``valid``) or estimate them otherwise (``symbols``). Its name says which family emits its
    kernels, which has to be able to emit every point that is valid; decisions say all there is to
    say about a kernel, so other processes run what was found here without knowing the space.
    Of several that fit, the one added last counts. Adding a space again does nothing.

    Example:
        class FewRows(ContractionSketch):
            @staticmethod
            def fits(task: Task) -> bool:
                return contraction_of(task.spec).rows <= 2


        use_space(FewRows)  # examples/new_sketch.py goes on from here
    """
    if space not in _own_spaces:
        _own_spaces.append(space)


def drop_space(space: type[Sketch]) -> None:
    """Undo ``use_space``; nothing happens if it was not used.

    Example:
        use_space(FewRows)
        report = torch_pruner.tune(model, (x,))
        drop_space(FewRows)
    """
    if space in _own_spaces:
        _own_spaces.remove(space)


def sketches_for(task: Task) -> list[Sketch]:
    """The space of every family that has kernels for the task, in order. Never empty."""
    kind = task.target.kind
    matching = [f for f in families() if f.target_kind == kind and f.matches(task)]
    return [_space_of(family, task)(task) for family in matching]


def _space_of(family: Family, task: Task) -> type[Sketch]:
    for space in _own_spaces[::-1]:
        if space.name == family.name and space.fits(task):
            return space
    return family.space()


def operations(task: Task) -> int | None:
    """The fewest arithmetic operations that a family needs, where one needs fewer than the graph
    says; else None."""
    on_device = (f for f in families() if f.target_kind == task.target.kind)
    counts = [n for f in on_device if (n := f.operations(task.spec)) is not None]
    return min(counts, default=None)
