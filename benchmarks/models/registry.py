"""Every network of the papers' tables by name, and others, with their inputs.

In: a name, a precision and a batch size. Out: a module in evaluation mode and inputs for it, both
a function of the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.models import (
    dcgan,
    deeplab,
    densenet,
    images,
    inception,
    mobilenet,
    resnet,
    sequences,
    transformer,
    unet,
    vision,
    zoo,
)
from benchmarks.models.init import randomise

if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

BOTH = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Network:
    """One row of the tables.

    ``factory`` takes ``(layers, attention)``; for a network that has no repeated layers to leave
    out, ``depth`` is None. ``default_layers`` is less than ``depth`` where the full network does
    not fit in the memory of a small machine: layers repeat, so the tuning tasks are the same.
    ``kind``: ``language`` models, ``convolution`` networks, and ``vision`` transformers.
    ``in_papers``: whether it is a row of the papers' tables.
    """

    name: str
    title: str
    factory: Callable[[int, str], nn.Module]
    inputs: Callable[[int, torch.dtype], Inputs]
    precisions: tuple[str, ...] = ("float32",)
    batches: tuple[int, ...] = (1,)
    depth: int | None = None
    default_layers: int | None = None
    kind: str = "vision"
    in_papers: bool = True

    def build(self, layers: int | None = None, attention: str = "sdpa") -> nn.Module:
        """The network with weights from torch's global generator."""
        if layers is not None and self.depth is None:
            message = f"{self.name} has no repeated layers: leave out `layers`"
            raise ValueError(message)
        return self.factory(layers or self.default_layers or self.depth or 0, attention)


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


def _whole(builder: Callable[[], nn.Module]) -> Callable[[int, str], nn.Module]:
    """A network without layers to leave out, with the weights that its modules begin with."""

    def factory(_layers: int, _attention: str) -> nn.Module:
        return builder()

    return factory


def _convolutional(builder: Callable[[], nn.Module]) -> Callable[[int, str], nn.Module]:
    def factory(_layers: int, _attention: str) -> nn.Module:
        network = builder()
        randomise(network, torch.default_generator)
        return network

    return factory


def _normal(*shape: int) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, dtype: torch.dtype) -> Inputs:
        return (torch.randn(batch, *shape).to(dtype),)

    return inputs


def _tokens(vocabulary: int, length: int = 128) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, _dtype: torch.dtype) -> Inputs:
        return {"input_ids": torch.randint(vocabulary, (batch, length))}

    return inputs


def _pixels(rows: int, columns: int = 0) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, dtype: torch.dtype) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, rows, columns or rows).to(dtype)}

    return inputs


def _latents(batch: int, dtype: torch.dtype) -> Inputs:
    """What a step of Stable Diffusion takes: latents, the time step, and a text of 77 tokens."""
    latents, text = torch.randn(batch, 4, 32, 32), torch.randn(batch, 77, 768)
    return latents.to(dtype), torch.full((batch,), 500.0), text.to(dtype)


def _step_and_class(batch: int, dtype: torch.dtype) -> Inputs:
    """What a step of a diffusion transformer takes: latents, the time step and a class."""
    latents = torch.randn(batch, 4, 32, 32).to(dtype)
    return latents, torch.full((batch,), 500.0), torch.randint(1000, (batch,))


def _positions(vocabulary: int, length: int) -> Callable[[int, torch.dtype], Inputs]:
    """Tokens without a name."""

    def inputs(batch: int, _dtype: torch.dtype) -> Inputs:
        return (torch.randint(vocabulary, (batch, length)),)

    return inputs


def _graph(batch: int, dtype: torch.dtype) -> Inputs:
    """``batch`` graphs side by side, of 2,000 nodes with 256 features and 16,000 edges."""
    nodes, edges = 2000 * batch, 16000 * batch
    source, target = torch.randint(nodes, (2, edges))
    return torch.randn(nodes, 256).to(dtype), source, target


def _clicks(batch: int, dtype: torch.dtype) -> Inputs:
    """Requests of a recommender: 13 numbers and 26 categories."""
    return torch.randn(batch, 13).to(dtype), torch.randint(20000, (batch, 26))


