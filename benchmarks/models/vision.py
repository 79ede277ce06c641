"""Image networks that the ``transformers`` package has, from configurations with random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    ConvNextConfig,
    EfficientNetConfig,
    MobileViTConfig,
    RegNetConfig,
    SegformerConfig,
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


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 at 224 pixels."""
    return _efficientnet(
        EfficientNetConfig(
            num_labels=1000,
            width_coefficient=1.0,
            depth_coefficient=1.0,
            image_size=224,
            hidden_dim=1280,
            dropout_rate=0.2,
        )
    )


def efficientnet_b7() -> nn.Module:
    """EfficientNet-B7: what ``EfficientNetConfig`` describes by default."""
    return _efficientnet(EfficientNetConfig(num_labels=1000))


def regnet_y_400mf() -> nn.Module:
    """RegNet-Y-400MF (Radosavovic et al., 2020): convolutions in groups of eight channels."""
    config = RegNetConfig(
        num_labels=1000,
        embedding_size=32,
        hidden_sizes=[48, 104, 208, 440],
        depths=[1, 3, 6, 6],
        groups_width=8,
        layer_type="y",
    )
    network = AutoModelForImageClassification.from_config(config)
    randomise(network, torch.default_generator)
    for stage in network.regnet.encoder.stages:
        for block in stage.layers:
            block.layer[-1].normalization.weight.data.mul_(RESIDUAL_GAIN)
    return network


def _efficientnet(config: EfficientNetConfig) -> nn.Module:
    network = AutoModelForImageClassification.from_config(config)
    randomise(network, torch.default_generator)
    for block in network.efficientnet.encoder.blocks:
        if block.projection.apply_dropout:  # a shortcut leads around it
            block.projection.project_bn.weight.data.mul_(RESIDUAL_GAIN**2)
    return network


def segformer_b0() -> nn.Module:
    """SegFormer-B0 (Xie et al., 2021): a hierarchical transformer and a head of linear layers."""
    network = AutoModelForSemanticSegmentation.from_config(SegformerConfig(num_labels=150))
    randomise(network, torch.default_generator)
    return network


def mobilevit_s() -> nn.Module:
    """MobileViT-S (Mehta and Rastegari, 2022): what ``MobileViTConfig`` describes by default."""
    network = AutoModelForImageClassification.from_config(MobileViTConfig(num_labels=1000))
    randomise(network, torch.default_generator)
    return network
