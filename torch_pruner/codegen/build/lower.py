"""Kernels to machine code: one host function calls every kernel, in process or from a library.

The calling convention is one integer: the address of a table of 64-bit addresses. The caller owns
all memory, and nothing is checked or copied on the way in, so callers must hand over dense buffers
aligned to ``ALIGNMENT``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from torch_pruner import exc
from torch_pruner.codegen.build.kernel_object import Division, function_name
from torch_pruner.codegen.build.link import make_room
from torch_pruner.codegen.build.load import bound
from torch_pruner.codegen.build.passes import PLAIN
from torch_pruner.codegen.build.region import Called, Step, parts_of, region
from torch_pruner.codegen.build.spill import spill
from torch_pruner.codegen.build.stealing import Stealing
from torch_pruner.codegen.build.wrapping import wraps_around
from torch_pruner.codegen.tir.builders import (
    Buffer,
    Expr,
    GlobalVar,
    IRModule,
    PrimFunc,
    S,
    Stmt,
    T,
    Var,
    as_pointer,
    pointer,
    seq,
    tvm,
)
from torch_pruner.config import COMPILERS, c_compiler
from torch_pruner.graph.memory import ALIGNMENT, STEALING_BYTES, KernelCall, Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.target import TargetSpec

Array = npt.NDArray[Any]

# TVM tags each access with a type per buffer variable. Once two kernels are inlined into one
# program, what the first writes and what the second reads are the same memory under two such types,
# and LLVM would swap the two.
_LLVM_OPTIONS = ("-enable-tbaa:bool=false",)
_NO_LOOP_VECTORIZER = "-vectorize-loops:bool=false"
# A program is one function of hundreds of rounds, for which LLVM's passes take quadratic time; what
# it does itself are calls.
_AS_WRITTEN = {"opt-level": 0}
_AS_IT_IS = (
    1  # any calling convention but TVM's default, which packs the arguments of what is public
)

Function = Callable[[list[Expr]], Expr]  # the call of a part with its arguments


class Compiled(Protocol):
    """Machine code in memory: its entries by name, each a function of a table's address."""

    def __getitem__(self, name: str) -> Callable[[int], None]: ...

    def export_library(self, path: str, *, cc: str) -> None: ...

    def write_to_file(self, path: str, fmt: str) -> None: ...


def program_module(
    kernels: Mapping[str, ScheduledKernel],
    programs: Mapping[str, Sequence[KernelCall]],
    slots: int,
    threads: int = 1,
) -> IRModule:
    """An IRModule with parts of kernels as private functions and a public function per program.

    ``threads``: for how many the calls' turns and places were planned.
    """
    functions: dict[GlobalVar, PrimFunc] = {}
    parts: dict[str, list[tuple[Function, Division]]] = {}
    for name, kernel in kernels.items():
        parts[name] = []
        for i, (func, division) in enumerate(parts_of(kernel)):
            functions[var := GlobalVar(function_name(name, i))] = func
            parts[name].append((_private(var), division))
    functions |= _entries(parts, programs, slots, threads)
    return IRModule(functions)


def kernel_module(name: str, kernel: ScheduledKernel) -> tuple[IRModule, tuple[Division, ...]]:
    """An IRModule with the parts of a kernel as public functions, for ``entry_module`` to call."""
    parts = parts_of(kernel)
    functions = {}
    for i, (func, _) in enumerate(parts):
        symbol = function_name(name, i)
        # A convention that is said is left as it is: plain pointers and numbers.
        attributes = {"global_symbol": symbol, "calling_conv": _AS_IT_IS}
        functions[GlobalVar(symbol)] = func.with_attr(attributes)
    return IRModule(functions), tuple(division for _, division in parts)


def entry_module(
    kernels: Mapping[str, Sequence[Division]],
    programs: Mapping[str, Sequence[KernelCall]],
    slots: int,
    threads: int,
    lines: Place | None,
    target: TargetSpec,
) -> IRModule:
    """An IRModule with a public function per program, which call kernels that lie elsewhere.

    ``lines``: memory by which threads take each other's tasks, as ``MemoryPlan.lines`` has it.
    """
    parts = {
        name: [(_extern(function_name(name, i)), part) for i, part in enumerate(divisions)]
        for name, divisions in kernels.items()
    }
    helped = None if lines is None else (lines, target)
    return IRModule(_entries(parts, programs, slots, threads, helped))


def _private(var: GlobalVar) -> Function:
    return lambda given: tvm.ir.Call(var, given, ret_ty=tvm.ir.PrimType("int32"))


def _extern(symbol: str) -> Function:
    return lambda given: T.call_extern("int32", symbol, *given)


def _entries(
    parts: Mapping[str, Sequence[tuple[Function, Division]]],
    programs: Mapping[str, Sequence[KernelCall]],
    slots: int,
    threads: int,
    helped: tuple[Place, TargetSpec] | None = None,
) -> dict[GlobalVar, PrimFunc]:
    functions = {}
    for entry, calls in programs.items():
        table, begin, address = _table(slots)
        steps = [step for call in calls for step in _steps(table, call, parts[call.kernel])]
        if not steps:
            body = seq(begin)
        elif helped is None:
            body = seq([*begin, region(steps, threads)])
        else:
            stealing, made = _stealing(table, threads, *helped)
            ran = seq([*begin, *made, stealing.cleared(), region(steps, threads, stealing)])
            body = stealing.imported(ran)
        func = T.PrimFunc([address], body)
        functions[GlobalVar(entry)] = func.with_attr({"global_symbol": entry})
    return functions


