"""Image networks that the ``transformers`` package has, from configurations with random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    ConvNextConfig,
    EfficientNetConfig,
    SwinConfig,
)

from benchmarks.models.blocks import RESIDUAL_GAIN
from benchmarks.models.init import randomise


def swin_t() -> nn.Module:
    """Swin-T at 224 pixels: what ``SwinConfig`` describes by default."""
    return AutoModelForImageClassification.from_config(SwinConfig(num_labels=1000))


def convnext_t() -> nn.Module:
    """ConvNeXt-T; layers are scaled by more than at the start of training, so that they matter."""
    config = ConvNextConfig(num_labels=1000, layer_scale_init_value=RESIDUAL_GAIN)
    return AutoModelForImageClassification.from_config(config)


def efficientnet_b7() -> nn.Module:
    """EfficientNet-B7: what ``EfficientNetConfig`` describes by default."""
    network = AutoModelForImageClassification.from_config(EfficientNetConfig(num_labels=1000))
    randomise(network, torch.default_generator)
    for block in network.efficientnet.encoder.blocks:
        if block.projection.apply_dropout:  # a shortcut leads around it
            block.projection.project_bn.weight.data.mul_(RESIDUAL_GAIN**2)
    return network
