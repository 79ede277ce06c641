"""A program that writes memory anew, its own values, divided among threads like rows of a kernel.

A kernel reads what the kernel before it has written, and that lies in the cache of the core that
wrote it. A kernel that is called again and again finds its inputs in the caches of all cores, which
hides what it costs to read another core's share. So inputs are renewed between timed calls.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from torch_pruner.codegen.build.lower import compile_module
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    VECTORIZED,
    GlobalVar,
    IRModule,
    PrimFunc,
    S,
    T,
    as_pointer,
    pointer,
    seq,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from torch_pruner.target import TargetSpec

_LANES = 16
_LINE = 4 * _LANES  # bytes
_MOST = 1 << 24  # lines of one array


def renewer(
    target: TargetSpec, threads: int
) -> Callable[[Sequence[npt.NDArray[Any]]], Callable[[], None]]:
    """Compiles the program; the result makes a call without arguments for given arrays."""
    entry = compile_module(IRModule({GlobalVar("renew"): _program(threads)}), target)
    function = entry["renew"]

    def bind(arrays: Sequence[npt.NDArray[Any]]) -> Callable[[], None]:
        tables = [
            (ctypes.c_int64 * 2)(a.ctypes.data, min(a.nbytes // _LINE, _MOST)) for a in arrays
        ]
        addresses = [ctypes.addressof(t) for t in tables]

        def call(_keep: object = (entry, arrays, tables)) -> None:
            for address in addresses:
                function(address)

        return call

    return bind


def _program(threads: int) -> PrimFunc:
    """A function of the address of (address of an array, number of its cache lines)."""
    address = T.Var("table", "int64")
    table_ptr = pointer("table_ptr", "int64")
    first, second = pointer("from", "float32"), pointer("to", "float32")
    lines, share = T.Var("lines", "int32"), T.Var("share", "int32")
    table = T.decl_buffer((2,), "int64", "table", data=table_ptr)
    # Two names of one place: nobody may conclude that nothing changes.
    source = T.decl_buffer((_MOST * _LANES,), "float32", "source", data=first)
    target = T.decl_buffer((_MOST * _LANES,), "float32", "target", data=second)

    p, i, v = (T.Var(n, "int32") for n in ("p", "i", "v"))
    at = (p * share + i) * _LANES + v
    line = S.For(v, 0, _LANES, VECTORIZED, S.BufferStore(target, source[at], [at]))
    own = S.For(i, 0, T.min(share, lines - p * share), SERIAL, line)
    body = seq(
        [
            S.Bind(table_ptr, as_pointer(address, "int64")),
            S.DeclBuffer(table, data=table_ptr),
            S.Bind(first, as_pointer(table[0], "float32")),
            S.DeclBuffer(source, data=first),
            S.Bind(second, as_pointer(table[0], "float32")),
            S.DeclBuffer(target, data=second),
            S.Bind(lines, table[1].astype("int32")),
            S.Bind(share, T.floordiv(lines + (threads - 1), threads)),
            S.For(p, 0, threads, PARALLEL, own),
        ]
    )
    return T.PrimFunc([address], body).with_attr({"global_symbol": "renew"})
