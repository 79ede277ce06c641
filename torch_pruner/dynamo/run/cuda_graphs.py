"""CUDA graphs by torch's own machinery: a call is recorded once, and then replayed.

The one module that knows the private names of torch's cudagraph trees. Where a version of torch
lacks them, or a graph cannot be recorded, there is a reason instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack, cast

from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch
    from torch import fx

    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.run.build import BuiltGraph

    _Plain = torch.Tensor | torch.SymInt | int | None  # what torch records

_log = logger(__name__)


class Where(TypedDict):
    """The inputs of a graph that stay where they are in memory, its kind, and its device."""

    static: Collection[int]
    kind: str
    device: Device


class NotRecordableError(Exception):
    """Why a graph runs without CUDA graphs."""


def replayed(
    gm: fx.GraphModule,
    built: BuiltGraph,
    example_inputs: Sequence[RuntimeValue],
    **where: Unpack[Where],
) -> BoxedCall:
    """``built.call``, recorded at its second call and replayed from then on.

    Replaying runs no Python, so parameters that changed are packed anew before it, into the memory
    that was recorded. Raises ``NotRecordableError``.
    """
    static, kind, device = where["static"], where["kind"], where["device"]
    if not device.replays:
        raise NotRecordableError(f"CUDA graphs are for GPUs, and the graph runs on {device.device}")
    if kind != "inference":
        raise NotRecordableError("graphs of training are not recorded yet")
    try:
        from torch._dynamo.backends.cudagraphs import (
            check_for_skip,
            find_input_mutations,
            get_stack_traces,
        )
        from torch._inductor.cudagraph_trees import cudagraphify_impl
        from torch._inductor.cudagraph_utils import get_placeholder_info
    except ImportError as err:  # another version of torch
        raise NotRecordableError(f"this version of torch has them elsewhere: {err}") from err
    if why := check_for_skip(gm, 0):
        raise NotRecordableError(" ".join(str(why).split()))
    for region in built.regions:
        region.call.packed.stay()
    recorded = cudagraphify_impl(
        cast("Callable[[list[_Plain]], list[torch.Tensor | int | None]]", built.call),
        list(cast("Sequence[_Plain]", example_inputs)),
        sorted(static),
        device_index=device.device.index,
        is_backward=False,
        is_inference=True,
        stack_traces=get_stack_traces(gm),
        placeholders=get_placeholder_info(gm.graph),
        mutated_input_idxs=find_input_mutations(gm.graph),
    )

    replay = cast("BoxedCall", recorded)

    def call(args: list[RuntimeValue]) -> list[RuntimeValue]:
        for region in built.regions:
            values = [args[k] if k < len(args) else None for k in region.reads]
            region.call.packed.current(cast("Sequence[torch.Tensor]", values))
        return replay(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def recorded_or_not(
    gm: fx.GraphModule,
    built: BuiltGraph,
    example_inputs: Sequence[RuntimeValue],
    name: str,
    **where: Unpack[Where],
) -> BoxedCall:
    """``replayed``, or the call as it is and a line in the log that says why."""
    try:
        return replayed(gm, built, example_inputs, **where)
    except NotRecordableError as why:
        _log.info("%s is not recorded as a CUDA graph: %s", name, why)
        return built.call
