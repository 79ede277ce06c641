"""Kernels to CUDA C: TVM lowers and prints them, with a preamble of our own in place of its own.

TVM's preamble pulls in the CUDA C++ library, which takes longer to parse than a kernel to compile.
"""

from __future__ import annotations

import contextlib
import re
import threading
from functools import cache
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.codegen.build.gpu import dependent, together
from torch_pruner.codegen.build.gpu.image import Launch, launches_of
from torch_pruner.codegen.build.spill import spill
from torch_pruner.codegen.parts.gpu import (
    asynchronous,
    bulk,
    cluster,
    early,
    tensor_core,
    tf32,
    warpgroup,
)
from torch_pruner.codegen.tir.builders import (
    GlobalVar,
    IRModule,
    PrimFunc,
    S,
    Stmt,
    T,
    pointer,
    tvm,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch_pruner.codegen.parts.kernel import ScheduledKernel

_TYPES = """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define uchar unsigned char
#define ushort unsigned short
#define uint unsigned int
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
#define CUDART_INF __longlong_as_double(0x7ff0000000000000LL)
#define CUDART_NAN __longlong_as_double(0x7fffffffffffffffLL)
"""
_NAME = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')
_KERNEL = re.compile(r'(?=^extern "C" __global__)', re.MULTILINE)
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\)")
_SHARED = re.compile(r"__shared__ alignas\(\d+\) ([\w ]+?) (\w+)\[(\d+)\];")
_SIZES = {
    "float": 4, "double": 8, "half": 2, "ushort": 2, "short": 2, "int": 4, "uint": 4,
    "int64_t": 8, "long long": 8, "signed char": 1, "uchar": 1, "bool": 1,
}  # fmt: skip
_ALIGNED = 128
# TVM's names of a function's launches: the first has no number.
_DEVICE = re.compile(r"(?P<name>.+?)_kernel(?:_(?P<number>\d+))?")
_COMPILE = "tvm_callback_cuda_compile"  # what TVM calls with the source that it has printed
_this_thread = threading.local()
_KERNEL_LAUNCH = 2  # of TVM's calling conventions
_HALVES = """
#include <cuda_fp16.h>
static __device__ __forceinline__ unsigned __pack_half2(half low, half high) {
  return (unsigned)__half_as_ushort(low) | ((unsigned)__half_as_ushort(high) << 16);
}
struct __align__(8) half4 {
  half x, y, z, w;
};
static __device__ __forceinline__ half4 make_half4(half x, half y, half z, half w) {
  return half4{x, y, z, w};
}
"""

_VECTOR = re.compile(r"\b((?:u?(?:char|short|int|longlong))([234]))\b")


def cuda_source(
    kernels: Mapping[str, ScheduledKernel],
    arch: str,
    copies: Mapping[str, Collection[int]] | None = None,
) -> tuple[str, dict[str, Launch]]:
    """CUDA C of all kernels, and how each is launched. ``arch``: ``sm_80``, ``sm_90a``, ...

    A kernel's second launch is under its name with "/1", and so on (``image.launches_of``).
    ``copies``: of some kernels, for how many calls at once they are launched, too (``together``).

    Raises ``CompileError`` with TVM's message.
    """
    device = {"kind": "cuda", "arch": arch, "max_threads_per_block": 1024}
    target = tvm.target.Target(device, host={"kind": "llvm"})
    functions = {
        GlobalVar(name): _of_pointers(kernel.func).with_attr({"global_symbol": name})
        for name, kernel in kernels.items()
    }
    config = {"tirx.disable_storage_rewrite": True, "tirx.disable_cse_tir": True}
    try:
        with tvm.transform.PassContext(config=config):
            module = spill(IRModule(functions), interrupts=False)
            printed = _lowered(module, target)
            with _printed_only():
                built = tvm.get_global_func("target.build.cuda")(printed, target)
    except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as err:
        raise exc.CompileError("kernels", "TVM refused the generated code", log=str(err)) from err
    code = str(built.inspect_source("cuda"))
    code, shared = _dynamic_shared(code[code.index('extern "C"') :])
    launches = {}
    for var, func in printed.functions.items():
        if (found := _DEVICE.fullmatch(str(var.name_hint))) and found["name"] in kernels:
            name, number = found["name"], found["number"]
            key = f"{name}/{number}" if number else name
            launches[key] = _launch(func, kernels[name], shared, dependent.allowed(arch))
    wanted: dict[str, Collection[int]] = {}
    for name, counts in (copies or {}).items():
        kernel = kernels[name]
        arguments = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
        for key in launches_of(name, launches):
            wanted[launches[key].symbol] = counts
            for n in counts:
                more = together.key(name, n) + key.removeprefix(name)
                launches[more] = together.launch_of(launches[key], n, arguments)
    code = _preamble(code) + together.with_copies(_roomy(code), wanted)
    if dependent.allowed(arch):
        code = dependent.waiting(code, {launch.symbol for launch in launches.values()})
    return cluster.launched_together(code), launches


@contextlib.contextmanager
def _printed_only() -> Iterator[None]:
    """Inside, this thread's kernels are printed and not compiled.

    Where TVM's CUDA runtime can be loaded, and only there, TVM compiles what it has printed,
    without our preamble. What others of this process build by TVM is compiled as before.
    """
    _keep_from_compiling()
    _this_thread.prints = True
    try:
        yield
    finally:
        _this_thread.prints = False


@cache
def _keep_from_compiling() -> None:
    theirs = tvm.get_global_func(_COMPILE, allow_missing=True)

    def compiled(code: str) -> object:
        if getattr(_this_thread, "prints", False) or theirs is None:
            return b""  # never loaded
        return theirs(code)

    tvm.register_global_func(_COMPILE, compiled, override=True)


