"""Networks of the ``transformers`` package that no table of the papers has, in small sizes.

They are there to find out what nobody looked at: each brings layers, shapes or an order of them
that the others lack. Weights are random.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

from benchmarks.models.init import randomise

if TYPE_CHECKING:
    from torch import nn

    Inputs = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Entry:
    """One network: its configuration class by name, what differs from it, and its input.

    ``given`` is the name of the input and its sizes after the batch; tokens where it is
    "input_ids". ``model``: the class by name; the bare model of the configuration by default.
    ``scaled``: whether weights are drawn anew, as for convolution networks, whose values would
    vanish or grow without normalisation that was trained.
    """

    name: str
    title: str
    config: str
    given: tuple[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    kind: str = "vision"
    model: str = ""
    scaled: bool = False

    def build(self) -> nn.Module:
        config = getattr(transformers, self.config)(**self.options)
        if self.model:
            network = getattr(transformers, self.model)(config)
        else:
            network = transformers.AutoModel.from_config(config)
        if self.scaled:
            randomise(network, torch.default_generator)
        return network

    def inputs(self, batch: int, dtype: torch.dtype) -> Inputs:
        name, sizes = self.given
        if name == "input_ids":
            return {name: torch.randint(1000, (batch, *sizes))}
        return {name: torch.randn(batch, *sizes).to(dtype)}


def _pixels(rows: int, columns: int = 0) -> tuple[str, tuple[int, ...]]:
    return "pixel_values", (3, rows, columns or rows)


def _tokens(length: int) -> tuple[str, tuple[int, ...]]:
    return "input_ids", (length,)


_NO_CACHE = {"use_cache": False}
_SMALL = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
_EXPERTS = {**_SMALL, "num_hidden_layers": 2, "vocab_size": 8000}

ENTRIES = (
    Entry("poolformer", "PoolFormer-S12", "PoolFormerConfig", _pixels(224), scaled=True),
    Entry("cvt", "CvT-13", "CvtConfig", _pixels(224)),
    Entry("pvt_v2", "PVT-v2-B0", "PvtV2Config", _pixels(224)),
    Entry("swin_v2", "Swin-v2-T", "Swinv2Config", _pixels(256), {"image_size": 256}),
    Entry("focalnet", "FocalNet-T", "FocalNetConfig", _pixels(224)),
    Entry(
        "dinov2", "DINOv2-S", "Dinov2Config", _pixels(224),
        {"hidden_size": 384, "num_attention_heads": 6},
    ),
    Entry("yolos", "YOLOS-Ti", "YolosConfig", _pixels(256, 320), {
        "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768,
        "image_size": [256, 320],
    }),
    Entry("superresolution", "Swin2SR, 64x64", "Swin2SRConfig", _pixels(64),
          {"embed_dim": 60, "depths": [6, 6, 6, 6], "num_heads": [6, 6, 6, 6]},
          model="Swin2SRForImageSuperResolution"),
    Entry("big_transfer", "BiT-50", "BitConfig", _pixels(224), kind="convolution", scaled=True),
    Entry("mobilenet_v1", "MobileNet-V1", "MobileNetV1Config", _pixels(224),
          kind="convolution", scaled=True),
    Entry("squeezebert", "SqueezeBERT", "SqueezeBertConfig", _tokens(128),
          {"num_hidden_layers": 6}, kind="language"),
    Entry("convbert", "ConvBERT", "ConvBertConfig", _tokens(128), {"num_hidden_layers": 6},
          kind="language"),
    Entry("mobilebert", "MobileBERT", "MobileBertConfig", _tokens(128), kind="language"),
    Entry("bloom", "BLOOM (ALiBi)", "BloomConfig", _tokens(128),
          {"hidden_size": 768, "n_layer": 6, "n_head": 12, **_NO_CACHE}, kind="language"),
    Entry("qwen3", "Qwen3", "Qwen3Config", _tokens(128), {**_SMALL, "head_dim": 64},
          kind="language"),
    Entry("gemma2", "Gemma 2", "Gemma2Config", _tokens(128), {**_SMALL, "head_dim": 64},
          kind="language"),
    Entry("mixtral", "Mixtral, two layers of eight experts", "MixtralConfig", _tokens(128),
          {**_EXPERTS, "intermediate_size": 1536, "num_local_experts": 8,
           "num_experts_per_tok": 2}, kind="language"),
    Entry("qwen3_moe", "Qwen3, two layers of 32 experts", "Qwen3MoeConfig", _tokens(128),
          {**_EXPERTS, "head_dim": 64, "moe_intermediate_size": 384, "num_experts": 32,
           "num_experts_per_tok": 4}, kind="language"),
    Entry("olmoe", "OLMoE, two layers of 64 experts", "OlmoeConfig", _tokens(128),
          {**_EXPERTS, "intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 8},
          kind="language"),
    Entry("gpt_oss", "gpt-oss, two layers of 16 experts", "GptOssConfig", _tokens(128),
          {**_EXPERTS, "head_dim": 64, "intermediate_size": 768, "num_local_experts": 16,
           "num_experts_per_tok": 4}, kind="language"),
    Entry("deepseek_v3", "DeepSeek-V3, two layers, one of 16 experts", "DeepseekV3Config",
          _tokens(128),
          {**_EXPERTS, "intermediate_size": 2048, "moe_intermediate_size": 512,
           "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
           "first_k_dense_replace": 1, "num_key_value_heads": 12, "q_lora_rank": 256,
           "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
          kind="language"),
    Entry("lfm2", "LFM2 (short filters)", "Lfm2Config", _tokens(128), _SMALL, kind="language"),
    Entry("mamba", "Mamba (selective scan)", "MambaConfig", _tokens(64),
          {"hidden_size": 512, "num_hidden_layers": 4, **_NO_CACHE}, kind="language"),
    Entry("rwkv", "RWKV", "RwkvConfig", _tokens(64),
          {"hidden_size": 512, "num_hidden_layers": 4, **_NO_CACHE}, kind="language"),
    Entry("vocoder", "HiFi-GAN", "SpeechT5HifiGanConfig", ("spectrogram", (100, 80)),
          model="SpeechT5HifiGan", kind="sequence", scaled=True),
    Entry("hubert", "HuBERT, four layers", "HubertConfig", ("input_values", (16000,)),
          {"num_hidden_layers": 4}, kind="sequence"),
    Entry("spectrogram", "Audio spectrogram transformer", "ASTConfig",
          ("input_values", (512, 128)), {"max_length": 512, "num_hidden_layers": 6},
          kind="sequence"),
    Entry("series_mixer", "PatchTSMixer", "PatchTSMixerConfig", ("past_values", (512, 7)),
          {"context_length": 512, "num_input_channels": 7, "d_model": 64, "patch_length": 16,
           "patch_stride": 16, "num_layers": 8}, 16, kind="sequence"),
    Entry("series", "PatchTST", "PatchTSTConfig", ("past_values", (512, 7)),
          {"context_length": 512, "num_input_channels": 7, "patch_length": 16, "patch_stride": 8,
           "d_model": 128, "num_attention_heads": 16, "ffn_dim": 256}, 16, kind="sequence"),
    Entry("video_transformer", "VideoMAE-S", "VideoMAEConfig", ("pixel_values", (8, 3, 112, 112)),
          {"image_size": 112, "num_frames": 8, "hidden_size": 384, "num_attention_heads": 6,
           "intermediate_size": 1536}),
    Entry("protein", "ESM-2 (8M)", "EsmConfig", _tokens(256),
          {"vocab_size": 1024, "hidden_size": 320, "num_hidden_layers": 6,
           "num_attention_heads": 20, "intermediate_size": 1280, "pad_token_id": 1,
           "position_embedding_type": "rotary", "mask_token_id": 1023}, kind="language"),
)  # fmt: skip
