"""Architectures of ``transformers``, small and with random weights, beside eager.

    python -m tests.suites.architectures --out docs/architectures.md

Encoders, decoders, encoder-decoders, vision and audio. Each runs forward in evaluation mode through
``torch.compile(backend="pruner")``; of some the gradients are compared as well. Nothing is
downloaded: configurations are written here.
"""

from __future__ import annotations

import collections
import copy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import Outcome, cell, command, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

OPTIONS = {"effort": "none"}
GRADIENT = 1e-3  # of a parameter's gradient, relative to its largest element
# Times what eager's is off by, which is allowed as well: a key's bias has no gradient but rounding.
ROUNDING = 4.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """``kind`` for the table; ``config`` names a class of transformers and its arguments."""

    kind: str
    config: str
    arguments: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    gradients: bool = False


def _tokens(length: int = 12, vocabulary: int = 120, batch: int = 2) -> dict[str, Any]:
    import torch

    ids = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pair() -> dict[str, Any]:
    """Of an encoder and a decoder."""
    import torch

    return {**_tokens(), "decoder_input_ids": torch.randint(3, 120, (2, 7))}


def _pixels(size: int = 32) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(2, 3, size, size)}


def _samples() -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(2, 2000)}


def _mel() -> dict[str, Any]:
    import torch

    return {
        "input_features": torch.randn(2, 16, 60),
        "decoder_input_ids": torch.randint(3, 120, (2, 5)),
    }


