"""What norms keep for their backward, in the dtype that torch traced.

By autocast an input may be bfloat16 or float16 beside float32 parameters. Torch's decompositions,
and so what was traced, keep the mean and the inverse deviation in the input's dtype; eager's
kernels on CPUs keep float32. A backward reads what was traced, whoever ran the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx.node import Argument

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_STATISTICS = (1, 2)  # among a norm's results
_PARAMETERS = {  # where a norm's weight and bias are among its arguments
    aten._native_batch_norm_legit_functional.default: (1, 2),
    aten.native_group_norm.default: (1, 2),
    aten.native_layer_norm.default: (2, 3),
}


def as_traced(gm: fx.GraphModule) -> None:
    """Insert the conversions that eager's kernels of a graph on CPUs leave out."""
    changed = False
    found = (
        (node, [*node.args, None, None])
        for target in _PARAMETERS
        for node in gm.graph.find_nodes(op="call_function", target=target)
    )
    for node, given in found:
        if not _is_mixed(given[0], [given[k] for k in _PARAMETERS[node.target]]):
            continue
        results = list(node.meta["val"])
        for user in list(node.users):
            k = user.args[1]
            if k not in _STATISTICS or user.meta["val"].dtype not in _HALF:
                continue
            traced = user.meta["val"]
            results[k] = user.meta["val"] = traced.to(torch.float32)
            with gm.graph.inserting_after(user):
                cast = gm.graph.call_function(
                    aten._to_copy.default, (user,), {"dtype": traced.dtype}
                )
            cast.meta["val"] = traced
            user.replace_all_uses_with(cast, delete_user_cb=lambda n, cast=cast: n is not cast)
            changed = True
        node.meta["val"] = tuple(results)
    if changed:
        gm.recompile()


def _is_mixed(x: Argument, parameters: Sequence[Argument]) -> bool:
    if not isinstance(x, fx.Node):
        return False
    value: torch.Tensor = x.meta["val"]
    wide = (p.meta["val"].dtype is torch.float32 for p in parameters if isinstance(p, fx.Node))
    return value.device.type == "cpu" and value.dtype in _HALF and any(wide)
