"""Shapes of the attention benchmark, and its table."""

from __future__ import annotations

import pytest

from benchmarks.attention import Shape, render


def test_shapes() -> None:
    plain, grouped = Shape.parse("12x128x64"), Shape.parse("32(8)x16x128c")
    assert (plain.heads, plain.kv, plain.causal) == (12, 12, False)
    assert plain.flops == 4 * 12 * 128 * 128 * 64
    assert grouped.name == "32(8) x 16 x 128, causal"
    assert grouped.flops == 4 * 32 * (16 * 17 / 2) * 128
    assert [tuple(x.shape) for x in grouped.operands()] == [(1, h, 16, 128) for h in (32, 8, 8)]


@pytest.mark.parametrize("text", ["12x128", "12x128x64x", "ax1x1", "12()x1x1", ""])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match="heads x tokens x width"):
        Shape.parse(text)


def test_a_peer_that_cannot_is_an_empty_cell() -> None:
    seconds = {"ours": 1e-3, "torch": 2e-3, "peak": 1.0}
    row = {"shape": "a", "seconds": seconds, "ratio": 2.0, "share": 0.5}
    assert render([row]).splitlines()[-1] == "| a | 1 ms | 2 ms |  |  |  | 2.00 | 50 % |"
