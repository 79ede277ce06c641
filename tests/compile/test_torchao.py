"""Models that torchao quantised are compiled as they are: one graph, nothing left to eager."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torch_pruner as tp

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.filterwarnings("ignore"),  # torchao's own, while it is imported
]
quantization = pytest.importorskip("torchao.quantization")


def _four_bits(group: int) -> Any:
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=group)


def _by_groups(kind: str) -> Any:
    from torchao.quantization.granularity import PerGroup

    config = getattr(quantization, kind)
    if kind == "IntxWeightOnlyConfig":
        return config(weight_dtype=torch.int4, granularity=PerGroup(64))
    return config(weight_dtype=torch.int4, weight_granularity=PerGroup(64))


CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(),
    "int4 of 32": lambda: _four_bits(32),
    "int4 of 128": lambda: _four_bits(128),
    "int8 by int8": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    "int8 by groups": lambda: _by_groups("Int8DynamicActivationIntxWeightConfig"),
    "groups": lambda: _by_groups("IntxWeightOnlyConfig"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_quantised_layers(backend, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 192), nn.GELU(), nn.Linear(192, 80)).to(dtype).eval()
    if name == "int4 of 128":
        net = nn.Sequential(nn.Linear(256, 144)).to(dtype).eval()
    quantization.quantize_(net, copy.deepcopy(CONFIGS[name]()))
    compiled, x = backend.compile(net, fullgraph=True), torch.randn(3, 256, dtype=dtype)
    got, expected = compiled(x), net(x)
    # A number that is half-way between two of eight bits is rounded by its last digit.
    limit = {torch.float32: 1e-2 if "int8 by" in name else 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert (got - expected).abs().max() <= limit * expected.abs().max()
    report = tp.last_report()
    assert report is not None
    assert not report.ops_fallback
    assert report.weight_bytes < 2 * (256 * 192 + 192 * 80) + 8192, "no floats"
