"""The two building blocks that all convolutional networks here share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

RESIDUAL_GAIN = 0.3
"""Scale of a residual branch's last normalisation, so that activations do not explode."""


class ConvNorm(nn.Module):
    """Convolution without bias, batch normalisation, and an activation (None: linear).

    ``padding=None`` keeps the extent at stride 1. ``gain`` scales the random normalisation weight
    (see ``init.randomise``).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] | None = None,
        dilation: int = 1,
        groups: int = 1,
        act: type[nn.Module] | None = nn.ReLU,
        eps: float = 1e-5,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        rows, cols = (kernel, kernel) if isinstance(kernel, int) else kernel
        if padding is None:
            padding = (dilation * (rows // 2), dilation * (cols // 2))
        self.conv = nn.Conv2d(
            inputs,
            outputs,
            (rows, cols),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=False,
        )
        self.norm = nn.BatchNorm2d(outputs, eps=eps)
        self.act = nn.Identity() if act is None else act(inplace=True)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Classifier(nn.Module):
    """Global average pooling, dropout and one linear layer."""

    def __init__(self, inputs: int, classes: int = 1000, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.pool(x).flatten(1)))
