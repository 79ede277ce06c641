"""The family seam: what a kernel can be, in one folder each.

A family says which tasks it is for, which decisions its schedules leave open (``space``), what a
kernel with its decisions taken wants from its caller (``parameters``) and how it is written down
(``emit``). ``torch_pruner.families`` lists them in order; nothing else knows their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch_pruner.graph.signature import Signature, signature_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import Emitted, ScheduledKernel
    from torch_pruner.codegen.parts.triton.kernel import TritonKernel
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.packing import PackLayout
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import BufferSpec
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate, Task


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a kernel wants beside its inputs and outputs as they lie.

    ``packs``: by position among the inputs, the layout in which an input must be given.
    ``scratch``: memory that the kernel may use while it runs, in the order of its parameters.

    Example:
        def parameters(self, spec: Graph, decisions: OwnDecisions[int]) -> Parameters:
            return Parameters(scratch=(BufferSpec((decisions.tasks, 64), "float32"),))
    """

    packs: Mapping[int, PackLayout] = field(default_factory=dict)
    scratch: tuple[BufferSpec, ...] = ()


class Family(ABC):
    """One kind of kernel.

    Contract: where ``matches`` is true, ``space`` gives a sketch of the family's name whose every
    valid point ``emit`` can write down; the buffers of what it emits are those of ``signature``, in
    order. ``parameters`` and ``matches`` need neither TVM nor a device. ``emit`` alone imports TVM,
    when it is called. Tests: ``tests/contracts/family.py``.

    Example:
        family = families.named(candidate.sketch)
        kernel = family.schedule(task.spec, candidate, task.target)
        print(kernel.func.script())
    """

    name: ClassVar[str]
    target_kind: ClassVar[str] = "llvm"
    """The kind of target that kernels of the family are for, as ``TargetSpec.kind`` says it."""
    generated: ClassVar[bool] = True
    """Whether kernels are machine code of ours; else the vendor's library runs them."""
    version: ClassVar[int] = 1
    """Raise it when the same decisions emit other code: libraries are then built anew. (For
    families of the package that is ``CODEGEN_VERSION``.)"""
    language: ClassVar[str] = "tir"
    """What kernels for the target are written in: "tir" (``emit``) or "triton" (``text``)."""
    one_pass: ClassVar[bool] = False
    """Whether kernels compute every element of their results once, and read what lies at the same
    place of an input before they write it."""
    decisions: ClassVar[Any] = None
    """The ``NamedTuple`` of a schedule's decisions, generic in what a field holds: integers of one
    schedule, columns of many. It stands in ``form.py`` of the family. None: any names."""

    @abstractmethod
    def matches(self, task: Task) -> bool:
        """Whether the family has kernels for ``task``, whose target is of its kind."""

    @abstractmethod
    def space(self) -> type[Sketch]:
        """The search space, as a class that is called with a task. Imports numpy, no TVM."""

    @abstractmethod
    def emit(
        self, spec: Graph, decisions: Any, signature: Signature, *, host: bool = False
    ) -> Emitted:
        """The kernel of ``spec`` as TIR.

        ``decisions`` is what ``typed`` gives. ``host``: the same schedule as loops for any CPU, for
        families of GPUs.
        """

    def text(self, spec: Graph, decisions: Any, signature: Signature) -> tuple[TritonKernel, ...]:
        """The kernel's launches in Triton's language, for families whose ``language`` that is:
        ``emit`` then gives loops that do the same."""
        raise ValueError(f"{self.name} is not written in Triton's language")

    def parameters(self, spec: Graph, decisions: Any) -> Parameters:
        """Packed inputs and scratch. Default: inputs as they lie, and none."""
        return Parameters()

    def allowed(self) -> bool:
        """Whether the system lets such kernels run in this process. Default: it does."""
        return True

    def operations(self, spec: Graph) -> int | None:
        """Arithmetic operations of kernels that need fewer than ``spec`` says. Default: None."""
        return None

    def serial(self, decisions: Mapping[str, int]) -> bool:
        """Whether one thread does all of it: no loop is parallel. Default: ``par`` says so."""
        return decisions.get("par") == 0

    def copies_first(self, spec: Graph, decisions: Any) -> bool:
        """Whether the first part of a kernel makes all of its scratch, of its inputs alone, and the
        others only read that. Default: it does not."""
        return False

    def combines_last(self, spec: Graph, decisions: Any) -> bool:
        """Whether the last part of a kernel makes all of its outputs, of scratch that the others
        made, and of inputs. Default: it does not."""
        return False

    def division(self, spec: Graph, decisions: Any) -> Division | None:
        """How the one parallel loop of a product divides its columns. Default: nothing is known."""
        return None

    def typed(self, decisions: Mapping[str, int]) -> Any:
        """Decisions by name as the family's own type. Raises ``ValueError`` for other names."""
        if self.decisions is None:
            return decisions
        try:
            return self.decisions(**decisions)
        except TypeError as err:
            raise ValueError(f"decisions of {self.name}: {err}") from None

    def signature(self, spec: Graph, decisions: Mapping[str, int]) -> Signature:
        """The parameters of ``spec`` scheduled with ``decisions``."""
        found = self.parameters(spec, self.typed(decisions))
        return signature_of(spec, found.packs, found.scratch)

    def texts(self, spec: Graph, candidate: Candidate) -> tuple[TritonKernel, ...]:
        """``text`` of what ``candidate`` stands for. Raises ``ValueError`` for a wrong one."""
        named = dict(candidate.decisions)
        return self.text(spec, self.typed(named), self.signature(spec, named))

    def schedule(
        self,
        spec: Graph,
        candidate: Candidate,
        target: TargetSpec,
        *,
        host: bool = False,
        past_caches: bool = False,
    ) -> ScheduledKernel:
        """The kernel that ``candidate`` stands for. Raises ``ValueError`` for a wrong candidate.

        ``past_caches``: what it reads once leaves to others what is in the caches.
        """
        from torch_pruner.codegen.parts.kernel import as_kernel

        signature = self.signature(spec, dict(candidate.decisions))
        decisions = self.typed(dict(candidate.decisions))

        def emit() -> Emitted:
            return self.emit(spec, decisions, signature, host=host)

        return as_kernel(spec, signature, emit, past_caches=past_caches)
