"""Whether the cache has all that a model needs, asked before anything is served.

In: captured graphs. Out: what is missing, as the exceptions that ``on_miss="error"`` would raise at
the first call. Nothing is tuned, timed or built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.devices import device_for, torch_device_of
from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
from torch_pruner.dynamo.lower.program import RegionStep, describe
from torch_pruner.dynamo.run import narrow_weights
from torch_pruner.dynamo.run.build import as_narrow, held_by
from torch_pruner.dynamo.run.graphs import outputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import fx

    from torch_pruner import exc
    from torch_pruner.config import Config
    from torch_pruner.dynamo.lower.calls import RuntimeValue


def missing_of(
    gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue], config: Config
) -> Iterable[exc.CacheMiss]:
    """What a graph for inference needs and the cache lacks."""
    if not outputs(gm):
        return
    metadata = AotMetadata.of(example_inputs, "inference", len(outputs(gm)))
    device = device_for(torch_device_of(gm), config)
    program = describe(
        gm, static=metadata.static, mutated=metadata.mutated, loose=metadata.loose,
        device=device.device, dtypes=device.dtypes,
    )  # fmt: skip
    compiler = device.compiler(config)
    holds = narrow_weights.holds(example_inputs, config)
    for step in program.steps:
        if isinstance(step.does, RegionStep):
            lie = [s.order for s in step.does.inputs]
            held = held_by(step.reads, holds)
            graph, orders, _ = as_narrow(step.does.graph, lie, compiler, held)
            yield from compiler.missing(graph, orders, [s.order for s in step.does.outputs])