def _image_network(name: str, title: str, builder: Callable[[], nn.Module], *shape: int) -> Network:
    factory = _convolutional(builder)
    return Network(name, title, factory, _normal(*shape), kind="convolution")


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
        _tokens(vocabulary),
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
        _whole(entry.build),
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
        _image_network("resnet50", "ResNet-50", resnet.resnet50, 3, 224, 224),
        _image_network("wide_resnet50_2", "Wide-ResNet-50-2", resnet.wide_resnet50_2, 3, 224, 224),
        _image_network("inception_v3", "Inception-V3", inception.inception_v3, 3, 299, 299),
        _image_network("densenet121", "DenseNet-121", densenet.densenet121, 3, 224, 224),
        _image_network("mobilenet_v2", "MobileNet-V2", mobilenet.mobilenet_v2, 3, 224, 224),
        _image_network("dcgan", "DCGAN generator", dcgan.Generator, 100),
        _image_network("deeplab_v3", "DeepLab-V3 (ResNet-50)", deeplab.DeepLabV3, 3, 224, 224),
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
        Network("vit", "ViT", transformer.vit, _pixels(256), depth=12),
        Network("detr", "DeTR", transformer.detr, _pixels(256), depth=6),
        *(
            replace(network, in_papers=False)
            for network in (
                _image_network("resnet18", "ResNet-18", resnet.resnet18, 3, 224, 224),
                _image_network(
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
                    _whole(vision.efficientnet_b0),
                    _pixels(224),
                    kind="convolution",
                ),
                Network(
                    "regnet_y_400mf",
                    "RegNet-Y-400MF",
                    _whole(vision.regnet_y_400mf),
                    _pixels(224),
                    kind="convolution",
                ),
                Network(
                    "efficientnet_b7",
                    "EfficientNet-B7",
                    _whole(vision.efficientnet_b7),
                    _pixels(600),
                    kind="convolution",
                ),
                Network("vit_s", "ViT-S", transformer.vit_small, _pixels(224), depth=12),
                Network("swin_t", "Swin-T", _whole(vision.swin_t), _pixels(224)),
                Network("convnext_t", "ConvNeXt-T", _whole(vision.convnext_t), _pixels(224)),
                Network(
                    "unet",
                    "Stable Diffusion's UNet (small)",
                    _whole(unet.UNet),
                    _latents,
                    kind="convolution",
                ),
                Network(
                    "unet_narrow_heads",
                    "U-Net, heads of few columns",
                    _whole(partial(unet.UNet, widths=(64, 128, 256, 256), heads=32)),
                    _latents,
                    kind="convolution",
                ),
                _image_network("detector", "One-stage detector", images.Detector, 3, 320, 416),
                _image_network("decoder", "Decoder of latents", images.LatentDecoder, 4, 32, 32),
                _image_network("convmixer", "ConvMixer", images.ConvMixer, 3, 224, 224),
                _image_network("video", "X3D (small)", images.VideoNet, 3, 13, 160, 160),
                Network(
                    "segformer_b0", "SegFormer-B0", _whole(vision.segformer_b0), _pixels(250, 330)
                ),
                Network("mobilevit_s", "MobileViT-S", _whole(vision.mobilevit_s), _pixels(256)),
                Network(
                    "dit_s", "DiT-S", _convolutional(images.DiffusionTransformer), _step_and_class
                ),
                Network(
                    "t5_encoder",
                    "T5's encoder",
                    transformer.t5_encoder,
                    _tokens(32000, 40),
                    batches=(32,),
                    depth=6,
                    kind="language",
                ),
                Network(
                    "minilm",
                    "MiniLM, sentences of 32 tokens",
                    transformer.minilm,
                    _tokens(30522, 32),
                    batches=(32,),
                    depth=6,
                    kind="language",
                ),
                Network(
                    "whisper_encoder",
                    "Whisper's encoder",
                    transformer.whisper_encoder,
                    _normal(80, 3000),
                    depth=4,
                    kind="sequence",
                ),
                Network(
                    "wav2vec2",
                    "wav2vec 2.0",
                    transformer.wav2vec2,
                    _normal(32000),
                    depth=12,
                    default_layers=6,
                    kind="sequence",
                ),
                Network(
                    "separation",
                    "Conv-TasNet",
                    _convolutional(sequences.Separation),
                    _normal(1, 16000),
                    kind="sequence",
                ),
                Network(
                    "state_space",
                    "State-space model",
                    _whole(sequences.StateSpaceModel),
                    _positions(32000, 256),
                    kind="sequence",
                ),
                Network("graph", "Graph attention", _whole(sequences.GraphNet), _graph),
                Network(
                    "recommender",
                    "DLRM",
                    _whole(sequences.Recommender),
                    _clicks,
                    batches=(1, 128),
                    kind="recommender",
                ),
                Network(
                    "tagger",
                    "Recurrent tagger",
                    _whole(sequences.Tagger),
                    _positions(20000, 64),
                    batches=(1, 8),
                    kind="sequence",
                ),
                *(_of_zoo(entry) for entry in zoo.ENTRIES),
            )
        ),
    )
}
