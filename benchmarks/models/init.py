"""Random weights that keep activations in range.

In: a freshly built module. Out: the same module with every convolution, linear layer and batch
normalisation drawn from the given generator, so that no layer's output vanishes, explodes or is
constant, and so that running statistics differ from the identity that a compiler could exploit.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.models.blocks import ConvNorm

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Draws all weights that are not embeddings or layer normalisations.

    ``ConvNorm.gain`` is honoured; other libraries' blocks are left to scale their own branches.
    """
    for part in module.modules():
        if isinstance(part, _CONVOLUTIONS):
            part.weight.normal_(0.0, math.sqrt(2.0 / _fan_in(part)), generator=generator)
            if part.bias is not None:
                part.bias.normal_(0.0, 0.1, generator=generator)
        elif isinstance(part, nn.Linear):
            part.weight.normal_(0.0, math.sqrt(1.0 / part.in_features), generator=generator)
            if part.bias is not None:
                part.bias.normal_(0.0, 0.1, generator=generator)
    _randomise_norms(module, generator)
    for part in module.modules():
        if isinstance(part, ConvNorm):
            part.norm.weight.mul_(part.gain)


@torch.no_grad()
def _randomise_norms(module: nn.Module, generator: torch.Generator) -> None:
    """Draws weight, bias and statistics of everything that normalises by running statistics.

    Found by the buffer ``running_var``: frozen variants in other libraries are not ``BatchNorm2d``.
    """
    for part in module.modules():
        own = dict(part.named_buffers(recurse=False)) | dict(part.named_parameters(recurse=False))
        if "running_var" not in own:
            continue
        own["running_mean"].normal_(0.0, 0.1, generator=generator)
        own["running_var"].uniform_(0.5, 1.5, generator=generator)
        own["weight"].uniform_(0.8, 1.2, generator=generator)
        own["bias"].normal_(0.0, 0.1, generator=generator)


def _fan_in(conv: nn.Module) -> float:
    """Inputs that are summed into one output element."""
    assert isinstance(conv, _CONVOLUTIONS)
    taps = conv.in_channels // conv.groups * math.prod(conv.kernel_size)
    return taps / math.prod(conv.stride) if conv.transposed else taps
