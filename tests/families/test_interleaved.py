"""Images that lie channels first, copied channels last in vectors along their lines."""

from __future__ import annotations

import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.codegen.build.region import parts_of
from torch_pruner.families.contraction.form import ContractionDecisions
from torch_pruner.graph.ir import GraphBuilder

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(2)]
DECISIONS = {
    "vl": 16, "tm": 4, "nv": 1, "mc": 1, "order": 0, "ku": 1, "pack": 1, "par": 1, "ahead": 0,
    "kb": 1,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride", "pad"),
    [
        (3, 32, 3, 2, 1),
        (3, 37, 7, 2, 3),
        (2, 16, 3, 1, 1),
        (4, 19, 3, 1, 2),
        (8, 21, 5, 1, 2),
        (3, 40, 2, 3, 0),
        (3, 33, 2, 4, 0),
        (3, 36, 3, 2, 1),
    ],
)
def test_a_first_layer(
    channels: int, size: int, kernel: int, stride: int, pad: int, dtype: str
) -> None:
    assert set(DECISIONS) == set(ContractionDecisions._fields)
    b = GraphBuilder()
    x = b.input(0, (2, channels, size, size), dtype)
    w = b.input(1, (20, channels, kernel, kernel), dtype, static=True)
    extent = (size + 2 * pad - kernel) // stride + 1
    y = b.append(
        "conv", (x, w), (2, 20, extent, extent), dtype,
        stride=(stride,) * 2, lo=(pad,) * 2, hi=(pad,) * 2, dilation=(1, 1), groups=1,
    )  # fmt: skip
    spec = b.finish([b.permute(b.pointwise("relu", y), (0, 2, 3, 1))])
    copied = pad > 0 or dtype != "float32"
    assert copied == ("dealt" in schedule(spec, "contraction", DECISIONS).func.script())
    outputs, expected, _ = K.run(spec, "contraction", DECISIONS)
    assert K.error(outputs, expected) < (1e-5 if dtype == "float32" else 1e-2)


def test_a_single_line_is_copied_before_the_tiles_that_threads_share() -> None:
    """Every thread may do the first part, which has to be all of the copy (random program
    sizes-31: half of the tiles read what was not there yet)."""
    b = GraphBuilder()
    x = b.input(0, (1, 2, 1488), "float32")
    w = b.input(1, (4, 1, 2), "float32", static=True)
    y = b.append(
        "conv", (x, w), (1, 4, 745), "float32", stride=(2,), lo=(1,), hi=(1,), dilation=(1,),
        groups=2,
    )  # fmt: skip
    spec = b.finish([b.permute(y, (0, 2, 1))])
    decisions = {**DECISIONS, "vl": 8, "tm": 15, "mc": 2, "order": 1}
    kernel = schedule(spec, "contraction", decisions)
    assert [part.tasks for _, part in parts_of(kernel)] == [None, 4]
    outputs, expected, _ = K.run(spec, "contraction", decisions)
    assert K.error(outputs, expected) < 1e-5
