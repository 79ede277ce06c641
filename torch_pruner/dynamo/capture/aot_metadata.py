"""What AOTAutograd knows of the inputs and outputs of the graph that it is capturing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

    from torch_pruner.dynamo.lower.calls import RuntimeValue


@dataclass(frozen=True, slots=True)
class AotMetadata:
    """What there is to know of one graph beside its operators.

    Its kind ("forward", "backward" or "inference"), which inputs rarely change, which it writes,
    whether nothing is to be done around it (``are_plain``), which outputs only its backward reads,
    which inputs have the same memory at every call though what it holds changes, and which inputs
    get new values when a forward is done.
    """

    kind: str
    static: frozenset[int]
    mutated: Sequence[int]
    plain: bool = False
    loose: range = range(0)
    lasting: frozenset[int] = frozenset()
    renewed: frozenset[int] = frozenset()

    @staticmethod
    def of(
        example_inputs: Sequence[RuntimeValue],
        kind: str,
        outputs: int,
        written: Sequence[int] = (),
        names: Sequence[str] = (),
    ) -> AotMetadata:
        """``written``: positions of inputs whose new values are results before all others.

        ``names``: of the inputs in the graph, by which a backward knows what it has of its forward.
        """
        if kind == "forward":
            kept = kept_for_backward(outputs - len(written))
            loose = range(kept.start + len(written), outputs)
            count = len(example_inputs)
            return AotMetadata(
                kind, frozenset(), written, loose=loose, lasting=static_inputs(count),
                renewed=written_inputs(count),
            )  # fmt: skip
        if kind != "inference":
            return AotMetadata(kind, frozenset(), (), lasting=parameters_among(names))
        plain = are_plain(len(example_inputs))
        mutated = (*written, *mutated_inputs())
        count = len(example_inputs)
        lasting = written_statics(count)
        return AotMetadata(kind, static_inputs(count), mutated, plain, lasting=lasting)


def _metadata() -> ViewAndMutationMeta | None:
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def kept_for_backward(outputs: int) -> range:
    """Positions among so many ``outputs`` of a forward graph: they come last."""
    first = getattr(_metadata(), "num_forward", None)
    return range(outputs if first is None else first, outputs)


def parameters_among(names: Sequence[str]) -> frozenset[int]:
    """Positions of ``names``, those of a backward's inputs, that the forward's parameters have.

    AOTAutograd calls the forward's inputs ``primals_1`` and so on, in both graphs.
    """
    forward = {f"primals_{i + 1}" for i in static_inputs(sys.maxsize)}
    return frozenset(k for k, name in enumerate(names) if name in forward)


def static_inputs(inputs: int) -> frozenset[int]:
    """Positions, of so many ``inputs``, of parameters and buffers that the graph leaves alone."""
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    mutated = {i for i, info in enumerate(metadata.input_info) if info.mutates_data}
    return frozenset(i for i in metadata.static_input_indices if i not in mutated and i < inputs)


def written_inputs(inputs: int) -> frozenset[int]:
    """Positions, of so many ``inputs``, of those that the graph gives new values."""
    metadata = _metadata()
    if metadata is None or metadata.tokens:
        return frozenset()
    return frozenset(i for i, info in enumerate(metadata.input_info[:inputs]) if info.mutates_data)


def written_statics(inputs: int) -> frozenset[int]:
    """Positions, of so many ``inputs``, of those that the graph writes and that stay where they
    are: buffers, and what ``torch._dynamo.mark_static_address`` was told of, as static caches."""
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    statics = [i for i in metadata.static_input_indices if i < inputs]
    return frozenset(i for i in statics if metadata.input_info[i].mutates_data)


def mutated_inputs() -> Sequence[int]:
    """Positions of the inputs whose new values are the graph's first outputs, in that order.

    Empty where torch does more with them than to copy the new value into the input.
    """
    metadata = _metadata()
    if metadata is None or metadata.tokens:
        return ()
    positions: Sequence[int] = metadata.mutated_inp_runtime_indices
    infos = [metadata.input_info[i] for i in positions]
    return () if any(i.mutates_metadata or i.mutates_storage_metadata for i in infos) else positions


def are_plain(inputs: int) -> bool:
    """Whether AOTAutograd does nothing around a call of an inference graph of so many inputs.

    No input is written, no output shares memory with an input or with another output, no tensor is
    of a class of its own.
    """
    metadata = _metadata()
    try:
        from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

        return (
            metadata is not None
            and len(metadata.input_info) == inputs
            and not any(i.mutates_data or i.mutates_metadata for i in metadata.input_info)
            and not any(i.mutates_storage_metadata for i in metadata.input_info)
            and all(o.output_type is OutputType.non_alias for o in metadata.output_info)
            and not metadata.num_intermediate_bases
            and not metadata.tokens
            and all(type(m) is PlainTensorMeta for m in metadata.subclass_inp_meta)
            and all(type(m) is PlainTensorMeta for m in metadata.subclass_fw_graph_out_meta)
        )
    except (ImportError, AttributeError):  # another version of torch
        return False
