"""Records what an interpreter does as a graph of ATen operators, weights being parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from torch_pruner.exc import PrunerError
from torch_pruner.onnx.boundary import ERRORS
from torch_pruner.onnx.bounds import Memory, StepBudget
from torch_pruner.onnx.operators import DataDependentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.onnx.load import Model

UNROLLED = 1024  # node steps that loops may add to one graph
UNFOLDED = 4096  # nodes that calls of functions may add to those of a model's file


def step_budget(model: Model) -> StepBudget:
    """What may be recorded as one graph; any more is run in pieces.

    Raises:
        DataDependentError: It is known to be more.
    """
    if model.unfolded - model.nodes > UNFOLDED:
        raise DataDependentError(f"it is {model.unfolded} nodes with all its functions")
    most = max(model.unfolded, model.nodes) + UNROLLED
    return StepBudget(most, lambda: DataDependentError("it is too long to be unrolled"))


def record(
    run: Callable[..., list[torch.Tensor]],
    weights: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    memory: Memory,
) -> fx.GraphModule:
    """``run(*weights, *tensors)`` as a module of ``tensors``.

    Raises:
        DataDependentError: Only a run with real numbers can tell what is to be done.
        UnsupportedModel: It cannot be done at all, or needs a tensor that is too large.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            tracer = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
            gm = tracer(*weights, *tensors)
        memory.afford_graph(gm)
    except PrunerError:
        raise
    except ERRORS as err:  # of torch's own, about what it does not know before a run
        reason = next(iter(str(err).splitlines()), "")
        raise DataDependentError(f"torch cannot record it: {reason[:200]}") from err
    return _with_parameters(gm, weights)


def _with_parameters(gm: fx.GraphModule, weights: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Its first placeholders become parameters, so that the compiler knows that they stay."""
    places = list(gm.graph.find_nodes(op="placeholder"))
    for k, (node, weight) in enumerate(zip(places, weights, strict=False)):
        name = f"weight{k}"
        setattr(gm, name, nn.Parameter(weight, requires_grad=False))
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(gm.graph.get_attr(name))
        gm.graph.erase_node(node)
    gm.recompile()
    return gm
