"""Constants of CPUs, by their name at LLVM: what analytical models need and nobody can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The flags of /proc/cpuinfo that a name promises LLVM, as far as generated code can use them.
V2 = frozenset({"sse4_1", "sse4_2", "ssse3", "popcnt", "cx16"})
V3 = V2 | {"avx", "avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ICELAKE = V4 | {"avx512_vnni", "avx512vbmi", "avx512_vbmi2", "avx512ifma", "avx512_bitalg"}
ICELAKE |= {"avx512_vpopcntdq", "gfni", "vaes", "vpclmulqdq"}
ZEN4 = ICELAKE | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Constants of one microarchitecture. ``fma_per_cycle`` counts FMAs of full vector width."""

    mcpu: str
    vector_bytes: int
    fma_per_cycle: int
    frequency_hz: float  # under sustained vector work, where the kernel does not tell
    needs: frozenset[str] = frozenset()
    tiles: bool = False  # has AMX with bfloat16, where the flags do not hide it
    core_bytes_per_s: float = 20e9  # that one core reads from memory while another one does
    dot_fmas: float = 4.0  # multiply-adds that take as long as one ``vdpbf16ps``
    reads_ahead: bool = False  # see ``TargetSpec``

    @property
    def vector_registers(self) -> int:
        return 32 if self.vector_bytes == 64 or self.mcpu == "generic" else 16

    def attrs(self) -> dict[str, Any]:
        """What TVM's target says about this microarchitecture."""
        if self not in INTEL or self.vector_bytes < 64:
            return {"mcpu": self.mcpu}
        # LLVM prefers half the vector width there, for the clock's sake; kernels lose by that.
        return {"mcpu": self.mcpu, "mattr": ["-prefer-256-bit"]}


# First match wins within a family; a name whose flags a hypervisor hides is passed over.
AMD = (
    (
        0x1A,
        CpuModel("znver5", 64, 2, 3.9e9, ZEN4 | {"avx_vnni"}, core_bytes_per_s=33e9, dot_fmas=1.0),
    ),
    # Two 256-bit pipes make one 512-bit FMA.
    (0x19, CpuModel("znver4", 64, 1, 3.6e9, ZEN4, dot_fmas=1.0, reads_ahead=True)),
    (0x19, CpuModel("znver3", 32, 2, 3.4e9, V3 | {"vaes", "vpclmulqdq"}, reads_ahead=True)),
    (0x17, CpuModel("znver2", 32, 2, 3.2e9, V3 | {"clwb"})),
    (0x17, CpuModel("znver1", 32, 1, 3.0e9, V3)),
)
INTEL = (
    CpuModel("sapphirerapids", 64, 2, 3.0e9, ZEN4 | {"avx512_fp16", "avx_vnni"}, tiles=True),
    CpuModel("icelake-server", 64, 2, 2.8e9, ICELAKE),
    CpuModel("cascadelake", 64, 2, 2.8e9, V4 | {"avx512_vnni"}),
    CpuModel("skylake-avx512", 64, 2, 2.6e9, V4),
    CpuModel("haswell", 32, 2, 2.8e9, V3),
)
GENERIC_X86 = (
    CpuModel("x86-64-v4", 64, 1, 2.5e9, V4),
    CpuModel("x86-64-v3", 32, 2, 2.5e9, V3),
    CpuModel("x86-64-v2", 16, 1, 2.5e9, V2),
    CpuModel("x86-64", 16, 1, 2.5e9),
)
GENERIC = CpuModel("generic", 16, 2, 2.5e9)
BY_NAME = {m.mcpu: m for m in (*(m for _, m in AMD), *INTEL, *GENERIC_X86, GENERIC)}
