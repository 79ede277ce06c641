"""Packed copies made where the parameter lies: no copy of it has to reach the host and come back.

``graph.packing`` says what layouts are. Here the same is done by torch's operators, for those forms
that kernels of GPUs ask for; others are packed on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.devices.aten import run_spec
from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.graph.ops import OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.packing import PackLayout

_FORMS = frozenset(("matmul", "conv", "conv_transpose", "depthwise"))
_MOVES = frozenset(("input", "cast", "pad"))  # beside views


def packs_there(layout: PackLayout) -> bool:
    """Whether ``pack_there`` knows the layout."""
    moved = all(n.op in _MOVES or n.kind is OpKind.VIEW for n in layout.view.nodes)
    return moved and layout.form in _FORMS and not layout.code


@torch.no_grad()
def pack_there(layout: PackLayout, tensor: torch.Tensor) -> torch.Tensor:
    """What ``layout.pack`` gives, on the device of ``tensor``; ``packs_there`` holds.

    The work is queued on the device's current stream.
    """
    operand = _to_gkn(run_spec(layout.view, [tensor])[0], layout.form, layout.groups)
    groups, _, n = operand.shape
    blocks, rows, block, pair = *layout.shape[1:3], layout.block, layout.pair
    packed = torch.zeros(layout.shape, dtype=DTYPES[layout.dtype], device=tensor.device)
    panels = packed.view(groups, blocks, rows, block, pair)
    whole, rest = n // block, n % block
    for first in range(pair):
        given = operand[:, first::pair]
        count = given.shape[1]
        full = given[:, :, : whole * block].reshape(groups, count, whole, block)
        panels[:, :whole, :count, :, first].copy_(full.transpose(1, 2))
        if rest:
            panels[:, whole, :count, :rest, first].copy_(given[:, :, whole * block :])
    return packed


def _to_gkn(operand: torch.Tensor, form: str, groups: int) -> torch.Tensor:
    """``graph.packing.to_gkn`` of a tensor."""
    if form == "matmul":
        return operand.reshape(-1, *operand.shape[-2:])
    if form == "depthwise":
        return operand.reshape(1, operand.shape[0], -1).transpose(1, 2)
    spatial = tuple(range(2, operand.dim()))
    if form == "conv_transpose":
        operand = operand.flip(spatial)
    split = operand.reshape(groups, operand.shape[0] // groups, *operand.shape[1:])
    last = (2, 1) if form == "conv" else (1, 2)
    moved = split.permute(0, *(d + 1 for d in spatial), *last)
    return moved.reshape(groups, -1, moved.shape[-1])