def _of_pointers(func: PrimFunc) -> PrimFunc:
    """The function with pointers for parameters, as a kernel has them."""
    pointers, declared = [], []
    for buf in func.params:
        data = pointer(f"{buf.name}_ptr", str(buf.dtype))
        pointers.append(data)
        declared.append(S.DeclBuffer(buf, data=data))
    body = S.SeqStmt([*declared, func.body])
    return T.PrimFunc(pointers, body).with_attr({"tirx.noalias": True})


def _lowered(module: IRModule, target: object) -> IRModule:
    """The device functions of a module, ready to be printed.

    TVM's own pipeline also plans barriers, and refuses kernels where it would want one in a branch;
    ours have all that they need.
    """
    passes = tvm.tirx.transform
    lower = [
        passes.BindTarget(target),
        passes.StmtSimplify(),
        passes.FlattenBuffer(),
        passes.NarrowDataType(32),
        passes.VectorizeLoop(True),
        passes.UnrollLoop(),
        passes.StmtSimplify(),
        passes.RemoveNoOp(),
        tvm.s_tir.transform.RewriteUnsafeSelect(),
        passes.AnnotateEntryFunc(),
        passes.SplitHostDevice(),
        passes.Filter(_on_device),
        passes.StmtSimplify(),
        passes.LowerIntrin(),
    ]
    lowered: IRModule = tvm.ir.transform.Sequential(lower)(module)
    return lowered


def _on_device(func: PrimFunc) -> bool:
    return bool(func.attrs.get("calling_conv", 0) == _KERNEL_LAUNCH)


def _preamble(code: str) -> str:
    """Only what this source needs: headers take longer to read than kernels."""
    parts = [_TYPES]
    if "half" in code or tensor_core.HELD_NAME in code:
        parts.append(_HALVES)
    if "~" in code:
        parts += [_inverted(*found) for found in sorted(set(_VECTOR.findall(code)))]
    parts += [
        h.SOURCE
        for h in (tensor_core, tf32, asynchronous, bulk, warpgroup, cluster, early)
        if h.NAME in code
    ]
    if tensor_core.HELD_NAME in code:
        parts.append(tensor_core.HELD_SOURCE)
    return "".join(parts)


def _inverted(vector: str, lanes: str) -> str:
    """The operator ``~`` of a type, which TVM prints for vectors and CUDA has for numbers alone."""
    each = ", ".join(f"~x.{lane}" for lane in "xyzw"[: int(lanes)])
    head = f"static __device__ __forceinline__ {vector} operator~({vector} x)"
    return f"{head} {{ return make_{vector}({each}); }}\n"


def _roomy(code: str) -> str:
    """The source with as many registers as a block may have for kernels that use tensor cores.

    The assembler else keeps registers free for other blocks, and to that end waits for each
    fragment before it loads the next.
    """
    parts = _KERNEL.split(code)
    wide = {
        m.group(1)
        for p in parts
        if (tensor_core.NAME in p or warpgroup.NAME in p) and (m := _NAME.match(p))
    }
    for n, part in enumerate(parts):
        if (name := _NAME.match(part)) and name.group(1) in wide:
            parts[n] = _BOUNDS.sub(r"__launch_bounds__(\1, 1)", part, count=1)
    return "".join(parts)


def _dynamic_shared(code: str) -> tuple[str, dict[str, int]]:
    """The source with shared memory sized at launch, and how much each kernel takes.

    What a kernel declares may not exceed 48 KiB; what it is launched with may be all that there is.
    """
    parts = _KERNEL.split(code)
    sizes: dict[str, int] = {}
    for n, part in enumerate(parts):
        name = _NAME.match(part)
        taken, aligned = 0, warpgroup.ALIGNED if warpgroup.NAME in part else _ALIGNED

        def place(found: re.Match[str], step: int = aligned) -> str:
            nonlocal taken
            kind, variable, count = found.groups()
            first, taken = taken, taken + -(-_SIZES[kind] * int(count) // step) * step
            pointer = f"reinterpret_cast<{kind}*>(torch_pruner_shared + {first})"
            return f"{kind}* const {variable} = {pointer};"

        parts[n] = _SHARED.sub(place, part)
        if taken:
            if name is None:
                raise exc.CompileError(
                    "kernels", "no name where shared memory is declared", log=part
                )
            sizes[name.group(1)] = taken
    widest = warpgroup.ALIGNED if warpgroup.NAME in code else _ALIGNED
    declared = f"extern __shared__ __align__({widest}) unsigned char torch_pruner_shared[];\n"
    return (declared if sizes else "") + "".join(parts), sizes


def _launch(
    func: PrimFunc, kernel: ScheduledKernel, shared: Mapping[str, int], waits: bool
) -> Launch:
    kinds = ("in", "out", "scratch")
    counts = (len(kernel.inputs), len(kernel.outputs), len(kernel.scratch))
    names = [f"{kind}{i}_ptr" for kind, n in zip(kinds, counts, strict=True) for i in range(n)]
    extents: dict[str, int] = {}
    todo: list[Stmt] = [func.body]
    while todo:
        at = todo.pop()
        if isinstance(at, S.SeqStmt):
            todo += list(at.seq)
        elif isinstance(at, S.AttrStmt):
            if at.attr_key == "thread_extent":
                extents[str(at.node.thread_tag)] = int(at.value)
            todo.append(at.body)
    symbol = str(func.attrs["global_symbol"])
    return Launch(
        symbol,
        extents.get("blockIdx.x", 1),
        extents.get("threadIdx.x", 1),
        tuple(names.index(str(p.name)) for p in func.params),
        shared.get(symbol, 0),
        waits=waits,
    )
