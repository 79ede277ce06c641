"""Recurrent layers as operators that nothing breaks up: torch's own, under a name of ours.

``aten.lstm.input`` and its like are composite: torch unrolls them step by step before a backend
sees them. ``torch_pruner::lstm`` is the same function of the same arguments as one node of a
captured graph. Where no rule takes it, eager runs it, which is torch's operator. There are no
gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    States = Tensor | Sequence[Tensor]

NAMESPACE = "torch_pruner"
NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ARGUMENTS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first"
)
_BIDIRECTIONAL, _BATCH_FIRST = 5, 6  # places among them
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def operator_of(function: object) -> torch._ops.OpOverload | None:
    """The operator in place of one of torch's functions, ``torch.lstm`` and its like."""
    for name in NAMES:
        if function is getattr(torch, name):
            return overload(name)
    return None


def overload(name: str) -> torch._ops.OpOverload:
    """One of the operators by its name among ``NAMES``."""
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


def _results(x: Tensor, hx: States, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:
    """What the operator gives, in shapes, strides and dtypes alone."""
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    first, second = x.shape[:2]
    steps, rows = (second, first) if batch_first else (first, second)
    width = states[0].shape[2] * (2 if bidirectional else 1)
    out = x.new_empty((steps, rows, width))
    made = (x.new_empty(tuple(s.shape)) for s in states)
    return (out.transpose(0, 1) if batch_first else out, *made)


def _define(name: str) -> None:
    states, results = ("Tensor[]", 3) if name == "lstm" else ("Tensor", 2)
    given = ", ".join(["Tensor"] * results)
    _library.define(  # type: ignore[no-untyped-call]
        f"{name}(Tensor input, {states} hx, {_ARGUMENTS}) -> ({given})"
    )
    eager: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, name).input

    def run(x: Tensor, hx: States, *more: Any) -> tuple[Tensor, ...]:
        out, *made = eager(x, hx, *more)
        # As the captured graph says that it lies.
        batch_first = more[_BATCH_FIRST]
        out = out.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else out.contiguous()
        return (out, *(m.contiguous() for m in made))

    def fake(x: Tensor, hx: States, *more: Any) -> tuple[Tensor, ...]:
        return _results(x, hx, more[_BIDIRECTIONAL], more[_BATCH_FIRST])

    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


for _name in NAMES:
    _define(_name)
