"""bfloat16 and float16 models, as checkpoints are loaded by default: prefill and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

import torch_pruner as tp
from torch_pruner.target import CpuProbe, TargetSpec

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(3)]

FLAGS = CpuProbe.read().flags
TARGETS = {
    "f16c": {"kind": "llvm", "mcpu": "haswell"},
    "avx512vl": {"kind": "llvm", "mcpu": "skylake-avx512", "mattr": ["-prefer-256-bit"]},
}
HEADS, HIDDEN, LENGTH = 4, 64, 32
halves = pytest.mark.skipif(not TargetSpec.detect().float16, reason="float16 is left to eager")


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=HIDDEN, num_hidden_layers=1, intermediate_size=160,
            num_attention_heads=HEADS, num_key_value_heads=2,
        )
    )  # fmt: skip


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_layer=1, n_head=HEADS, n_embd=HIDDEN, n_positions=64)
    )


@halves
@pytest.mark.parametrize(("make", "flag"), [(llama, "f16c"), (llama, "avx512vl"), (gpt2, "")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_prefill_and_decoding(backend, make, flag, dtype):
    if flag and flag not in FLAGS:
        pytest.skip(f"this CPU has no {flag}")
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    for weight in model.parameters():
        weight.mul_(4 if weight.ndim == 2 else 1)  # so that scores differ by more than rounding
    options = {"target": TARGETS[flag]} if flag else {}

    def step(model, ids, position, cache):
        return model(ids, position_ids=position, past_key_values=cache, use_cache=True).logits

    def logits(step) -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        kv = getattr(model.config, "num_key_value_heads", HEADS)
        cache.early_initialization(1, kv, HIDDEN // HEADS, dtype, torch.device("cpu"))
        ids = torch.arange(20)[None] * 7 % 96
        found = [step(model, ids, torch.arange(20)[None], cache)]
        for k in range(20, 23):
            found.append(step(model, torch.tensor([[k]]), torch.tensor([[k]]), cache))
        return found

    got = logits(backend.compile(step, dynamic=False, **options))
    for report in tp.last_report().graphs:
        assert not [op for op in report.ops_fallback if op.kind == "dtype"]
    for mine, eagers in zip(got, logits(step), strict=True):
        scale = eagers.float().abs().max()
        bound = 4e-2 if dtype is torch.bfloat16 else 5e-3
        assert (mine.float() - eagers.float()).abs().max() < bound * scale