_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_WIDTH, "intermediate_size": 64, "vocab_size": 120, "max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 64}
_SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 120,
    "max_position_embeddings": 64,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 120,
}  # fmt: skip
_VISION = {**_WIDTH, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
_SPEECH = {
    **_WIDTH, "intermediate_size": 64, "conv_dim": (16, 16), "conv_kernel": (10, 3),
    "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {  # these run on a pretended card, too
    "bert": Architecture("encoder", "BertConfig", _ENCODER, _tokens, gradients=True),
    "roberta": Architecture("encoder", "RobertaConfig", _ENCODER, _tokens),
    "distilbert": Architecture(
        "encoder", "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 120}, _tokens,
    ),
    "electra": Architecture(
        "encoder", "ElectraConfig", {**_ENCODER, "embedding_size": 16}, _tokens
    ),
    "albert": Architecture("encoder", "AlbertConfig", {**_ENCODER, "embedding_size": 16}, _tokens),
    "modernbert": Architecture(
        "encoder", "ModernBertConfig",
        {**_ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
         "sep_token_id": 2}, _tokens,
    ),
    "gpt2": Architecture("decoder", "GPT2Config", _GPT, _tokens, gradients=True),
    "gpt_neox": Architecture("decoder", "GPTNeoXConfig", _ENCODER, _tokens),
    "llama": Architecture("decoder", "LlamaConfig", _DECODER, _tokens, gradients=True),
    "mistral": Architecture("decoder", "MistralConfig", _DECODER, _tokens),
    "qwen2": Architecture("decoder", "Qwen2Config", _DECODER, _tokens),
    "gemma": Architecture("decoder", "GemmaConfig", {**_DECODER, "head_dim": 8}, _tokens),
    "phi": Architecture("decoder", "PhiConfig", _DECODER, _tokens),
    "opt": Architecture(
        "decoder", "OPTConfig",
        {**_WIDTH, "ffn_dim": 64, "vocab_size": 120, "max_position_embeddings": 64,
         "word_embed_proj_dim": 32}, _tokens,
    ),
    "t5": Architecture("encoder-decoder", "T5Config", _T5, _pair, gradients=True),
    "bart": Architecture("encoder-decoder", "BartConfig", _SEQ2SEQ, _pair),
    "vit": Architecture("vision", "ViTConfig", _VISION, _pixels, gradients=True),
    "swin": Architecture(
        "vision", "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
         "window_size": 4}, _pixels,
    ),
    "convnext": Architecture(
        "vision", "ConvNextConfig",
        {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "image_size": 32}, _pixels,
    ),
    "clip_vision": Architecture("vision", "CLIPVisionConfig", _VISION, _pixels),
    "wav2vec2": Architecture("audio", "Wav2Vec2Config", _SPEECH, _samples),
    "whisper": Architecture(
        "audio", "WhisperConfig",
        {**{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"},
         "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 30,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        _mel,
    ),
}  # fmt: skip

_EXPERTS = {**_DECODER, "num_experts_per_tok": 2}
_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 120, "state_size": 8}
_STAGES = {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}
_DETECTOR = {  # reads a few computed positions of maps in place of all
    "backbone_config": {
        **_STAGES, "model_type": "resnet", "embedding_size": 16,
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "d_model": 32, "num_queries": 6, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}  # fmt: skip

MORE: Mapping[str, Architecture] = {
    "mixtral": Architecture(
        "experts", "MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, _tokens, gradients=True
    ),
    "qwen3_moe": Architecture(
        "experts", "Qwen3MoeConfig",
        {**_EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}, _tokens,
    ),
    "olmoe": Architecture("experts", "OlmoeConfig", {**_EXPERTS, "num_experts": 4}, _tokens),
    "gpt_oss": Architecture(
        "experts", "GptOssConfig", {**_EXPERTS, "head_dim": 8, "num_local_experts": 4}, _tokens,
        gradients=True,
    ),
    "granitemoe": Architecture(
        "experts", "GraniteMoeConfig", {**_EXPERTS, "num_local_experts": 4}, _tokens
    ),
    "deepseek_v3": Architecture(
        "experts", "DeepseekV3Config",
        {**_EXPERTS, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
         "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        _tokens,
    ),
    "mamba": Architecture("state space", "MambaConfig", _STATES, _tokens),
    "falcon_mamba": Architecture("state space", "FalconMambaConfig", _STATES, _tokens),
    "mamba2": Architecture(
        "state space", "Mamba2Config",
        {**_STATES, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}, _tokens,
    ),
    "recurrent_gemma": Architecture(
        "state space", "RecurrentGemmaConfig",
        {**_DECODER, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}, _tokens,
    ),
    "deberta_v2": Architecture("encoder", "DebertaV2Config", _ENCODER, _tokens, gradients=True),
    "esm": Architecture(
        "encoder", "EsmConfig", {**_ENCODER, "pad_token_id": 0, "mask_token_id": 1}, _tokens
    ),
    "fnet": Architecture("encoder", "FNetConfig", _ENCODER, lambda: {
        "input_ids": _tokens()["input_ids"],
    }),
    "mpnet": Architecture("encoder", "MPNetConfig", _ENCODER, _tokens),
    "roformer": Architecture("encoder", "RoFormerConfig", _ENCODER, _tokens),
    "xlnet": Architecture(
        "encoder", "XLNetConfig",
        {"vocab_size": 120, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, _tokens,
    ),
    "bloom": Architecture(
        "decoder", "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120}, _tokens,
        gradients=True,
    ),
    "falcon": Architecture("decoder", "FalconConfig", _ENCODER, _tokens),
    "gemma3": Architecture(
        "decoder", "Gemma3TextConfig", {**_DECODER, "head_dim": 8, "sliding_window": 8}, _tokens
    ),
    "qwen3": Architecture("decoder", "Qwen3Config", {**_DECODER, "head_dim": 8}, _tokens),
    "cohere": Architecture("decoder", "CohereConfig", _DECODER, _tokens),
    "stablelm": Architecture("decoder", "StableLmConfig", _DECODER, _tokens),
    "olmo2": Architecture("decoder", "Olmo2Config", _DECODER, _tokens),
    "pegasus": Architecture("encoder-decoder", "PegasusConfig", _SEQ2SEQ, _pair),
    "switch": Architecture(
        "encoder-decoder", "SwitchTransformersConfig",
        {**_T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4},
        _pair,
    ),
    "dinov2": Architecture(
        "vision", "Dinov2Config", {**_WIDTH, "image_size": 32, "patch_size": 8}, _pixels,
        gradients=True,
    ),
    "swin_v2": Architecture(
        "vision", "Swinv2Config",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
         "window_size": 4}, _pixels,
    ),
    "siglip_vision": Architecture("vision", "SiglipVisionConfig", _VISION, _pixels),
    "resnet": Architecture(
        "vision", "ResNetConfig", {**_STAGES, "embedding_size": 16}, _pixels, gradients=True
    ),
    "regnet": Architecture(
        "vision", "RegNetConfig",
        {**_STAGES, "hidden_sizes": [32, 32, 64, 64], "embedding_size": 16, "groups_width": 16},
        _pixels,
    ),
    "segformer": Architecture(
        "vision", "SegformerConfig",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
         "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32}, lambda: _pixels(64),
    ),
    "deformable_detr": Architecture(
        "detection", "DeformableDetrConfig", {**_DETECTOR, "num_feature_levels": 3},
        lambda: _pixels(64), gradients=True,
    ),
    "rt_detr": Architecture(
        "detection", "RTDetrConfig",
        {**_DETECTOR, "encoder_hidden_dim": 32, "encoder_in_channels": [32, 32, 32],
         "decoder_in_channels": [32, 32, 32]},
        lambda: _pixels(64),
    ),
    "hubert": Architecture("audio", "HubertConfig", _SPEECH, _samples),
    "wavlm": Architecture("audio", "WavLMConfig", _SPEECH, _samples),
}  # fmt: skip
EVERY: Mapping[str, Architecture] = {**ARCHITECTURES, **MORE}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """The model in evaluation mode and its inputs; the same on every call."""
    import torch
    import transformers

    of = EVERY[name]
    torch.manual_seed(0)
    config = getattr(transformers, of.config)(**of.arguments)
    config.use_cache = False
    # Some vision towers belong to a larger model and are not known to AutoModel.
    known = type(config) in transformers.MODEL_MAPPING
    if known:
        model = transformers.AutoModel.from_config(config)
    else:
        model = getattr(transformers, of.config.replace("Config", "Model"))(config)
    return model.eval(), of.inputs()


def check(name: str) -> Outcome:
    """One architecture. Raises nothing."""
    import torch

    import torch_pruner

    gradients = EVERY[name].gradients
    try:
        model, inputs = build(name)
        theirs = copy.deepcopy(model)
        run = torch.compile(model, backend="pruner", dynamic=False, options=OPTIONS)
        with torch.no_grad():
            compare(_values(run(**inputs)), _values(theirs(**inputs)))
        report = torch_pruner.last_report()
        share = f"{report.ops_compiled} of {report.ops_total}" if report else "0 of 0"
        left = sorted({f.node.partition(" ")[0] for f in report.ops_fallback}) if report else []
        if gradients:
            _check_gradients(model, theirs, inputs)
    except Exception as err:  # any failure is a line of the table
        return Outcome(name, "failed", f"{type(err).__name__}: {str(err).strip()}"[:240])
    compiled = bool(report and report.ops_compiled)
    said = share + (f"; in eager: {', '.join(left)}" if left else "")
    return Outcome(
        name, "compiled" if compiled else "eager", said, "agree" if gradients else "", gradients
    )


def _check_gradients(mine: Any, theirs: Any, inputs: dict[str, Any]) -> None:
    """Of a random combination of all outputs, by every parameter, both in evaluation mode.

    (Of the sum of their squares most models have none: a normalisation comes last.)
    """
    import torch

    torch._dynamo.reset()
    run = torch.compile(mine, backend="pruner", dynamic=False, options=OPTIONS)
    exact = copy.deepcopy(theirs).double()
    if hasattr(exact, "set_experts_implementation"):  # torch multiplies no doubles in groups
        exact.set_experts_implementation("eager")
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for call, given in ((run, inputs), (theirs, inputs), (exact, wide)):
        random = torch.Generator().manual_seed(0)
        outputs = [t for t in _values(call(**given)) if t.requires_grad]
        loss = sum((t * torch.randn(t.shape, generator=random)).sum() for t in outputs)
        torch.autograd.backward(loss)
    parameters = (m.parameters() for m in (mine, theirs, exact))
    for name, (a, b, c) in zip(
        dict(mine.named_parameters()), zip(*parameters, strict=True), strict=True
    ):
        assert (a.grad is None) == (b.grad is None), f"{name}: one has no gradient"
        if a.grad is not None:
            error, eagers = ((x.grad - c.grad).abs().max().item() for x in (a, b))
            allowed = max(GRADIENT * c.grad.abs().max().item(), ROUNDING * eagers)
            assert error <= allowed, f"{name}: gradient off by {error:.1e}, allowed {allowed:.1e}"


def _values(output: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    plain = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [t for t in pytree.tree_leaves(plain) if isinstance(t, torch.Tensor)]


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    count = collections.Counter(o.status for o in outcomes)
    yield "# Architectures of transformers"
    yield ""
    yield (
        "Written by `python -m tests.suites.architectures`: small random models in evaluation mode,"
        " results compared with eager's, gradients where it says so."
    )
    yield ""
    yield f"{count['compiled']} compiled, {count['eager']} in eager, {count['failed']} failed."
    yield ""
    yield "| architecture | kind | status | gradients | operators compiled |"
    yield "| --- | --- | --- | --- | --- |"
    for o in outcomes:
        kind = EVERY[o.name].kind
        yield f"| {o.name} | {kind} | {o.status} | {o.gradients} | {cell(o.reason)} |"


def main(arguments: list[str] | None = None) -> int:
    return command(
        "tests.suites.architectures", __doc__, lambda: list(EVERY), check, table, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
