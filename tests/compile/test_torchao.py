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
    from pathlib import Path

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as ``from_pretrained`` finds it, in bfloat16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4 of 32", "int8 by int8"])
@torch.no_grad()
def test_transformers_config(backend, checkpoint: Path, name: str, dtype: torch.dtype) -> None:
    """As transformers documents it; a prompt and single tokens with a static cache."""
    from transformers import LlamaForCausalLM, StaticCache, TorchAoConfig

    model = LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, quantization_config=TorchAoConfig(CONFIGS[name]())
    ).eval()

    def step(ids: torch.Tensor, at: torch.Tensor, cache: Any) -> torch.Tensor:
        scores: torch.Tensor = model(
            ids, position_ids=at, past_key_values=cache, use_cache=True
        ).logits
        return scores

    compiled = backend.compile(step, dynamic=False, fullgraph=True)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    for cache in caches:
        cache.early_initialization(1, 2, 32, dtype, torch.device("cpu"))
    tokens = torch.arange(12)[None] * 7 % 200
    for first, last in ((0, 9), (9, 10), (10, 11)):
        given = tokens[:, first:last], torch.arange(first, last)[None]
        got, expected = (f(*given, c) for f, c in zip((compiled, step), caches, strict=True))
        limit = {torch.float32: 2e-2 if "int8 by" in name else 1e-4, torch.bfloat16: 4e-2}[dtype]
        assert (got - expected).abs().max() <= limit * expected.abs().max()
        report = tp.last_report()
        assert report is not None
        assert not report.ops_fallback
        assert [graph.regions for graph in report.graphs] == [1]
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    embedded = 4 * 200 * 128  # neither transformers nor torchao rounds the output layer
    assert report.weight_bytes < 2 * (linear + embedded) + 65536, "no floats"


@torch.no_grad()
def test_transformers_generate(backend, checkpoint: Path) -> None:
    from transformers import LlamaForCausalLM, TorchAoConfig

    config = TorchAoConfig(CONFIGS["int8"]())
    model = LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=config
    ).eval()
    asked = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    prompt = torch.arange(3, 8)[None]
    expected = model.generate(prompt, **asked)
    model.forward = backend.compile(model.forward, dynamic=False)
    assert torch.equal(model.generate(prompt, **asked), expected)
    report = tp.last_report()
    assert report is not None
    assert not report.ops_fallback
