"""Windows, Fourier transforms and random numbers."""

from __future__ import annotations

import math

import numpy as np
import torch

from torch_pruner.onnx.operators.registry import OperatorCall, Tensor, in_range, op
from torch_pruner.onnx.operators.types import torch_dtype


@op("HannWindow", "HammingWindow", "BlackmanWindow")
def _window(n: OperatorCall, _: Tensor) -> Tensor:
    size = int(n.scalar(0))
    count = size if n.attr("periodic", 1) else size - 1
    t = 2 * math.pi * torch.arange(size, dtype=torch.float64) / count
    if n.op == "HannWindow":
        made = 0.5 - 0.5 * torch.cos(t)
    elif n.op == "HammingWindow":
        made = 25.0 / 46.0 - 21.0 / 46.0 * torch.cos(t)
    else:
        made = 0.42 - 0.5 * torch.cos(t) + 0.08 * torch.cos(2 * t)
    return made.to(torch_dtype(n.attr("output_datatype", 1)))


@op("DFT")
def _dft(n: OperatorCall, x: Tensor, *_: Tensor | None) -> Tensor:
    axis = int(n.scalar(2, -2)) if n.opset >= 20 else n.attr("axis", 1)
    axis = in_range(axis, x.dim())
    length = n.scalar(1)
    length = None if length is None else int(length)
    inverse, half = n.attr("inverse", 0), n.attr("onesided", 0)
    pairs = x.shape[-1] == 2
    value = torch.view_as_complex(x.contiguous()) if pairs else x[..., 0]
    if inverse and half:
        return torch.fft.irfft(value, n=length, dim=axis).unsqueeze(-1)
    if inverse:
        made = torch.fft.ifft(value, n=length, dim=axis)
    elif half:
        made = torch.fft.rfft(value, n=length, dim=axis)
    else:
        made = torch.fft.fft(value, n=length, dim=axis)
    return torch.view_as_real(made.resolve_conj())


@op("STFT")
def _stft(
    n: OperatorCall,
    x: Tensor,
    step: Tensor,
    window: Tensor | None = None,
    size: Tensor | None = None,
) -> Tensor:
    hop = int(n.scalar(1))
    length = int(n.scalar(3)) if size is not None else window.shape[0]  # type: ignore[union-attr]
    value = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
    frames = (value.shape[1] - length) // hop + 1
    where = torch.arange(frames)[:, None] * hop + torch.arange(length)[None, :]
    parts = value[:, where]
    parts = parts if window is None else parts * window
    half = n.attr("onesided", 1)
    made = torch.fft.rfft(parts) if half and not parts.is_complex() else torch.fft.fft(parts)
    return torch.view_as_real(made.resolve_conj())


@op("MelWeightMatrix")
def _mel(n: OperatorCall, *_: Tensor) -> Tensor:
    bins, length, rate, low, high = (n.scalar(k) for k in range(5))
    count = int(bins) + 2
    spectrum = int(length) // 2 + 1
    n.afford(8 * spectrum * count)
    first, last = (2595 * np.log10(1 + f / 700) for f in (low, high))
    step = (last - first) / count
    hertz = 700 * (10 ** ((np.arange(count) * step + first) / 2595) - 1)
    place = np.floor((int(length) + 1) * hertz / rate).astype(np.int64)
    made = np.zeros((spectrum, int(bins)))
    for i in range(int(bins)):
        lower, centre, upper = place[i : i + 3]
        if centre == lower:
            made[centre, i] = 1
        else:
            rising = np.arange(lower, centre + 1)
            made[rising, i] = (rising - lower) / (centre - lower)
        if upper > centre:
            falling = np.arange(centre, upper)
            made[falling, i] = (upper - falling) / (upper - centre)
    return torch.from_numpy(made).to(torch_dtype(n.attr("output_datatype", 1)))


def _generator(n: OperatorCall) -> torch.Generator | None:
    seed = n.attr("seed")
    return None if seed is None else torch.Generator().manual_seed(int(seed))


@op("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike")
def _random(n: OperatorCall, like: Tensor | None = None) -> Tensor:
    number = n.attr("dtype")
    kind = torch_dtype(number) if number else like.dtype if like is not None else torch.float32
    shape = n.attr("shape") if like is None else list(like.shape)
    if n.op.startswith("RandomNormal"):
        made = torch.randn(shape, generator=_generator(n))
        return (made * n.attr("scale", 1.0) + n.attr("mean", 0.0)).to(kind)
    low, high = n.attr("low", 0.0), n.attr("high", 1.0)
    return (torch.rand(shape, generator=_generator(n)) * (high - low) + low).to(kind)


@op("Bernoulli")
def _bernoulli(n: OperatorCall, x: Tensor) -> Tensor:
    kind = torch_dtype(n.attr("dtype")) if n.attr("dtype") else x.dtype
    return (torch.rand(x.shape, generator=_generator(n)) < x).to(kind)


@op("Multinomial")
def _multinomial(n: OperatorCall, x: Tensor) -> Tensor:
    chosen = torch.multinomial(
        torch.softmax(x.float(), -1), n.attr("sample_size", 1), True, generator=_generator(n)
    )
    return chosen.to(torch_dtype(n.attr("dtype", 6)))
