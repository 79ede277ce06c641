"""Networks that the ``transformers`` package has, built from configurations with random weights.

Nothing is downloaded: sizes are those of the papers' tables, weights come from the
global generator, which ``registry.load`` seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModel,
    BertConfig,
    DetrConfig,
    DetrForObjectDetection,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    ResNetConfig,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from benchmarks.models.blocks import RESIDUAL_GAIN
from benchmarks.models.init import randomise

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


def _from_config(config: PreTrainedConfig, attention: str) -> nn.Module:
    return AutoModel.from_config(config, attn_implementation=attention)


def bert(layers: int, attention: str, *, hidden: int, heads: int, intermediate: int) -> nn.Module:
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        use_cache=False,
    )
    return _from_config(config, attention)


def gpt2(layers: int, attention: str) -> nn.Module:
    config = GPT2Config(n_layer=layers, n_head=12, n_embd=768, n_inner=3072, use_cache=False)
    return _from_config(config, attention)


def llama(layers: int, attention: str) -> nn.Module:
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=3072,
        use_cache=False,
    )
    return _from_config(config, attention)


def opt_1_3b(layers: int, attention: str) -> nn.Module:
    config = OPTConfig(
        hidden_size=2048,
        word_embed_proj_dim=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        ffn_dim=8192,
        use_cache=False,
    )
    return _from_config(config, attention)


def mistral_7b(layers: int, attention: str) -> nn.Module:
    config = MistralConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        use_cache=False,
    )
    return _from_config(config, attention)


def vit(layers: int, attention: str) -> nn.Module:
    return _from_config(ViTConfig(image_size=256, num_hidden_layers=layers), attention)


def vit_small(layers: int, attention: str) -> nn.Module:
    """ViT-S/16 at 224 pixels (Touvron et al., 2021)."""
    config = ViTConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=1536
    )
    return _from_config(config, attention)


def detr(layers: int, attention: str) -> nn.Module:
    """ResNet-50, ``layers`` encoder and ``layers`` decoder layers, 100 queries, two heads."""
    config = DetrConfig(
        backbone_config=ResNetConfig(out_features=["stage4"]),
        encoder_layers=layers,
        decoder_layers=layers,
        num_queries=100,
        num_labels=91,
    )
    # A ResNet has no attention of its own and refuses any implementation but "eager".
    each: dict[str, Any] = {"": attention, "backbone_config": "eager"}
    network = DetrForObjectDetection._from_config(config, attn_implementation=each)
    randomise(network, torch.default_generator)
    for stage in network.model.backbone.model.encoder.stages:
        for block in stage.layers:
            block.layer[-1].normalization.weight.mul_(RESIDUAL_GAIN)
    return network


def t5_encoder(layers: int, _attention: str) -> nn.Module:
    """The encoder of T5-small: relative positions, normalisation by the root mean square."""
    return T5EncoderModel(T5Config(num_layers=layers, use_cache=False))


def wav2vec2(layers: int, attention: str) -> nn.Module:
    """wav2vec 2.0's base: filters over a wave of 16 kHz, then a transformer."""
    return _from_config(Wav2Vec2Config(num_hidden_layers=layers), attention)


def minilm(layers: int, attention: str) -> nn.Module:
    """The shape of MiniLM-L6, which embeds sentences (Wang et al., 2020)."""
    return bert(layers, attention, hidden=384, heads=12, intermediate=1536)


def whisper_encoder(layers: int, attention: str) -> nn.Module:
    """The encoder of Whisper's smallest model: filters over 3,000 frames, then 1,500 positions."""
    config = WhisperConfig(
        d_model=384, encoder_layers=layers, encoder_attention_heads=6, encoder_ffn_dim=1536
    )
    return WhisperEncoder._from_config(config, attn_implementation=attention)
