"""CUDA graphs by torch's own machinery: a call is recorded once, and then replayed.

The one module that knows the private names of torch's cudagraph trees. Where a version of torch
lacks them, or a graph cannot be recorded, there is a reason instead. A graph that was captured
before, by whichever process, is recorded like one that is captured now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import fx

    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.run.build import BuiltGraph, BuiltRegion

    _Plain = torch.Tensor | torch.SymInt | int | None  # what torch records

_log = logger(__name__)


class NotRecordableError(Exception):
    """Why a graph runs without CUDA graphs."""


def obstacle(gm: fx.GraphModule) -> str:
    """What keeps a graph on a GPU from being recorded, or an empty text."""
    try:
        from torch._dynamo.backends.cudagraphs import check_for_skip, find_input_mutations
    except ImportError as err:  # another version of torch
        return f"this version of torch has them elsewhere: {err}"
    if find_input_mutations(gm.graph):
        return "it writes into its inputs"
    return " ".join(str(check_for_skip(gm, 0) or "").split())


def replayed(built: BuiltGraph, kind: str, device: Device) -> BoxedCall:
    """``built.call``, recorded at its second call and replayed from then on.

    Replaying runs no Python, so parameters that changed are packed anew before it, into the memory
    that was recorded. ``kind``: "forward", "backward" or "inference". What a forward keeps for its
    backward lies in the memory of the recordings, where torch's trees find it; a parameter of
    training is read where it lies, and a cache that stays where it is (a buffer, or one whose
    address was marked as static) is written there. Other arguments are copied.

    Raises ``NotRecordableError``.
    """
    if not device.replays:
        raise NotRecordableError(f"CUDA graphs are for GPUs, and the graph runs on {device.device}")
    if built.program.unrecordable:
        raise NotRecordableError(built.program.unrecordable)
    # Torch would copy the others before a replay, and what is written would be the copy.
    if built.program.written - {*built.program.lasting}:
        raise NotRecordableError("it writes into arguments that may lie elsewhere at the next call")
    record = _recorder(built, kind, device)
    for region in built.regions:
        region.call.packed.stay()
    renewed = [region for region in built.regions if region.call.packed.indices]
    recorded: BoxedCall | None = None

    def call(args: list[RuntimeValue]) -> list[RuntimeValue]:
        nonlocal recorded
        replay = recorded
        if replay is None:  # two threads may come here at once; either's will do
            recorded = replay = record(args)
        for region in renewed:
            _renew(region, args)
        return replay(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _renew(region: BuiltRegion, args: list[RuntimeValue]) -> None:
    """Packs parameters that changed, and keeps no argument alive: who replays counts who does."""
    values = [args[k] if k < len(args) else None for k in region.reads]
    region.call.packed.current(cast("list[torch.Tensor]", values))


def _recorder(
    built: BuiltGraph, kind: str, device: Device
) -> Callable[[list[RuntimeValue]], BoxedCall]:
    """What makes a call that records, given the arguments of the first."""
    try:
        from torch._inductor.cudagraph_trees import cudagraphify_impl
        from torch._inductor.cudagraph_utils import PlaceholderInfo

        # Where they come from is for torch's error messages; what was restored does not know it.
        argument = PlaceholderInfo(
            name="an argument", stack_trace=None, users=[], mutating_use_stack_trace=None
        )
    except (ImportError, TypeError) as err:  # another version of torch
        raise NotRecordableError(f"this version of torch has others: {err}") from err
    program = built.program

    def record(args: list[RuntimeValue]) -> BoxedCall:
        recorded = cudagraphify_impl(
            cast("Callable[[list[_Plain]], list[torch.Tensor | int | None]]", built.call),
            list(cast("list[_Plain]", args)),
            sorted({*program.static, *program.lasting}),
            device_index=device.device.index,
            is_backward=kind == "backward",
            is_inference=kind == "inference",
            stack_traces=[None] * len(program.outputs),
            placeholders=[argument] * len(args),
            mutated_input_idxs=set(),
        )
        return cast("BoxedCall", recorded)

    return record


def recorded_or_not(built: BuiltGraph, kind: str, device: Device, name: str) -> BoxedCall:
    """``replayed``, or the call as it is and a line in the log that says why."""
    try:
        return replayed(built, kind, device)
    except NotRecordableError as why:
        _log.info("%s is not recorded as a CUDA graph: %s", name, why)
        return built.call


def closing(call: BoxedCall, kind: str, device: Device) -> BoxedCall:
    """``call``, after which the next step may begin where it is a backward.

    Once a forward was replayed torch's trees keep what it gave until a backward has run. One that
    was recorded says so itself; one that eager runs, for whatever reason, would never.
    """
    if kind != "backward" or not device.replays:
        return call
    try:
        from torch._inductor.cudagraph_trees import get_manager
    except ImportError:  # another version of torch: nothing is recorded
        return call
    index = device.device.index

    def closed(args: list[RuntimeValue]) -> list[RuntimeValue]:
        try:
            return call(args)
        finally:
            manager = get_manager(index, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()

    closed._boxed_call = True  # type: ignore[attr-defined]
    return closed
