"""CUDA C to machine code by NVRTC, which every CUDA build of torch brings along.

No toolkit, no GPU and no driver are needed: the library is found among the installed packages or
where the loader finds it, and called in process.
"""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
from functools import cache
from pathlib import Path

from torch_pruner import exc

_PATTERNS = ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")
_HEADERS = ("nvidia/cu*/include", "nvidia/cuda_runtime/include")
_NAMES = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")
MAX_LOG = 1 << 20  # bytes of a compiler's log that are kept


def _roots() -> list[Path]:
    return [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]


@cache
def _library() -> ctypes.CDLL | None:
    found = [p for root in _roots() for pattern in _PATTERNS for p in sorted(root.glob(pattern))]
    found = [p for p in found if ".alt." not in p.name]
    for path in found:  # NVRTC asks the loader for this one by name
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins))
    for name in (*map(str, found), *_NAMES):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def _headers() -> tuple[Path, ...]:
    """Folders with CUDA's headers."""
    found = [p for root in _roots() for pattern in _HEADERS for p in sorted(root.glob(pattern))]
    found += [Path("/usr/local/cuda/include")]
    return tuple(dict.fromkeys(p for p in found if (p / "cuda_fp16.h").is_file()))


def available() -> bool:
    """Whether NVRTC and CUDA's headers are there."""
    return _library() is not None and bool(_headers())


def compile_cubin(source: str, arch: str, *, fast_math: bool = False) -> tuple[bytes, str]:
    """Machine code for one architecture (``sm_80``, ``sm_90a``, ...), and the compiler's log.

    Raises ``CompileError`` with the log where NVRTC is absent or refuses the source.
    """
    nvrtc = _library()
    if nvrtc is None:
        fix = "install nvidia-cuda-nvrtc, or a CUDA build of torch"
        raise exc.CompileError("a CUDA kernel", "NVRTC was not found", fix=fix)
    program = ctypes.c_void_p()
    text = source.encode()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"k.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
        options += ["--diag-suppress=1046"]  # a float printed with more digits than it has
        options += [f"--include-path={folder}" for folder in _headers()]
        options += ["--use_fast_math"] if fast_math else []
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _text(nvrtc, "ProgramLog", program).decode(errors="replace")[:MAX_LOG]
        if status:
            raise exc.CompileError("a CUDA kernel", f"NVRTC refused it for {arch}", log=log)
        return _text(nvrtc, "CUBIN", program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data))
    return data.raw.rstrip(b"\0") if what == "ProgramLog" else data.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        reason = nvrtc.nvrtcGetErrorString(status).decode(errors="replace")
        raise exc.CompileError("a CUDA kernel", f"NVRTC failed: {reason}")
