"""TVM for emitters: checks the installed versions, imports it, hands out what they use."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch_pruner.versions import check_tvm_versions

# A mismatched tvm-ffi ends in a segmentation fault, so this must come before the import.
check_tvm_versions()

import tvm  # noqa: E402

if TYPE_CHECKING:  # what stands in `tirx.pyi`; see there
    from collections.abc import Callable, Iterator, Sequence

    from torch_pruner.codegen.tir import tirx as S
    from torch_pruner.codegen.tir import tirx as T
    from torch_pruner.codegen.tir.tirx import Call, GlobalVar, IRModule
else:
    from tvm import tirx as T
    from tvm.ir import Call, GlobalVar, IRModule
    from tvm.tirx import stmt as S

Expr = T.Expr
Var = T.Var
Buffer = T.Buffer
PrimFunc = T.PrimFunc
TensorLoad = tvm.ir.expr.TensorLoad  # an element of a buffer: its ``source`` at its ``indices``
Stmt = S.Stmt
ForKind = S.ForKind

SERIAL, PARALLEL, VECTORIZED, UNROLLED = (
    S.ForKind.SERIAL,
    S.ForKind.PARALLEL,
    S.ForKind.VECTORIZED,
    S.ForKind.UNROLLED,
)

__all__ = [
    "PARALLEL", "SERIAL", "UNROLLED", "VECTORIZED", "Buffer", "Call", "Expr", "ForKind",
    "GlobalVar", "IRModule", "PrimFunc", "S", "Stmt", "T", "TensorLoad", "Var", "as_pointer",
    "buffer", "imm", "importing", "index_dtype", "index_var", "indexing", "intrinsic", "loop",
    "on_cpu", "pointer", "prefetch", "seq", "simplified", "stack", "stepped", "streaming", "tvm",
    "vector", "when", "widened", "workspace",
]  # fmt: skip

_index_dtype: ContextVar[str] = ContextVar("index_dtype", default="int32")
_past_caches: ContextVar[bool] = ContextVar("past_caches", default=False)


@contextmanager
def indexing(dtype: str) -> Iterator[None]:
    """What is emitted inside has indices of ``dtype``: "int32", or "int64" for large buffers."""
    token = _index_dtype.set(dtype)
    try:
        yield
    finally:
        _index_dtype.reset(token)


def index_dtype() -> str:
    """The dtype of the indices in the kernel that is being emitted."""
    return _index_dtype.get()


@contextmanager
def streaming(*, past_caches: bool) -> Iterator[None]:
    """How what is emitted inside fetches what it reads ``once``."""
    token = _past_caches.set(past_caches)
    try:
        yield
    finally:
        _past_caches.reset(token)


def imm(value: int) -> Expr:
    """An index constant."""
    return T.const(value, index_dtype())


def index_var(name: str) -> Var:
    """A variable that holds an index."""
    return T.Var(name, index_dtype())


def simplified(index: Expr) -> Expr:
    """An index without terms that cancel out, by which TVM's estimates of regions divide."""
    found: Expr = tvm.sym.Analyzer().simplify(index)
    return found


def is_const(value: Expr, number: int) -> bool:
    """Whether an expression is a constant, this one."""
    return isinstance(value, tvm.tirx.IntImm) and int(value.value) == number


def widened(number: Expr) -> Expr:
    """The number of a task or of a thread, which has 32 bits, as an index."""
    return number if index_dtype() == "int32" else T.Cast(index_dtype(), number)


def loop(
    extent: int | Expr, body: Callable[[Expr], Stmt], kind: ForKind = SERIAL, name: str = "i"
) -> Stmt:
    """A counted loop around ``body(index)``; a loop of one iteration is only its body."""
    if isinstance(extent, int) and extent == 1:
        return body(imm(0))
    if kind == PARALLEL:  # the runtime counts tasks
        task = T.Var(name, "int32")
        return S.For(task, 0, extent, kind, body(widened(task)))
    var = index_var(name)
    return S.For(var, imm(0), imm(extent) if isinstance(extent, int) else extent, kind, body(var))


