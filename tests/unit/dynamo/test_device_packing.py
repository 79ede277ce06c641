"""What is packed on a device is what the host packs, in every layout that kernels of GPUs want."""

from __future__ import annotations

import pytest
import torch

from tests.families import kernels as K
from torch_pruner import families
from torch_pruner.dynamo.run import copies
from torch_pruner.dynamo.run.arrays import to_numpy
from torch_pruner.dynamo.run.device_packing import pack_there, packs_there
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.packing import PackLayout

PLAIN = {"bm": 16, "bn": 16, "bk": 8, "tm": 1, "tn": 1, "stages": 1, "ahead": 0, "split": 1}
KERNELS = {
    "linear": K.linear(5, 37, 45),
    "linear of halves": K.linear(5, 37, 45, dtype="float16"),
    "bfloat16": K.linear(5, 32, 48, dtype="bfloat16"),
    "convolution": K.conv(8, 9, 24, 3, 1, 1),
    "groups": K.conv(8, 9, 16, 3, 1, 1, 2),
    "transposed": K.conv_transpose(6, 7, 5, 4, 1, 1),
    "by phases": K.conv_transpose(6, 7, 5, 4, 2, 1),
}


def layouts(spec: Graph) -> list[PackLayout]:
    """Of products on CUDA cores, on tensor cores, and by warpgroups."""
    found = []
    for name, decisions in (
        ("gpu_product", PLAIN | {"tensor": 0}),
        ("gpu_product", PLAIN | {"tensor": 1}),
        ("gpu_warpgroup", {"bm": 64, "bn": 64, "bk": 64, "stages": 2, "warpgroups": 1, "split": 1}),
    ):
        family = families.named(name)
        found += [*family.parameters(spec, family.typed(decisions)).packs.values()]
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_the_same_as_on_the_host(name: str) -> None:
    spec = KERNELS[name]
    static = (spec.nodes[i] for i in spec.inputs if spec.nodes[i].attr("static"))
    constant = next(n for n in static if len(n.shape) > 1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(constant.shape, generator=generator).to(getattr(torch, constant.dtype))
    assert layouts(spec)
    for layout in layouts(spec):
        assert packs_there(layout)
        expected = layout.pack(to_numpy(weight))
        packed = pack_there(layout, weight)
        assert packed.shape == expected.shape
        assert (to_numpy(packed) == expected).all()


def test_what_is_coded_or_computed_stays_the_hosts() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, 6), "float32")
    doubled = b.finish([b.pointwise("add", x, x)])
    assert not packs_there(PackLayout(doubled, "matmul", 1, 2, (1, 3, 4, 2)))
    b = GraphBuilder()
    plain = b.finish([b.input(0, (4, 6), "float32")])
    assert packs_there(PackLayout(plain, "matmul", 1, 2, (1, 3, 4, 2)))
    assert not packs_there(PackLayout(plain, "matmul", 1, 2, (1, 3, 4, 2), code=2))
    assert not packs_there(PackLayout(plain, "nobody's", 1, 2, (1, 3, 4, 2)))


def test_parameters_of_a_device_do_not_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that says it lies on a device is packed by torch, once for each layout."""
    (layout,) = layouts(KERNELS["linear"])[:1]
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(copies, "to_numpy", None)  # whoever calls it fails

    class There(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    monkeypatch.setattr(
        copies, "pack_there", lambda layout, t: pack_there(layout, t.as_subclass(torch.Tensor))
    )
    weight = torch.randn(37, 45).as_subclass(There)
    held = {id(weight): copies.Held((weight.untyped_storage(), 0, 0, 0), None)}
    packed = list(copies.all_packed([(weight, layout, None, weight)] * 2, held))
    again = list(copies.all_packed([(weight, layout, None, weight)], held))
    assert packed[0] is packed[1] is again[0]
    assert len(waited) == 1
