"""Every network of the papers' tables by name, and others, with their inputs.

In: a name, a precision and a batch size. Out: a module in evaluation mode and inputs for it, both
a function of the seed alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.models import (
    dcgan,
    deeplab,
    densenet,
    images,
    inception,
    mobilenet,
    more,
    operators,
    resnet,
    sequences,
    transformer,
    unet,
    vision,
    zoo,
)
from benchmarks.models.network import (
    BOTH,
    Inputs,
    Network,
    clicks,
    convolutional,
    graph,
    image_network,
    latents,
    normal,
    pixels,
    positions,
    step_and_class,
    tokens,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def load(
    name: str,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    layers: int | None = None,
    seed: int = 0,
    attention: str = "sdpa",
) -> tuple[nn.Module, Inputs]:
    """Builds a network in evaluation mode and inputs for it; the same seed gives the same bits."""
    network = find(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = network.build(layers, attention).eval()
        inputs = network.inputs(batch, dtype)
    return cast(module, dtype), inputs


def find(name: str) -> Network:
    if name not in NETWORKS:
        message = f"no network {name!r}; known: {', '.join(NETWORKS)}"
        raise KeyError(message)
    return NETWORKS[name]


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts weights and buffers, but not rotary frequencies.

    Those are meant to stay in float32, as they do when ``transformers`` loads a checkpoint.
    """
    kept = {
        (part, name): buffer
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    }
    module.to(dtype)
    for (part, name), buffer in kept.items():
        setattr(part, name, buffer)
    return module


def call(module: Callable[..., object], inputs: Inputs) -> object:
    """Calls a module with positional or keyword inputs."""
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def _language_model(
    name: str,
    title: str,
    factory: Callable[[int, str], nn.Module],
    vocabulary: int,
    depth: int,
    *,
    precisions: tuple[str, ...] = BOTH,
    default_layers: int | None = None,
) -> Network:
    return Network(
        name,
        title,
        factory,
        tokens(vocabulary),
        precisions,
        (1, 4),
        depth,
        default_layers,
        kind="language",
    )


def _of_zoo(entry: zoo.Entry) -> Network:
    return Network(
        entry.name,
        entry.title,
        whole(entry.build),
        entry.inputs,
        batches=(entry.batch,),
        kind=entry.kind,
    )


