"""Kernels in Triton's language to machine code, by Triton's compiler in processes of its own.

Every CUDA build of torch brings Triton along. No GPU, no driver and no toolkit are needed: it has
its own assembler. What comes out is an image and a launch like any other, so what was compiled once
is loaded without Triton.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import exc
from torch_pruner.codegen.build.gpu import dependent
from torch_pruner.codegen.build.gpu.cubin import Uses, uses
from torch_pruner.codegen.build.gpu.image import MAX_SHARED, Launch
from torch_pruner.codegen.parts.triton import kernel as language

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.codegen.parts.triton.kernel import TritonKernel

SECONDS = 120.0  # for one kernel
_CHILD = Path(__file__).with_name("triton_child.py")
_NUMBER = re.compile(r"sm_(\d+)[af]?")


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel's machine code. ``nulls``: pointers after its own that it takes and never reads.

    ``ptx`` is what the machine code was made of, where it was asked for.
    """

    symbol: str
    image: bytes
    shared_bytes: int
    threads: int
    nulls: int
    uses: Uses
    ptx: str = ""


def compile_kernels(
    kernels: Mapping[str, TritonKernel], arch: str, *, texts: bool = False
) -> dict[str, Built]:
    """Machine code of kernels by name, on all cores. ``arch``: ``sm_80``, ``sm_90a``, ...

    Raises ``CompileError`` with the compiler's message where one is refused, or Triton is absent.
    """
    found = attempts(kernels, arch, texts=texts)
    for built in found.values():
        if isinstance(built, exc.CompileError):
            raise built
    return {name: built for name, built in found.items() if isinstance(built, Built)}


def attempts(
    kernels: Mapping[str, TritonKernel], arch: str, *, texts: bool = False
) -> dict[str, Built | exc.CompileError]:
    """The same with an error for each kernel that was refused.

    What keeps registers in memory is compiled again with as many as a thread may have: the
    assembler looks for more blocks at once, and spills a few registers for that.
    """
    if not language.available():
        fix = "install triton, or a CUDA build of torch"
        raise exc.CompileError("a Triton kernel", "Triton was not found", fix=fix)
    found = _on_all_cores(kernels, arch, texts, roomy=False)
    spilled = {n: k for n, k in kernels.items() if _frame_bytes(found[n])}
    for name, again in _on_all_cores(spilled, arch, texts, roomy=True).items():
        if isinstance(again, Built) and _frame_bytes(again) < _frame_bytes(found[name]):
            found[name] = again
    return {name: found[name] for name in kernels}


def _frame_bytes(built: Built | exc.CompileError) -> int:
    return built.uses.frame_bytes if isinstance(built, Built) else 0


def _on_all_cores(
    kernels: Mapping[str, TritonKernel], arch: str, texts: bool, *, roomy: bool
) -> dict[str, Built | exc.CompileError]:
    count = max(1, min(len(kernels), len(os.sched_getaffinity(0))))
    names = list(kernels)
    groups = [{n: kernels[n] for n in names[k::count]} for k in range(count)]
    with ThreadPoolExecutor(count) as pool:
        parts = pool.map(lambda g: _process(g, arch, texts, roomy) if g else {}, groups)
        return {name: built for part in parts for name, built in part.items()}


def launches_of(
    kernels: Mapping[str, Sequence[TritonKernel]], built: Mapping[str, Built], arch: str, first: int
) -> tuple[list[bytes], dict[str, Launch]]:
    """Images and launches of kernels by name, as ``cuda_source`` has them: each launch of one is an
    image of its own, counted from ``first``."""
    images: list[bytes] = []
    launches: dict[str, Launch] = {}
    for name, several in kernels.items():
        for n, kernel in enumerate(several):
            key = f"{name}/{n}" if n else name
            one = built[key]
            launches[key] = Launch(
                one.symbol, kernel.blocks, one.threads, kernel.parameters, one.shared_bytes,
                waits=dependent.allowed(arch), image=first + len(images), nulls=one.nulls,
            )  # fmt: skip
            images.append(one.image)
    return images, launches


def separate(kernels: Mapping[str, Sequence[TritonKernel]]) -> dict[str, TritonKernel]:
    """Every launch of every kernel, by the names of ``launches_of``."""
    return {
        f"{name}/{n}" if n else name: kernel
        for name, several in kernels.items()
        for n, kernel in enumerate(several)
    }


def _process(
    kernels: Mapping[str, TritonKernel], arch: str, texts: bool, roomy: bool
) -> dict[str, Built | exc.CompileError]:
    number = _NUMBER.fullmatch(arch)
    assert number is not None, arch
    given = {
        "arch": int(number[1]),
        "early": dependent.allowed(arch),
        "texts": texts,
        "kernels": {
            name: {
                "text": k.text, "types": k.types, "warps": k.warps, "stages": k.stages,
                "registers": _registers(k.warps) if roomy else 0,
                "symbol": re.sub(r"\W", "_", f"triton_{name}"),
            }
            for name, k in kernels.items()
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="torch_pruner_triton_") as folder:
        given["folder"] = folder
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(_CHILD)],
                input=json.dumps(given), capture_output=True, text=True,
                timeout=SECONDS * len(kernels), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            late = exc.CompileError("a Triton kernel", f"not built in {SECONDS:g} s each")
            return dict.fromkeys(kernels, late)
    try:
        answer = json.loads(done.stdout)["kernels"] if done.returncode == 0 else None
    except (ValueError, KeyError, TypeError):
        answer = None
    if answer is None:
        if len(kernels) > 1:  # one of them ended the process: each alone, to find it
            return {
                n: b
                for name in kernels
                for n, b in _process({name: kernels[name]}, arch, texts, roomy).items()
            }
        log = done.stderr[-4000:]
        ended = exc.CompileError(
            "a Triton kernel", f"the compiler ended with {done.returncode}", log=log
        )
        return dict.fromkeys(kernels, ended)
    return {name: _built(kernels[name], answer[name]) for name in kernels}


def _registers(warps: int) -> int:
    """A thread's, where a block of so many warps has a multiprocessor for itself."""
    return min(255, (64 << 10) // (32 * warps) // 8 * 8)


def _built(kernel: TritonKernel, answer: Mapping[str, Any]) -> Built | exc.CompileError:
    image = base64.b64decode(answer["code"])
    try:
        used = uses(image)
    except ValueError:  # of a format to come: then nothing is known to spill
        used = Uses(0, 0)
    built = Built(
        str(answer["symbol"]), image, int(answer["shared"]), int(answer["threads"]),
        int(answer["parameters"]) - len(kernel.types), used, answer["text"],
    )  # fmt: skip
    if not 0 <= built.shared_bytes <= MAX_SHARED or built.nulls < 0:
        return exc.CompileError(
            "a Triton kernel", f"no card has {built.shared_bytes} bytes to share"
        )
    return built
