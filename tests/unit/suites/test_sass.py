"""Counting instructions in a disassembly of a GPU's machine code."""

from __future__ import annotations

import pytest

from tests.suites.sass import counted

TEXT = """
\t.section\t.text.kernel_kernel,"ax",@progbits
.text.kernel_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R5, SR_TID.X ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR8][R2.64] ;
        /*0030*/                   LDG.E R9, desc[UR8][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR8][R2.64] ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   LDSM.16.M88.4 R12, [R3] ;
        /*0070*/                   LDS.U16 R6, [R3] ;
        /*0080*/                   HMMA.16816.F32 R16, R12, R4, R16 ;
        /*0090*/                   HMMA.16816.F32 R20, R12, R6, R20 ;
        /*00a0*/                   HMMA.16816.F32 R24, R12, R6, R24 ;
        /*00b0*/              @P1 STG.E.U16 desc[UR8][R2.64], R4 ;
        /*00c0*/                   STG.E.64 desc[UR8][R2.64+0x8], R4 ;
        /*1000c0*/                 EXIT ;
"""


def test_what_a_disassembly_is_made_of() -> None:
    found = counted(TEXT)
    assert (found.products, found.shared_loads, found.copies, found.barriers) == (3, 2, 1, 1)
    assert found.products_a_load == pytest.approx(1.5)
    assert found.bytes_a_load == pytest.approx(10)
    assert found.bytes_a_store == pytest.approx(5)


def test_code_without_memory_has_no_means() -> None:
    found = counted("        /*0000*/   EXIT ;\n")
    assert (found.products_a_load, found.bytes_a_load, found.bytes_a_store) == (None,) * 3