def stepped(extent: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """A loop around one parallel loop, ``body(step)``: threads meet after each of its steps."""
    step = T.Var("step", "int32")
    return S.For(step, 0, extent, SERIAL, body(widened(step)))


def enclosed(body: Stmt) -> Stmt:
    """``body``, whose buffers are not those of what comes after it."""
    return S.For(index_var("once"), imm(0), imm(1), SERIAL, body)


def seq(stmts: Sequence[Stmt | None]) -> Stmt:
    """The statements one after another; None stands for no statement."""
    flat = [s for s in stmts if s is not None]
    return flat[0] if len(flat) == 1 else S.SeqStmt(flat)


def buffer(numel: int, dtype: str, name: str, scope: str = "global") -> Buffer:
    """A flat buffer of ``numel`` elements."""
    kept = "uint16" if dtype == "bfloat16" else dtype
    return T.decl_buffer((imm(max(numel, 1)),), kept, name, scope=scope)


def stack(buf: Buffer) -> Stmt:
    """Put a small buffer on the stack, where the compiler can keep it in registers."""
    return S.AllocBuffer(buf, annotations={"disable_lower_builtin": T.const(1, "bool")})


def workspace(buf: Buffer, body: Stmt) -> Stmt:
    """``body`` with a buffer of the thread that runs it: aligned to a line, and the same memory
    whenever the thread comes back."""
    return on_cpu(S.SeqStmt([S.AllocBuffer(buf), body]))


def pointer(name: str, dtype: str) -> Var:
    """A variable that holds an address of elements of ``dtype``."""
    return T.Var(name, _pointer_type(dtype))


def as_pointer(address: Expr, dtype: str) -> Expr:
    """A number taken for the address of elements of ``dtype``."""
    call: Expr = tvm.ir.Call(
        tvm.ir.Op.get("tirx.reinterpret"), [address], ret_ty=_pointer_type(dtype)
    )
    return call


def _pointer_type(dtype: str) -> T.PrimType:
    found: T.PrimType = tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global")
    return found


def on_cpu(body: Stmt) -> Stmt:
    """``body`` with the device that lowering of its temporary buffers asks for."""
    for key, value in (("device_type", 1), ("device_id", 0)):
        body = S.AttrStmt(T.const(0, "int32"), key, T.const(value, "int32"), body)
    return body


def when(condition: Expr, then: Stmt, otherwise: Stmt | None = None) -> Stmt:
    """A conditional statement."""
    return S.IfThenElse(condition, then, otherwise)


def prefetch(buf: Buffer, at: Expr, *, once: bool = False) -> Stmt:
    """Fetch the cache line of element ``at`` for reading; it may lie outside of the buffer.

    ``once``: a call of the kernel reads it no second time. In ``streaming(past_caches=True)`` it
    then drives nothing out of the far caches.
    """
    address = T.address_of(buf[at])
    locality = 0 if once and _past_caches.get() else 3
    read, keep, data = (T.const(v, "int32") for v in (0, locality, 1))
    return S.Evaluate(T.call_intrin("void", "tirx.prefetch", address, read, keep, data))


def vector(at: Expr, lanes: int) -> Expr:
    """Index of ``lanes`` neighbouring elements."""
    return T.Ramp(at, imm(1), lanes)


def intrinsic(name: str, *args: Expr) -> Stmt:
    """An instruction of LLVM's that returns nothing."""
    return S.Evaluate(T.call_llvm_intrin("void", name, *args))


def importing(llvm_ir: str, body: Stmt) -> Stmt:
    """``body``, which calls functions that are written in LLVM's language; they are inlined."""
    return S.AttrStmt(T.const(0, "int32"), "pragma_import_llvm", tvm.ir.StringImm(llvm_ir), body)
