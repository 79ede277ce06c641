"""The models: shapes of well-known ones with random weights, the same on every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.initialization import no_init_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only network; ``build`` makes it with so many layers."""

    title: str
    layers: int
    build: Callable[[int], Any]


def _llama(layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def _tinyllama(layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32}
    config = LlamaConfig(
        num_hidden_layers=layers, num_key_value_heads=4, rms_norm_eps=1e-5, **sizes
    )
    return LlamaForCausalLM(config)


def _qwen(layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return Qwen2ForCausalLM(config)


def _gpt2(layers: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=layers))


SHAPES: Mapping[str, Shape] = {
    "llama": Shape("Llama 12x768", 12, _llama),
    "tinyllama": Shape("TinyLlama 1.1B", 22, _tinyllama),
    "qwen2.5-0.5b": Shape("Qwen2.5 0.5B", 24, _qwen),
    "gpt2": Shape("GPT-2", 12, _gpt2),
}


def build(
    name: str = "llama", layers: int | None = None, *, rounded: bool = False
) -> PreTrainedModel:
    """Random float32 weights; ``rounded``: all of them bfloat16 numbers, as of most checkpoints."""
    shape = SHAPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = shape.build(layers or shape.layers).eval()
    return round_weights(model) if rounded else model


def round_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Every weight in place to the nearest bfloat16 number, still in float32."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def restored(name: str, layers: int | None, checkpoint: Path, *, rounded: bool) -> PreTrainedModel:
    """What ``build`` made, from a file of its weights; sooner than drawing them again."""
    shape = SHAPES[name]
    with no_init_weights():
        model = shape.build(layers or shape.layers).eval()
    model.load_state_dict(torch.load(checkpoint, mmap=True, weights_only=True))
    return round_weights(model) if rounded else model


def read_by_a_step(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The parameters that decoding a token reads as a whole, by name.

    Of a table of embeddings it takes one row, unless the table is the output layer's as well.
    """
    output = model.get_output_embeddings().weight
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings.discard(id(output))
    return {name: p for name, p in model.named_parameters() if id(p) not in embeddings}


def weight_bytes(model: PreTrainedModel, bits: float | None = None, per_row: int = 0) -> int:
    """Bytes of what a step reads; with ``bits``, a weight of a matrix takes so many.

    A row of a matrix has ``per_row`` bytes beside, which are a scale of its own.
    """
    total = 0.0
    for p in read_by_a_step(model).values():
        if bits is None or p.dim() < 2:
            total += p.nbytes
        else:
            total += p.numel() * bits / 8 + p.shape[0] * per_row
    return round(total)
