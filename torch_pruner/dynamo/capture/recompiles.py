"""Whether Dynamo compiles a function for the first time, or again for other sizes or types.

What is compiled again comes in the middle of a run: nothing is tuned then, and nothing is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.calls import RuntimeValue

# By frame: the shapes of the parameters that it read.
_seen: dict[int | None, set[tuple[int, ...]]] = {}


def seen(example_inputs: Sequence[RuntimeValue]) -> bool:
    """Whether Dynamo has compiled what it compiles now before.

    Models of one class share the code of its ``forward``, which is all that Dynamo counts by. One
    whose parameters all have other shapes is another model, and compiled for the first time.
    """
    compile_id = torch._guards.CompileContext.current_compile_id()
    times = getattr(compile_id, "frame_compile_id", 0) or 0
    shapes = {
        tuple(v.shape) for v in example_inputs if isinstance(v, torch.nn.Parameter) and v.ndim
    }
    known = _seen.setdefault(getattr(compile_id, "frame_id", None), set())
    if not times:
        known.clear()  # Dynamo was reset
    again = bool(times) and (not shapes or not known or bool(shapes & known))
    known |= shapes
    return again
