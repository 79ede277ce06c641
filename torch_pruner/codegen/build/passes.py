"""TVM's passes that our kernels need.

TVM's own pipeline has some fifty, most of them for blocks, thread bindings and memories of GPUs.
Our emitters write loops, for which those do nothing but look: half of the time of all passes. What
is left gives the same machine code (``tests/families/test_passes.py``). Two of TVM's would do harm:
storage rewrite would merge the accumulators into one block too large for the stack, and common
subexpressions, which are LLVM's to find, are used before their definition (TVM 0.27).
"""

from __future__ import annotations

from typing import Any

from torch_pruner.codegen.tir.builders import tvm

PLAIN = "torch_pruner.plain"
"""The name by which ``tvm.tirx.build`` knows these passes."""


def _plain() -> tuple[Any, Any, Any]:
    """The passes, and what makes those that come last on the host and on a device."""
    transform, scheduled = tvm.tirx.transform, tvm.s_tir.transform
    passes = [
        scheduled.StmtSimplify(),
        scheduled.LowerOpaqueBlock(),  # loops of one iteration go: later passes stumble over them
        transform.FlattenBuffer(),
        transform.BF16ComputeLegalize(),
        transform.NarrowDataType(32),
        transform.VectorizeLoop(True),
        transform.UnrollLoop(),
        scheduled.RenormalizeSplitPattern(),
        transform.StmtSimplify(),
        scheduled.RewriteUnsafeSelect(),
        transform.AnnotateEntryFunc(),
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
        transform.BF16StorageLegalize(),
    ]
    last = tvm.tirx.compilation_pipeline
    sequence = tvm.ir.transform.Sequential(passes)
    return sequence, last.finalize_host_passes, last.finalize_device_passes


tvm.tirx.register_tir_pipeline(PLAIN, _plain)
