"""What tells a core that its thread waits for another, in LLVM's language."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_pruner.target import TargetSpec

# The instruction and its declaration. Others run on as they are.
_X86 = ("call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()")
_AARCH64 = ("call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)")
_ANY = ("", "")


def pause_of(target: TargetSpec) -> tuple[str, str]:
    """The call, and what declares it."""
    return _X86 if target.is_x86 else _AARCH64 if _is_aarch64(target) else _ANY


def _is_aarch64(target: TargetSpec) -> bool:
    return str(dict(target.attrs).get("mtriple", "")).startswith(("aarch64", "arm64"))
