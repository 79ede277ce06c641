"""The table from ATen overloads to rules, and what a rule is given.

A rule is called as ``rule(call, *args, **kwargs)`` with the arguments of the fx node, tensors
replaced by ``Value``s, and returns a ``Value`` (or a tuple with ``None`` for outputs it does not
provide). The caller casts and broadcasts the result to the dtype and shape of the fake tensor, so a
rule may compute in a wider dtype. A rule that cannot express its arguments raises ``Unsupported``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from torch_pruner.dynamo.lower.aten.demand import Demand, Range
from torch_pruner.dynamo.lower.aten.rejection import RejectionKind, Unsupported, arguments
from torch_pruner.dynamo.lower.aten.value import DTYPE_NAMES, Number, Value
from torch_pruner.graph.intervals import interval

if TYPE_CHECKING:
    import torch

    from torch_pruner.graph.ir import GraphBuilder, Shape

Result = Value | tuple[Value | None, ...]
Rule = Callable[..., Result]
Operand = Value | Number

R = TypeVar("R", bound=Rule)

TABLE: dict[torch._ops.OpOverload, Rule] = {}
FOREIGN: dict[str, Rule] = {}  # by name: operators of packages that need not be there

VARIES = "pruner_varies"  # in a node's meta: whether it has arguments that depend on the sizes

__all__ = [
    "FOREIGN",
    "PROMOTION",
    "TABLE",
    "VARIES",
    "OpCall",
    "Operand",
    "Result",
    "Rule",
    "elementwise",
    "foreign_rule",
    "rule",
    "rule_of",
]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One use of an operator: where to append nodes, and the fake tensors that it results in.

    ``demands`` are what eager tests of the operands' values, and raises where it does not hold.
    ``in_place``: the result may take the memory of the first operand, an input of the graph.
    ``sized``: a number among its arguments is another at other sizes (``VARIES``), so that what
    does nothing now may do something there.
    """

    builder: GraphBuilder
    outputs: tuple[torch.Tensor | None, ...]
    used: frozenset[int]
    demands: list[Demand] = field(default_factory=list)
    in_place: bool = False
    sized: bool = False

    @property
    def shape(self) -> Shape:
        """Shape of the first output."""
        return self.shape_of(0)

    @property
    def dtype(self) -> str:
        """Dtype of the first output."""
        return self.dtype_of(0)

    def shape_of(self, output: int) -> Shape:
        fake = self.outputs[output]
        assert fake is not None
        return tuple(int(d) for d in fake.shape)

    def dtype_of(self, output: int) -> str:
        fake = self.outputs[output]
        assert fake is not None
        return dtype_name(fake.dtype)

    def const(self, number: Number, dtype: str) -> Value:
        return Value(self.builder, self.builder.const(number, dtype))

    def iota(self, shape: Sequence[int], dim: int, dtype: str = "int64") -> Value:
        """A tensor of ``shape`` whose elements are their indices along ``dim``."""
        return Value(self.builder, self.builder.append("iota", (), shape, dtype, dim=dim))

    def demand_index(
        self, index: Value, shape: Sequence[int], axis: int, kind: str, *, wraps: bool = False
    ) -> None:
        """``index`` must lie within ``axis`` of ``shape``; where it ``wraps``, -1 is the last."""
        size, rank = (shape[axis], len(shape)) if shape else (1, 1)
        low = -size if wraps else 0
        self.demands.append(Demand(index.id, Range(low, size, kind, axis, rank)))

    def demand_divisor(self, divisor: Value) -> None:
        """Whole numbers are not divided by zero. Raises ``Unsupported`` for the number 0."""
        if divisor.is_float:
            return
        low, high = interval(self.builder.nodes, divisor.id)
        if low > 0 or high < 0:
            return
        if low == high:
            raise arguments("integer division by zero, which eager raises")
        zero = divisor.equals(0).reduce("any", range(divisor.ndim))
        self.demands.append(Demand(zero.cast("int64").id, Range(0, 1, "division")))


def dtype_name(dtype: torch.dtype) -> str:
    """The IR's name. Raises ``Unsupported`` for complex, quantised and 8-bit floating types."""
    if dtype not in DTYPE_NAMES:
        text = str(dtype).removeprefix("torch.")
        raise Unsupported(RejectionKind.DTYPE, f"{text} tensors are not compiled")
    return DTYPE_NAMES[dtype]


def rule(*ops: torch._ops.OpOverload) -> Callable[[R], R]:
    """Register a function for operator overloads."""

    def register(fn: R) -> R:
        for op in ops:
            assert op not in TABLE, op
            TABLE[op] = fn
        return fn

    return register


def foreign_rule(*names: str) -> Callable[[R], R]:
    """Register a function for operators of other packages, as ``"package::operator"``."""

    def register(fn: R) -> R:
        for name in names:
            assert name not in FOREIGN, name
            FOREIGN[name] = fn
        return fn

    return register


def rule_of(op: torch._ops.OpOverload) -> Rule | None:
    """The rule of an operator, or None: it has none."""
    return TABLE.get(op) or FOREIGN.get(str(op.name()))  # type: ignore[no-untyped-call]


def elementwise(
    fn: Callable[..., Value], *args: Operand, kind: PROMOTION = PROMOTION.DEFAULT
) -> Value:
    """``fn`` of the arguments promoted as torch does, half precision widened to float32."""
    fakes = [a.fake if isinstance(a, Value) else a for a in args]
    compute, _ = elementwise_dtypes(*fakes, type_promotion_kind=kind)
    name = dtype_name(compute)
    builder = next(a.builder for a in args if isinstance(a, Value))
    return fn(*(_promoted(builder, a, name) for a in args))


def _promoted(builder: GraphBuilder, arg: Operand, dtype: str) -> Value:
    if isinstance(arg, Value):
        return arg.cast(dtype)
    if not isinstance(arg, (bool, int, float)):
        raise Unsupported(RejectionKind.DTYPE, f"{type(arg).__name__} scalars are not compiled")
    return Value(builder, builder.const(arg, dtype))
