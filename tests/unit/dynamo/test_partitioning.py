"""What a backward compares for equality is kept, and not computed once more."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_pruner.dynamo.capture.partitioning import keep_compared

aten = torch.ops.aten


def joint(x, tangents):
    """Forward and backward of the largest of each column, as AOTAutograd traces them."""
    value = torch.erf(x)
    largest = value.transpose(0, 1).amax(1)
    equal = largest.view(4, 1) == value.transpose(0, 1)
    gradient = tangents.view(4, 1) / equal.sum(1, keepdim=True) * equal
    return largest, gradient * (gradient == value.transpose(0, 1))


def traced():
    gm = make_fx(joint, tracing_mode="fake")(torch.randn(8, 4), torch.randn(4))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("x", "tangents_1"), strict=True):
        node.name = name
    return gm


def policies(gm):
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    return {n.target: n.meta.get("recompute") for n in nodes if "recompute" in n.meta}


def test_operands_are_kept_behind_their_views() -> None:
    gm = traced()
    keep_compared(gm)
    saved = CheckpointPolicy.MUST_SAVE
    assert policies(gm) == {aten.erf.default: saved, aten.amax.default: saved}


def test_what_is_to_be_computed_again_stays_so() -> None:
    gm = traced()
    (erf,) = gm.graph.find_nodes(op="call_function", target=aten.erf.default)
    erf.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    keep_compared(gm)
    assert policies(gm)[aten.erf.default] == CheckpointPolicy.MUST_RECOMPUTE


def test_integers_and_inputs_have_no_last_digits() -> None:
    def fn(x, at):
        return x * (x == 1.0 * x.detach()), (at * 2 == at + 1).sum()

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4), torch.arange(4))
    keep_compared(gm)
    assert policies(gm) == {aten.mul.Tensor: CheckpointPolicy.MUST_SAVE}
