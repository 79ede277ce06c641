"""The ``torch.compile`` backend: where torch comes in.

torch finds ``pruner`` through the entry point ``torch_dynamo_backends``; it is not registered by
decorator as well, since torch refuses one name twice.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner import log
from torch_pruner.config import Config
from torch_pruner.devices import forked_threads, metering
from torch_pruner.dynamo.capture import recurrent_modules
from torch_pruner.dynamo.capture.decompositions import decomposition_table
from torch_pruner.dynamo.compilation import GraphCompilation
from torch_pruner.dynamo.run import reports
from torch_pruner.dynamo.run.failures import raised_as_both
from torch_pruner.dynamo.run.graphs import boxed, label_of, next_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from torch_pruner.dynamo.lower.calls import BoxedCall, DynamoCall, RuntimeValue

    Look = Callable[[fx.GraphModule, Sequence[RuntimeValue], str], None]


@recurrent_modules.traced
@raised_as_both
def pruner(
    gm: fx.GraphModule,
    example_inputs: Sequence[RuntimeValue],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> DynamoCall:
    """Compile a Dynamo graph.

    Raises ``OptionError`` for wrong options and, under ``on_miss="error"``, ``CacheMiss`` for what
    is missing when a function is first compiled; any other failure falls back to eager with one
    warning unless ``strict`` is set. What is raised is torch's ``BackendCompilerFailed``, too.
    """
    config = Config.from_options(mode, options)
    log.configure(config.log)
    return compile_dynamo_graph(gm, example_inputs, config)


def compile_dynamo_graph(
    gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue], config: Config
) -> DynamoCall:
    """``pruner`` with its options already read."""
    forked_threads.watch()
    metering.expect(example_inputs, config)
    reports.begin()
    compilation = GraphCompilation(gm, example_inputs, config)
    return compilation.fallback(
        lambda: (
            compilation.captured_before(gm, example_inputs)
            or compilation.capture(gm, example_inputs)
        ),
        eager=lambda: gm.forward,
        name=compilation.name,
    )


def inspect_dynamo_graph(
    gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue], look: Look
) -> DynamoCall:
    """Capture as for compiling, show each ATen graph to ``look`` and run it in eager."""
    from torch._dynamo.backends.common import aot_autograd

    name = next_name()

    def show(aten: fx.GraphModule, inputs: Sequence[RuntimeValue], kind: str) -> BoxedCall:
        # Where AOTAutograd adds or drops none, arguments are Dynamo's, which hold something.
        alike = kind == "inference" and len(inputs) == len(example_inputs)
        look(aten, example_inputs if alike else inputs, label_of(name, kind))
        return boxed(aten)

    compiled: DynamoCall = aot_autograd(
        fw_compiler=partial(show, kind="forward"), bw_compiler=partial(show, kind="backward"),
        inference_compiler=partial(show, kind="inference"), decompositions=decomposition_table(),
    )(gm, list(example_inputs))  # fmt: skip
    return compiled
