"""For which processor the loops are compiled that stand in for a GPU's threads."""

from __future__ import annotations

from torch_pruner.target import TargetSpec


def target() -> TargetSpec:
    """This one, without its vectors of 64 bytes.

    LLVM's loop vectorizer makes wrong code of such loops for a Zen 4 (docs/tvm-facts.md). Loops of
    CPU kernels are vectorised by us.
    """
    here = TargetSpec.detect(1)
    if not here.is_x86 or here.lanes("float32") <= 8:
        return here
    return TargetSpec.from_dict({"kind": "llvm", "mcpu": "x86-64-v3"}, 1)