_BERT_TINY = partial(transformer.bert, hidden=512, heads=8, intermediate=2048)
_BERT_BASE = partial(transformer.bert, hidden=768, heads=12, intermediate=3072)
_HALF = ("bfloat16",)

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        image_network("resnet50", "ResNet-50", resnet.resnet50, 3, 224, 224),
        image_network("wide_resnet50_2", "Wide-ResNet-50-2", resnet.wide_resnet50_2, 3, 224, 224),
        image_network("inception_v3", "Inception-V3", inception.inception_v3, 3, 299, 299),
        image_network("densenet121", "DenseNet-121", densenet.densenet121, 3, 224, 224),
        image_network("mobilenet_v2", "MobileNet-V2", mobilenet.mobilenet_v2, 3, 224, 224),
        image_network("dcgan", "DCGAN generator", dcgan.Generator, 100),
        image_network("deeplab_v3", "DeepLab-V3 (ResNet-50)", deeplab.DeepLabV3, 3, 224, 224),
        _language_model("bert_tiny", "BERT-tiny", _BERT_TINY, 30522, 6),
        _language_model("bert_base", "BERT-base", _BERT_BASE, 30522, 12),
        _language_model("gpt2", "GPT-2", transformer.gpt2, 50257, 12),
        _language_model("llama", "Llama (12 x 768)", transformer.llama, 32000, 12),
        _language_model(
            "opt_1_3b",
            "OPT-1.3b",
            transformer.opt_1_3b,
            50272,
            24,
            precisions=_HALF,
            default_layers=2,
        ),
        _language_model(
            "mistral_7b",
            "Mistral-7b",
            transformer.mistral_7b,
            32000,
            32,
            precisions=_HALF,
            default_layers=2,
        ),
        Network("vit", "ViT", transformer.vit, pixels(256), depth=12),
        Network("detr", "DeTR", transformer.detr, pixels(256), depth=6),
        *(
            replace(network, in_papers=False)
            for network in (
                image_network("resnet18", "ResNet-18", resnet.resnet18, 3, 224, 224),
                image_network(
                    "mobilenet_v3_large",
                    "MobileNet-V3-Large",
                    mobilenet.mobilenet_v3_large,
                    3,
                    224,
                    224,
                ),
                Network(
                    "efficientnet_b0",
                    "EfficientNet-B0",
                    whole(vision.efficientnet_b0),
                    pixels(224),
                    kind="convolution",
                ),
                Network(
                    "regnet_y_400mf",
                    "RegNet-Y-400MF",
                    whole(vision.regnet_y_400mf),
                    pixels(224),
                    kind="convolution",
                ),
                Network(
                    "efficientnet_b7",
                    "EfficientNet-B7",
                    whole(vision.efficientnet_b7),
                    pixels(600),
                    kind="convolution",
                ),
                Network("vit_s", "ViT-S", transformer.vit_small, pixels(224), depth=12),
                Network("swin_t", "Swin-T", whole(vision.swin_t), pixels(224)),
                Network("convnext_t", "ConvNeXt-T", whole(vision.convnext_t), pixels(224)),
                Network(
                    "unet",
                    "Stable Diffusion's UNet (small)",
                    whole(unet.UNet),
                    latents,
                    kind="convolution",
                ),
                Network(
                    "unet_narrow_heads",
                    "U-Net, heads of few columns",
                    whole(partial(unet.UNet, widths=(64, 128, 256, 256), heads=32)),
                    latents,
                    kind="convolution",
                ),
                image_network("detector", "One-stage detector", images.Detector, 3, 320, 416),
                image_network("decoder", "Decoder of latents", images.LatentDecoder, 4, 32, 32),
                image_network("convmixer", "ConvMixer", images.ConvMixer, 3, 224, 224),
                image_network("video", "X3D (small)", images.VideoNet, 3, 13, 160, 160),
                Network(
                    "segformer_b0", "SegFormer-B0", whole(vision.segformer_b0), pixels(250, 330)
                ),
                Network("mobilevit_s", "MobileViT-S", whole(vision.mobilevit_s), pixels(256)),
                Network(
                    "dit_s", "DiT-S", convolutional(images.DiffusionTransformer), step_and_class
                ),
                Network(
                    "t5_encoder",
                    "T5's encoder",
                    transformer.t5_encoder,
                    tokens(32000, 40),
                    batches=(32,),
                    depth=6,
                    kind="language",
                ),
                Network(
                    "minilm",
                    "MiniLM, sentences of 32 tokens",
                    transformer.minilm,
                    tokens(30522, 32),
                    batches=(32,),
                    depth=6,
                    kind="language",
                ),
                Network(
                    "whisper_encoder",
                    "Whisper's encoder",
                    transformer.whisper_encoder,
                    normal(80, 3000),
                    depth=4,
                    kind="sequence",
                ),
                Network(
                    "wav2vec2",
                    "wav2vec 2.0",
                    transformer.wav2vec2,
                    normal(32000),
                    depth=12,
                    default_layers=6,
                    kind="sequence",
                ),
                Network(
                    "separation",
                    "Conv-TasNet",
                    convolutional(sequences.Separation),
                    normal(1, 16000),
                    kind="sequence",
                ),
                Network(
                    "state_space",
                    "State-space model",
                    whole(sequences.StateSpaceModel),
                    positions(32000, 256),
                    kind="sequence",
                ),
                Network("graph", "Graph attention", whole(sequences.GraphNet), graph),
                Network(
                    "recommender",
                    "DLRM",
                    whole(sequences.Recommender),
                    clicks,
                    batches=(1, 128),
                    kind="recommender",
                ),
                Network(
                    "tagger",
                    "Recurrent tagger",
                    whole(sequences.Tagger),
                    positions(20000, 64),
                    batches=(1, 8),
                    kind="sequence",
                ),
                *(_of_zoo(entry) for entry in zoo.ENTRIES),
                *more.NETWORKS,
                *operators.NETWORKS,
            )
        ),
    )
}