def _table(slots: int) -> tuple[Buffer, list[Stmt], Var]:
    """The table of addresses, the statements that define it, and the entry's parameter."""
    address = T.Var("table", "int64")
    table_ptr = pointer("table_ptr", "int64")
    table = T.decl_buffer((max(slots, 1),), "int64", "addresses", data=table_ptr)
    begin: list[Stmt] = [
        S.Bind(table_ptr, as_pointer(address, "int64")),
        S.DeclBuffer(table, data=table_ptr),
    ]
    return table, begin, address


def _stealing(
    table: Buffer, threads: int, place: Place, target: TargetSpec
) -> tuple[Stealing, list[Stmt]]:
    """How threads help each other, and the statements that define the memory for it."""
    where = pointer("lines_ptr", "int64")
    count = (threads + 1) * STEALING_BYTES // 8
    lines = T.decl_buffer((count,), "int64", "lines", data=where)
    address = table[place.slot] + T.const(place.offset, "int64")
    made = [S.Bind(where, as_pointer(address, "int64")), S.DeclBuffer(lines, data=where)]
    return Stealing(lines, threads, target), made


def _steps(
    table: Buffer, call: KernelCall, parts: Sequence[tuple[Function, Division]]
) -> list[Step]:
    turn = call.turn
    if turn is None:
        return [Step(part, _called(table, call, function)) for function, part in parts]
    own = any(place.apart for place in call.args)
    steps: list[Step] = []
    for function, part in parts:
        ends = turn.epilogue and len(steps) == len(parts) - 1
        steps.append(
            Step(
                part,
                _called(table, call, function),
                phase=turn.phase - 1 if turn.epilogue and not ends else turn.phase,
                everywhere=turn.everywhere or ends or (turn.prologue and not steps),
                joins=all(before.everywhere for before in steps),
                own=own,
                more=turn.more,
            )
        )
    return steps


def _called(table: Buffer, call: KernelCall, function: Function) -> Called:
    """The call of a part by a thread, whose number says which copies are its own."""

    def statement(thread: Expr | None, *numbers: Expr | None) -> Stmt:
        pointers = [_pointer(table, place, thread) for place in call.args]
        return S.Evaluate(function([*pointers, *(n for n in numbers if n is not None)]))

    return statement


def _pointer(table: Buffer, argument: Place, thread: Expr | None) -> Expr:
    address = table[argument.slot]
    if argument.apart and thread is not None:
        address = address + thread.astype("int64") * T.const(argument.apart, "int64")
    if argument.offset:
        address = address + T.const(argument.offset, "int64")
    return as_pointer(address, "uint8")


def compile_module(module: IRModule, target: TargetSpec, *, optimised: bool = True) -> Compiled:
    """Machine code for a module, in memory. Raises ``CompileError`` with TVM's message."""
    options = [*_LLVM_OPTIONS, *([_NO_LOOP_VECTORIZER] if wraps_around(module) else ())]
    attributes = target.tvm_target() | {"cl-opt": options} | ({} if optimised else _AS_WRITTEN)
    try:
        with tvm.transform.PassContext():
            built: Compiled = tvm.tirx.build(spill(module), tvm.target.Target(attributes), PLAIN)
            return built
    except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as err:
        raise exc.CompileError("kernels", "TVM refused the generated code", log=str(err)) from err


def export_library(library: Compiled, path: Path) -> None:
    """Link into a shared library.

    Raises ``CompileError`` when there is no C compiler or it fails.
    """
    compiler = c_compiler()
    if compiler is None:
        raise exc.CompileError.no_compiler("the kernel library", COMPILERS)
    make_room(path)
    try:
        library.export_library(str(path), cc=compiler)
    except RuntimeError as err:
        raise exc.CompileError("the kernel library", f"{compiler} failed", log=str(err)) from err


def object_code(
    module: IRModule, target: TargetSpec, path: Path, *, optimised: bool = True
) -> None:
    """Write a module as an object file. Raises ``CompileError``, ``OSError`` without room."""
    built = compile_module(module, target, optimised=optimised)
    make_room(path)
    built.write_to_file(str(path), "o")


@dataclass(slots=True)
class LoadedKernel:
    """A kernel that runs in this process on numpy arrays."""

    kernel: ScheduledKernel
    _library: Compiled
    _entry: Callable[[int], None]

    def bind(self, arrays: Sequence[Array]) -> Callable[[], None]:
        """A call without arguments on fixed arrays (inputs, outputs; scratch is made here).

        Arrays must be dense and aligned to 64 bytes: see ``aligned``.
        """
        scratch = [aligned(b.shape, b.dtype) for b in self.kernel.scratch]
        return bound(self._entry, [*arrays, *scratch])


def compile_kernel(kernel: ScheduledKernel, target: TargetSpec) -> LoadedKernel:
    """Compile one kernel for measuring it in this process."""
    count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
    call = KernelCall("kernel", tuple(Place(i) for i in range(count)))
    library = compile_module(program_module({"kernel": kernel}, {"main": [call]}, count), target)
    return LoadedKernel(kernel, library, library["main"])


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of an IR dtype (bfloat16 comes from ml_dtypes)."""
    if dtype == "bfloat16":
        import ml_dtypes  # a dependency of TVM

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype)


def aligned(shape: Sequence[int], dtype: str) -> Array:
    """An uninitialised array on a 64-byte boundary."""
    kind = numpy_dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(kind).reshape(tuple(shape))
