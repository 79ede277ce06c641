"""Operators of expressions that TVM has not: what is rounded once, and what is seldom computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.ir.op import Op, register_op_attr

from torch_pruner.codegen.tir.builders import Expr, T
from torch_pruner.codegen.tir.vmath import Bindings

if TYPE_CHECKING:
    from collections.abc import Callable

FUSED = "torch_pruner.fused"
"""``x * y + z``, rounded once on every processor: TVM's own may be rounded twice."""
RARE = "torch_pruner.rare"
"""The second of three operands, in whose place the third does where the first does not hold:
``build.spill`` makes a branch of it, in a loop over lanes one for all of them."""

for _name, _printed in ((FUSED, "fused"), (RARE, "rare")):
    register_op_attr(_name, "TCallEffectKind", T.CallEffectKind.Pure.value)
    register_op_attr(_name, "TVectorizable", True)
    register_op_attr(_name, "TScriptPrinterName", _printed)
T.register_intrin_lowering(
    FUSED, target="llvm", f=lambda call: T.call_llvm_intrin(call.ty, "llvm.fma", *call.args)
)
T.register_intrin_lowering(
    FUSED, target="cuda", f=lambda call: T.call_pure_extern(str(call.ty.dtype), "fma", *call.args)
)


def fused(x: Expr, y: Expr, z: Expr) -> Expr:
    return T.call_intrin(z.ty, Op.get(FUSED), x, y, z)


def rarely(b: Bindings, condition: Expr, rare: Callable[[Bindings], Expr], common: Expr) -> Expr:
    """``rare``, of bindings of its own, or ``common`` where ``condition`` does not hold.

    ``rare`` must be right everywhere, ``common`` only there: where a branch can be, what ``rare``
    binds is computed only if some lane's condition holds, and elsewhere nothing but it is.
    """
    common, own = b(common), Bindings()
    value = own.close(rare(own))
    return b(T.call_intrin(common.ty, Op.get(RARE), condition, value, common))
