"""Ten operators and two subgraphs, each as a network of one layer.

They are those of "Ansor: Generating High-Performance Tensor Programs for Deep Learning" (OSDI 2020)
with four shapes each, from layers of ResNet, MobileNet, DCGAN, BERT and matrix capsules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.models.network import Network, convolutional, normal

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.models.network import Inputs

BATCHES = (1, 16)


class Product(nn.Module):
    """A product of two batches of matrices, both of which are inputs."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Capsules(nn.Module):
    """A convolution whose pixels are matrices of 4x4: (N, 4, C x 4, H, W) to as many rows of them.

    Sums over places, capsules and the inner extent of products of two matrices (G. Hinton, S.
    Sabour and N. Frosst, "Matrix capsules with EM routing", 2018).
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.votes = nn.Conv2d(4 * inputs, 4 * outputs, kernel, stride, padding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.votes(x.flatten(0, 1))
        return found.unflatten(0, x.shape[:2])


class Norm(nn.Module):
    """The 2-norm of each matrix of a batch, over all of its elements."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(x)


class Scores(nn.Module):
    """Transposition, batched product and softmax: (N, rows, heads, columns) twice."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return (query.transpose(1, 2) @ key.permute(0, 2, 3, 1)).softmax(-1)


def _normalised(inputs: int, outputs: int, *given: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, *given, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _two(first: tuple[int, ...], second: tuple[int, ...]) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, dtype: torch.dtype) -> Inputs:
        return (
            torch.randn(batch, *first).to(dtype),
            torch.randn(batch, *second).to(dtype),
        )

    return inputs


def _convolutions(
    name: str, title: str, make: Callable[..., nn.Module], shapes: Any, **options: int
) -> list[Network]:
    """``shapes``: the input's channels and extents, the result's channels, kernel, stride and
    padding."""
    found = []
    for number, ((channels, *extents), outputs, kernel, stride, padding) in enumerate(shapes):

        def build(
            given: tuple[int, ...] = (channels, outputs, kernel, stride, padding),
        ) -> nn.Module:
            return make(*given, **options)

        inputs = normal(channels, *extents)
        found.append(_one(name, title, number, convolutional(build), inputs))
    return found


def _one(
    name: str,
    title: str,
    number: int,
    factory: Callable[[int, str], nn.Module],
    inputs: Callable[[int, torch.dtype], Inputs],
) -> Network:
    return Network(
        f"{name}_{number + 1}",
        f"{title} {number + 1}",
        factory,
        inputs,
        batches=BATCHES,
        kind="operator",
        in_papers=False,
    )


_PLAIN = {"bias": False}
_LAYERS = (
    ((3, 224, 224), 64, 7, 2, 3),
    ((64, 56, 56), 64, 1, 1, 0),
    ((256, 14, 14), 256, 3, 1, 1),
    ((512, 7, 7), 512, 3, 1, 1),
)
_DEEP = tuple(((c, 16, *extents), *layer) for (c, *extents), *layer in _LAYERS)
_SEQUENCES = (
    ((64, 256), 128, 3, 2, 1),
    ((128, 128), 256, 1, 2, 0),
    ((256, 64), 256, 5, 1, 2),
    ((512, 32), 512, 3, 1, 1),
)
_GROUPED = (((64, 56, 56), 128, 3, 2, 1), *_LAYERS[1:])
_CHANNELWISE = (
    ((32, 112, 112), 32, 3, 1, 1),
    ((64, 112, 112), 64, 3, 2, 1),
    ((512, 14, 14), 512, 3, 2, 1),
    ((1024, 7, 7), 1024, 3, 1, 1),
)
_TRANSPOSED = (
    ((512, 4, 4), 256, 4, 2, 1),
    ((256, 8, 8), 128, 4, 2, 1),
    ((128, 16, 16), 64, 4, 2, 1),
    ((64, 32, 32), 3, 4, 2, 1),
)
_NORMALISED = (
    ((3, 224, 224), 64, 7, 2, 3),
    ((64, 56, 56), 128, 3, 2, 1),
    ((128, 28, 28), 256, 1, 2, 0),
    ((512, 7, 7), 512, 3, 1, 1),
)
_CAPSULES = ((16, 32, 32, 2), (8, 32, 32, 1), (16, 8, 16, 2), (8, 16, 16, 1))
_PRODUCTS = ((128, 128, 128), (512, 32, 512), (512, 512, 512), (1024, 1024, 1024))  # rows, columns
_MATRICES = ((256, 256), (512, 512), (1024, 1024), (4096, 1024))
_HEADS = ((128, 12, 64), (128, 16, 64), (64, 12, 128), (128, 12, 128))


def _channelwise(inputs: int, outputs: int, *given: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, *given, groups=inputs, bias=False)


def _plain(module: Callable[[], nn.Module]) -> Callable[[int, str], nn.Module]:
    return lambda _layers, _attention: module()


NETWORKS: tuple[Network, ...] = (
    *_convolutions("c1d", "conv1d", nn.Conv1d, _SEQUENCES, **_PLAIN),
    *_convolutions("c2d", "conv2d", nn.Conv2d, _LAYERS, **_PLAIN),
    *_convolutions("c3d", "conv3d", nn.Conv3d, _DEEP, **_PLAIN),
    *(
        _one("gmm", "matmul", k, _plain(Product), _two((rows, inner), (inner, columns)))
        for k, (rows, columns, inner) in enumerate(_PRODUCTS)
    ),
    *_convolutions("grp", "grouped conv2d", nn.Conv2d, _GROUPED, groups=4, **_PLAIN),
    *_convolutions("dil", "dilated conv2d", nn.Conv2d, _LAYERS, dilation=2, **_PLAIN),
    *_convolutions("dep", "depthwise conv2d", _channelwise, _CHANNELWISE),
    *_convolutions("t2d", "transposed conv2d", nn.ConvTranspose2d, _TRANSPOSED, **_PLAIN),
    *(
        _one(
            "cap",
            "capsule conv2d",
            k,
            convolutional(lambda given=(i, o, 3, s, 1): Capsules(*given)),
            normal(4, 4 * i, extent, extent),
        )
        for k, (extent, i, o, s) in enumerate(_CAPSULES)
    ),
    *(_one("nrm", "matrix 2-norm", k, _plain(Norm), normal(*s)) for k, s in enumerate(_MATRICES)),
    *_convolutions("cbr", "conv2d + batch norm + relu", _normalised, _NORMALISED),
    *(
        _one("tbs", "transpose + batch matmul + softmax", k, _plain(Scores), _two(s, s))
        for k, s in enumerate(_HEADS)
    ),
)
