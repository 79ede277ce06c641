"""CPU targets: names that LLVM knows, constants, JSON, and machines that say little."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from torch_pruner import cpus
from torch_pruner.exc import OptionError
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import CpuProbe, TargetSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

V3 = sorted(cpus.V3)
V4 = sorted(cpus.V4)
ICELAKE = sorted(cpus.ICELAKE)
ZEN4 = sorted(cpus.ZEN4)
SAPPHIRE = sorted(cpus.ZEN4 | {"avx512_fp16", "avx_vnni", "amx_tile"})


def probe(vendor: str, family: int, flags: Iterable[str], machine: str = "x86_64") -> CpuProbe:
    return CpuProbe(
        vendor=vendor,
        name="Some CPU",
        family=family,
        model=17,
        flags=frozenset(flags),
        physical_cores=4,
        logical_cores=8,
        usable_cores=8,
        max_frequency_hz=0.0,
        l1_bytes=32 << 10,
        l2_bytes=1 << 20,
        l3_bytes=32 << 20,
        machine=machine,
    )


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "mcpu"),
    [
        ("AuthenticAMD", 0x1A, [*ZEN4, "avx_vnni"], "znver5"),
        ("AuthenticAMD", 0x1A, ZEN4, "znver4"),
        ("AuthenticAMD", 0x19, ZEN4, "znver4"),
        ("AuthenticAMD", 0x19, [*V3, "vaes", "vpclmulqdq"], "znver3"),
        ("AuthenticAMD", 0x17, [*V3, "clwb"], "znver2"),
        ("AuthenticAMD", 0x17, V3, "znver1"),
        ("AuthenticAMD", 0x15, V3, "x86-64-v3"),
        ("GenuineIntel", 6, SAPPHIRE, "sapphirerapids"),
        ("GenuineIntel", 6, ICELAKE, "icelake-server"),
        ("GenuineIntel", 6, [*V4, "avx512_vnni"], "cascadelake"),
        ("GenuineIntel", 6, V4, "skylake-avx512"),
        ("GenuineIntel", 6, V3, "haswell"),
        ("GenuineIntel", 6, sorted(cpus.V2), "x86-64-v2"),
        ("HygonGenuine", 24, V3, "x86-64-v3"),
        ("Other", 0, V4, "x86-64-v4"),
        ("", 0, [], "x86-64"),
    ],
)
def test_names(vendor: str, family: int, flags: list[str], mcpu: str) -> None:
    spec = TargetSpec.detect(2, probe(vendor, family, flags))
    assert spec.mcpu == mcpu
    assert spec.tvm_target()["num-cores"] == 2


def test_flags_that_a_hypervisor_hides_are_not_used() -> None:
    hidden = [f for f in ZEN4 if not f.startswith("avx512")]
    spec = TargetSpec.detect(2, probe("AuthenticAMD", 0x19, hidden))
    assert (spec.mcpu, spec.vector_bytes, spec.bf16_dot) == ("znver3", 32, False)


def test_tiles_need_the_cpu_and_its_flags() -> None:
    flags = [*SAPPHIRE, "amx_bf16"]
    assert TargetSpec.detect(2, probe("GenuineIntel", 6, flags)).bf16_tiles
    hidden = [f for f in flags if f != "amx_tile"]
    assert not TargetSpec.detect(2, probe("GenuineIntel", 6, hidden)).bf16_tiles
    other = TargetSpec.detect(2, probe("AuthenticAMD", 0x1A, [*ZEN4, "avx_vnni", "amx_bf16"]))
    assert (other.bf16_dot, other.bf16_tiles) == (True, False)


def test_flags_of_tiles_are_in_the_fingerprint() -> None:
    """A kernel that uses them is not found on a machine without them."""
    with_tiles = DeviceFingerprint.detect(probe("GenuineIntel", 6, [*SAPPHIRE, "amx_bf16"]))
    without = DeviceFingerprint.detect(probe("GenuineIntel", 6, SAPPHIRE))
    assert with_tiles.digest() != without.digest()


def test_intel_avx512_uses_whole_vectors() -> None:
    for flags in (V4, ICELAKE, SAPPHIRE):
        spec = TargetSpec.detect(2, probe("GenuineIntel", 6, flags))
        assert spec.tvm_target()["mattr"] == ["-prefer-256-bit"]
    assert "mattr" not in TargetSpec.detect(2, probe("GenuineIntel", 6, V3)).tvm_target()
    assert "mattr" not in TargetSpec.detect(2, probe("AuthenticAMD", 0x19, ZEN4)).tvm_target()


def test_peak_of_zen4_and_zen5() -> None:
    zen4 = TargetSpec.detect(2, probe("AuthenticAMD", 0x19, ZEN4))
    zen5 = TargetSpec.detect(2, probe("AuthenticAMD", 0x1A, [*ZEN4, "avx_vnni"]))
    assert zen4.peak_flops("float32", 1) == 2 * 16 * zen4.frequency_hz
    assert zen5.peak_flops("float32", 1) == 2 * 2 * 16 * zen5.frequency_hz
    assert zen4.peak_flops("float64", 1) * 2 == zen4.peak_flops("float32", 1)
    assert zen4.peak_flops("bfloat16", 1) == 2 * zen4.peak_flops("float32", 1)
    assert zen4.peak_flops("float16", 1) == zen4.peak_flops("float32", 1)
    assert (
        zen4.peak_flops("float32", 99)
        == zen4.peak_flops("float32")
        == zen4.peak_flops("float32", 4)
    )


def test_cores_are_physical_and_usable() -> None:
    cpu = probe("AuthenticAMD", 0x19, ZEN4)
    assert TargetSpec.detect(probe=cpu).cores == 4
    assert TargetSpec.detect(probe=replace(cpu, usable_cores=1)).cores == 1
    assert TargetSpec.detect(probe=cpu).tvm_target()["num-cores"] == 4


def test_aarch64_is_generic() -> None:
    spec = TargetSpec.detect(2, probe("0x41", 0, ["asimd"], machine="aarch64"))
    assert spec.mcpu == "generic"
    assert spec.tvm_target()["mtriple"].startswith(("aarch64", "arm64"))
    assert (spec.vector_bytes, spec.vector_registers) == (16, 32)


def test_another_architecture_takes_nothing_from_this_cpu() -> None:
    triple = "aarch64-linux-gnu" if CpuProbe.read().machine != "aarch64" else "x86_64-linux-gnu"
    spec = TargetSpec.from_dict({"kind": "llvm", "mtriple": triple}, 2)
    assert spec.mcpu in ("generic", "x86-64")
    assert (spec.vector_bytes, spec.tvm_target()["mtriple"]) == (16, triple)
    assert "mattr" not in spec.tvm_target()


def test_an_unreadable_machine_still_has_a_target(tmp_path: Path) -> None:
    cpu = CpuProbe.read(tmp_path)
    spec = TargetSpec.detect(2, cpu)
    assert spec.peak_flops("float32") > 0
    assert min(spec.l1_bytes, spec.l2_bytes, spec.l3_bytes, spec.dram_bytes_per_s) > 0
    assert DeviceFingerprint.detect(cpu).digest()


def test_reads_cpuinfo_and_sysfs(tmp_path: Path) -> None:
    rows = "processor\t: {0}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n"
    rows += (
        "model name\t: AMD EPYC 9654\nphysical id\t: 0\ncore id\t\t: {1}\nflags\t\t: fpu avx2 fma\n"
    )
    (tmp_path / "proc").mkdir()
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.write_text("\n".join(rows.format(i, i // 2) for i in range(4)))
    cpu0 = tmp_path / "sys/devices/system/cpu/cpu0"
    for i, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M"), (3, "Unified", "1M")]
    ):
        folder = cpu0 / f"cache/index{i}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    (cpu0 / "cpufreq").mkdir()
    (cpu0 / "cpufreq/cpuinfo_max_freq").write_text("3700000\n")
    cpu = CpuProbe.read(tmp_path)
    assert (cpu.vendor, cpu.family, cpu.model) == ("AuthenticAMD", 25, 17)
    assert cpu.name == "AMD EPYC 9654"
    assert cpu.flags == {"fpu", "avx2", "fma"}
    assert (cpu.physical_cores, cpu.logical_cores) == (2, 4)
    assert (cpu.l1_bytes, cpu.l2_bytes, cpu.l3_bytes) == (48 << 10, 2 << 20, 1 << 20)
    assert cpu.max_frequency_hz == 3.7e9


def test_json_round_trip() -> None:
    spec = TargetSpec.detect(2, probe("GenuineIntel", 6, SAPPHIRE))
    again = TargetSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)
    device = DeviceFingerprint.detect(probe("GenuineIntel", 6, SAPPHIRE))
    assert DeviceFingerprint.from_json(json.loads(json.dumps(device.to_json()))) == device


@pytest.mark.parametrize("data", [{}, {"kind": "llvm"}, {"attrs": 3}, {"attrs": {}, "colour": 1}])
def test_json_of_something_else(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a target"):
        TargetSpec.from_json(data)
    with pytest.raises(ValueError, match="not a device"):
        DeviceFingerprint.from_json(data)


def test_key_is_the_code_and_not_the_estimates() -> None:
    spec = TargetSpec.detect(2, probe("AuthenticAMD", 0x19, ZEN4))
    assert spec.key() == '{"kind":"llvm","mcpu":"znver4","num-cores":2}'
    assert replace(spec, frequency_hz=1.0).key() == spec.key()


def test_from_dict_keeps_what_the_user_wrote() -> None:
    given = {"kind": "llvm", "mcpu": "icelake-server", "num-cores": 3, "mattr": ["+avx512f"]}
    spec = TargetSpec.from_dict(given)
    assert spec.tvm_target() == given
    assert (spec.vector_bytes, spec.fma_per_cycle) == (64, 2)
    assert TargetSpec.resolve(json.dumps(given)) == spec


def test_from_dict_without_mcpu_is_this_machine() -> None:
    assert TargetSpec.from_dict({"kind": "llvm"}, 2) == TargetSpec.detect(2)
    assert TargetSpec.resolve("auto", 2) == TargetSpec.detect(2)


def test_from_dict_with_an_mcpu_of_no_table() -> None:
    spec = TargetSpec.from_dict({"kind": "llvm", "mcpu": "alderlake"}, 2)
    assert spec.mcpu == "alderlake"
    assert spec.vector_bytes == 16


@pytest.mark.parametrize(
    "given",
    [{}, {"kind": "vulkan"}, {"kind": "llvm", "keys": [1.5]}, {"kind": "llvm", "x": {}}],
    ids=str,
)
def test_from_dict_refuses(given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="target"):
        TargetSpec.from_dict(given)


def test_fingerprints_differ_with_what_changes_timings() -> None:
    cpu = probe("AuthenticAMD", 0x19, ZEN4)
    base = DeviceFingerprint.detect(cpu).digest()
    changed = (
        replace(cpu, name="Other CPU"),
        replace(cpu, model=18),
        replace(cpu, physical_cores=8),
        replace(cpu, l3_bytes=1 << 20),
        replace(cpu, flags=cpu.flags - {"avx512_bf16"}),
    )
    assert len({base, *(DeviceFingerprint.detect(c).digest() for c in changed)}) == 6
    assert DeviceFingerprint.detect(replace(cpu, flags=cpu.flags | {"vmx"})).digest() == base
    assert DeviceFingerprint.detect(replace(cpu, usable_cores=1)).digest() == base


def test_digest_is_the_same_in_another_process() -> None:
    code = "from torch_pruner.fingerprint import *; print(DeviceFingerprint.detect().digest())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == DeviceFingerprint.detect().digest()


@pytest.mark.tvm
def test_llvm_knows_every_name() -> None:
    from tvm.target import Target, codegen

    known = set(codegen.llvm_get_cpu_archlist(Target({"kind": "llvm"})))
    assert {m for m in cpus.BY_NAME if m != "generic"} <= known
    assert Target(TargetSpec.detect(2).tvm_target()).kind.name == "llvm"


def test_half_precision_needs_its_instructions() -> None:
    """An option may take away what the processor has."""
    zen5 = probe("AuthenticAMD", 0x1A, [*ZEN4, "avx_vnni"])
    here = TargetSpec.detect(2, zen5)
    assert (here.bf16_dot, here.bf16_dot_fmas, here.float16) == (True, 1.0, True)
    assert TargetSpec.detect(2, probe("AuthenticAMD", 0x19, ZEN4)).bf16_dot_fmas == 1
    xeon = TargetSpec.from_dict({"kind": "llvm", "mcpu": "sapphirerapids"})
    assert (xeon.bf16_dot, xeon.bf16_dot_fmas) == (True, 4)
    assert not TargetSpec.detect(2, probe("Other", 0, sorted(cpus.V2))).float16
    haswell = {"kind": "llvm", "mcpu": "haswell"}
    found = TargetSpec.from_dict(haswell)
    assert (found.bf16_dot, found.float16) == (False, True)
    without = TargetSpec.from_dict(
        {"kind": "llvm", "mcpu": "znver4", "mattr": ["-avx512bf16", "-f16c"]}
    )
    assert (without.bf16_dot, without.float16) == (False, False)
    assert TargetSpec.detect(2, replace(zen5, machine="aarch64", flags=frozenset())).float16
