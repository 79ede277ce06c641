"""A float32 model whose keys and values are kept in bfloat16 or int8: a step reads fewer bytes.

    python examples/narrow_cache.py

`NarrowCache` is transformers' `StaticCache` with layers that store in another dtype and hand out
what the model computes in. Compiled, nothing is converted in memory: attention of a step reads the
narrow cache and widens in registers. bfloat16 rounds keys and values to 8 significant bits; int8
has 255 levels up to the largest of each key and value, whose scale is kept beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer


class NarrowLayer(StaticLayer):
    """A layer of a static cache that keeps its keys and values in bfloat16 or int8."""

    def __init__(self, max_cache_len: int, narrow: torch.dtype = torch.bfloat16) -> None:
        super().__init__(max_cache_len)
        self.narrow = narrow

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states.to(self.narrow), value_states.to(self.narrow))
        if self.narrow is torch.int8:
            self.key_scales, self.value_scales = (
                torch.zeros(*held.shape[:3], 1) for held in (self.keys, self.values)
            )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = key_states.dtype
        if self.narrow is not torch.int8:
            narrow = (states.to(self.narrow) for states in (key_states, value_states))
            keys, values = super().update(*narrow, *args, **kwargs)
            return keys.to(dtype), values.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = torch.arange(key_states.shape[-2]) + self.cumulative_length
        levels = []
        for states, scales in ((key_states, self.key_scales), (value_states, self.value_scales)):
            scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            scales.index_copy_(2, at, scale)
            levels.append((states / scale).round().to(torch.int8))
        keys, values = super().update(*levels, *args, **kwargs)
        return keys.to(dtype) * self.key_scales, values.to(dtype) * self.value_scales


class NarrowCache(StaticCache):
    """A static cache in bfloat16 or int8. Layers with a sliding window stay as they are."""

    def __init__(
        self, config: Any, max_cache_len: int, narrow: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.layers = [
            NarrowLayer(max_cache_len, narrow) if type(layer) is StaticLayer else layer
            for layer in self.layers
        ]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = LlamaForCausalLM(config).eval()
    step = torch.compile(model, backend="pruner", options={"effort": "none"})
    wide = None
    for narrow in (None, torch.bfloat16, torch.int8):
        cache = NarrowCache(config, 512, narrow) if narrow else StaticCache(config, 512)
        prompt = torch.arange(100)[None]
        model(prompt, past_key_values=cache, use_cache=True)
        token, at = torch.tensor([[7]]), torch.tensor([[100]])
        logits = step(token, position_ids=at, past_key_values=cache, use_cache=True).logits
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        print(f"{narrow or torch.float32}: {held / 1e6:.2f} MB of keys and values", end="")
        wide = logits if wide is None else wide
        difference = (wide - logits).abs().max() / wide.abs().max()
        print(f"; largest difference of scores: {difference:.1e}")


if __name__ == "__main__":
    main()
