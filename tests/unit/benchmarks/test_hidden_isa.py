from __future__ import annotations

from benchmarks.isa.hide import without_hidden
from torch_pruner.cpus import V3, V4
from torch_pruner.target import CpuProbe, TargetSpec

HIDDEN = ("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_tile", "amx_int8")
XEON = f"""\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: {" ".join((*sorted(V3), *sorted(V4 - V3), *HIDDEN))} sse2
bugs\t\t: spectre_v1
"""


def test_only_flags_are_taken_away() -> None:
    lines = without_hidden(XEON).splitlines()
    assert lines[5].split(": ")[1].split() == [*sorted(V3), "sse2"]
    assert [*lines[:5], *lines[6:]] == [*XEON.splitlines()[:5], *XEON.splitlines()[6:]]


def test_what_is_left_counts_as_a_processor_with_avx2(tmp_path) -> None:
    vectors = []
    for name, text in (("whole", XEON), ("hidden", without_hidden(XEON))):
        root = tmp_path / name
        (root / "proc").mkdir(parents=True)
        (root / "proc" / "cpuinfo").write_text(text)
        vectors.append(TargetSpec.detect(1, CpuProbe.read(root)).vector_bytes)
    assert vectors == [64, 32]
