"""The kernels of networks as they are cut for a card, on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_pruner.cards import Card
    from torch_pruner.task import Task


def tasks_of(network: str, precision: str, card: Card, layers: int | None) -> list[Task]:
    """The distinct kernels of a network on a card. Nothing runs on it."""
    import torch

    from benchmarks import models
    from torch_pruner.config import Config
    from torch_pruner.devices.absent import AbsentCard
    from torch_pruner.dynamo import backend
    from torch_pruner.dynamo.capture import aot_metadata
    from torch_pruner.dynamo.lower.bounds import flag_spec
    from torch_pruner.dynamo.lower.partition import Region, partition
    from torch_pruner.dynamo.lower.tensors import spec_of

    config = Config.from_options(None, {"effort": "none"})
    device = AbsentCard(card)
    compiler = device.compiler(config)
    found: dict[str, Task] = {}

    def look(gm: Any, inputs: Any, _: str) -> None:
        for step in partition(
            gm, static_inputs=aot_metadata.static_inputs(len(inputs)), dtypes=device.dtypes
        ).steps:
            if isinstance(step, Region):
                orders = [
                    [spec_of(n.meta["val"]).order for n in nodes]
                    for nodes in (step.inputs, step.outputs)
                ]
                shown = [spec.order for spec in flag_spec(step.flags)]
                for task in compiler.lower(step.graph, orders[0], orders[1] + shown).tasks:
                    found.setdefault(task.workload, task)

    def compile_graph(gm: Any, inputs: Any) -> Any:
        return backend.inspect_dynamo_graph(gm, inputs, look)

    torch._dynamo.reset()
    module, inputs = models.load(network, models.PRECISIONS[precision], 1, layers)
    with torch.no_grad():
        models.call(torch.compile(module, backend=compile_graph, dynamic=False), inputs)
    return list(found.values())
