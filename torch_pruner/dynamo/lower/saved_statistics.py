"""What batch norms keep for their backward, in the dtype that torch traced.

By autocast an input may be bfloat16 or float16 beside float32 parameters. Torch's decomposition,
and so what was traced, keeps the batch's mean and inverse deviation in the input's dtype; eager's
kernel on CPUs keeps float32. A backward reads what was traced, whoever ran the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from torch.fx.node import Argument

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_STATISTICS = (1, 2)  # among a batch norm's results


def as_traced(gm: fx.GraphModule) -> None:
    """Insert the conversions that eager's kernels of a graph on CPUs leave out."""
    target, changed = aten._native_batch_norm_legit_functional.default, False
    for node in gm.graph.find_nodes(op="call_function", target=target):
        if not _is_mixed(node.args[0], node.args[1]):
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


def _is_mixed(x: Argument, weight: Argument) -> bool:
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return False
    value = x.meta["val"]
    on_cpu = value.device.type == "cpu"
    return bool(on_cpu and value.dtype in _HALF and weight.meta["val"].dtype is torch.float32)
