"""Compiles kernels by Triton, as a process of its own: texts come in, machine code goes out.

A compiler that loops, runs out of memory or fails on one of its assertions costs this process, and
Triton's LLVM never meets that of TVM. Nothing but Triton is imported: run as a file (``-P``). Input
and output are JSON of one object each; ``triton.py`` says what is in them. An error ends it, with
the compiler's message on standard error: of several kernels each is then compiled alone.
"""

from __future__ import annotations

import base64
import json
import linecache
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_ENTRY = re.compile(r"\.entry\s+\w+\(([^)]*)\)")
ALIGNED = 16  # bytes to which every buffer is


def main() -> None:
    given = json.load(sys.stdin)
    triton.knobs.cache.dir = given["folder"]
    triton.knobs.runtime.interpret = False
    found = {name: _compiled(kernel, given) for name, kernel in given["kernels"].items()}
    json.dump({"version": triton.__version__, "kernels": found}, sys.stdout)


def function_of(text: str, name: str) -> Any:
    """The function ``kernel`` of ``text``; Triton asks for a function's lines by their file."""
    file = f"<triton kernel {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": f"kernel_{name}"}
    exec(compile(text, file, "exec"), scope)
    return scope["kernel"]


def _compiled(kernel: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    function = function_of(kernel["text"], kernel["symbol"])
    function._fn_name = function.__name__ = kernel["symbol"]
    names = list(function.arg_names)
    pointers = {name: f"*{of}" for name, of in zip(names, kernel["types"], strict=False)}
    signature = {**pointers, names[-1]: "constexpr"}
    source = ASTSource(
        function,
        signature,
        constexprs={names[-1]: given["early"]},
        attrs={(k,): [["tt.divisibility", ALIGNED]] for k in range(len(pointers))},
    )
    options = {"num_warps": kernel["warps"], "num_stages": kernel["stages"]}
    options |= {"maxnreg": kernel["registers"]} if kernel["registers"] else {}
    built = triton.compile(source, target=GPUTarget("cuda", given["arch"], 32), options=options)
    about, ptx = built.metadata, built.asm["ptx"]
    entry = _ENTRY.search(ptx)
    if entry is None or getattr(about, "global_scratch_size", False):
        raise ValueError("a kernel that wants more than its buffers")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    return {
        "symbol": about.name,
        "code": base64.b64encode(built.asm["cubin"]).decode(),
        "shared": int(about.shared),
        "threads": int(threads[1]) if threads else 32 * int(about.num_warps),
        "parameters": entry[1].count(".param"),
        "text": ptx if given["texts"] else "",
    }


if __name__ == "__main__":
    main()
