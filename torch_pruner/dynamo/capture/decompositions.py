"""Which ATen operators AOTAutograd breaks up before our rules see the graph."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._prims_common import is_non_overlapping_and_dense_or_false

from torch_pruner.dynamo.lower.aten import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Decomposition = Callable[..., object]

aten = torch.ops.aten

# Eager runs these: their decomposition draws other random numbers, scatters more slowly, or gives
# other integers and bfloat16 (ranges, which cost nothing).
_KEPT = (
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
    aten.logspace.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
    aten.bernoulli.default,
    aten.rrelu_with_noise_functional.default,
    aten.embedding_dense_backward.default,
    aten._embedding_bag.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.col2im.default,
)

# Outside torch's core set, yet their decomposition needs nothing that has no rule.
_ADDED = (aten.upsample_bicubic2d.default,)

# Rules exist for rare uses of these, but the decomposition is what covers training.
_DECOMPOSED = frozenset(
    (
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.t.default,
        aten.transpose.int,
        aten.scaled_dot_product_attention.default,
        aten.linear.default,
    )
)


# Set while ``native_dropout`` itself is traced as the source of a mask.
_drawing: ContextVar[bool] = ContextVar("_drawing", default=False)


def native_dropout(
    x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout whose mask eager draws from the shape and strides of ``x`` alone.

    The random numbers and the generator's state afterwards are eager's, and a mask that does not
    wait for ``x`` can be drawn before all compiled regions: dropout does not cut regions apart.
    """
    if _drawing.get():
        return NotImplemented  # type: ignore[no-any-return]  # to torch: leave it as it is
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    if x.device.type == "cpu":
        template = torch.empty_strided(x.shape, x.stride(), dtype=torch.bool, device=x.device)
        mask = aten.bernoulli.p(template, 1 - p)
        return x * (mask.to(x.dtype) / (1 - p)), mask
    template = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    token = _drawing.set(True)
    try:
        mask = aten.native_dropout.default(template, p, True)[1]
    finally:
        _drawing.reset(token)
    return x * mask * (1 / (1 - p)), mask


def empty_like(
    x: torch.Tensor, *, memory_format: torch.memory_format | None = None, **options: Any
) -> torch.Tensor:
    """A tensor that does not wait for ``x``, of which only the shape and strides matter."""
    preserve = memory_format in (None, torch.preserve_format)
    if not preserve or not is_non_overlapping_and_dense_or_false(x):
        return NotImplemented  # type: ignore[no-any-return]  # to torch: leave it as it is
    placement: dict[str, Any] = {"dtype": x.dtype, "device": x.device, "layout": x.layout}
    placement |= {k: v for k, v in options.items() if v is not None}
    return torch.empty_strided(x.shape, x.stride(), **placement)


def decomposition_table() -> dict[torch._ops.OpOverload, Decomposition]:
    """Torch's core decompositions without the operators that have a rule or stay with eager.

    Composite operators are left to the dispatcher. Random operators are never decomposed, save for
    the masks of dropout.
    """
    return dict(_table())


@functools.cache
def _table() -> dict[torch._ops.OpOverload, Decomposition]:
    """Made once: torch walks all of its operators for it, a tenth of a second of each capture."""
    table: dict[torch._ops.OpOverload, Decomposition] = {}
    core: Mapping[torch._ops.OperatorBase, Decomposition] = core_aten_decompositions()
    table[aten.native_dropout.default] = native_dropout
    table[aten.empty_like.default] = empty_like
    for op, fn in {**core, **get_decompositions(_ADDED)}.items():
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
            continue
        if op in table or op in _KEPT or (op in TABLE and op not in _DECOMPOSED):
            continue
        if torch.Tag.nondeterministic_seeded in op.tags or op._can_decompose():
            continue
        table[op] = fn
    return table
