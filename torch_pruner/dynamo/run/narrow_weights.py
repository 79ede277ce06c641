"""Which narrower float holds what a float32 parameter holds, and copies of it in that dtype.

In: tensors. Out: names of dtypes, and copies that are equal to the last bit. All is done on bits,
so NaN, denormals and the sign of zeros are what they were.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.dynamo.run.huge_pages import ask_for
from torch_pruner.graph.coded import codes_well
from torch_pruner.graph.lossless import CODED, NARROWER, is_worth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_pruner.config import Config
    from torch_pruner.dynamo.lower.calls import RuntimeValue

Array = npt.NDArray[Any]

_CHUNK = 1 << 16
"""Elements that are looked at together: a part of a second cache. The first that do not fit are
enough, so a tensor of any other numbers costs next to nothing."""
_LOW_HALVES = 0x0000FFFF


class NotNarrowError(ValueError):
    """A parameter holds what its narrower copy could not."""


def narrower(tensor: torch.Tensor) -> str | None:
    """The narrower dtype that represents every element of a float32 tensor bit for bit, or None.

    bfloat16 represents what has zero in its low 16 bits, NaN and infinity included; float16 what is
    the same after a conversion there and back, NaN excluded. Only dense CPU tensors are looked at.
    """
    plain = tensor.dtype is torch.float32 and tensor.device.type == "cpu" and not tensor.is_neg()
    if not plain or not tensor.is_contiguous() or not tensor.numel() or not _is_there(tensor):
        return None
    flat = _flat(tensor)
    return next((name for name in NARROWER if all(map(_FITS[name], _chunks(flat)))), None)


def kept_as(tensor: torch.Tensor) -> str | None:
    """``narrower``, or ``CODED`` for what is bfloat16 and may be kept in twelve bits."""
    name = narrower(tensor)
    if name == "bfloat16" and codes_well(_flat(tensor).view(np.uint8)[3::4]):  # the upper half last
        return CODED
    return name


def narrow_copy(tensor: torch.Tensor, dtype: str, order: Sequence[int]) -> torch.Tensor:
    """``tensor`` in a narrower ``dtype`` and the memory order ``order``, dense and aligned.

    Raises ``NotNarrowError`` if a bit of it would be lost.
    """
    dense = tensor.detach().resolve_neg().permute(tuple(order)).contiguous()
    result = ask_for(torch.empty(dense.shape, dtype=DTYPES[dtype]))
    flat, bits = _flat(dense), result.reshape(-1).view(torch.int16).numpy()
    fits = _FITS[dtype]
    for first, chunk in zip(range(0, len(flat), _CHUNK), _chunks(flat), strict=True):
        if not fits(chunk):
            raise NotNarrowError(f"a float32 parameter of {list(tensor.shape)} is no {dtype}")
        np.copyto(bits[first : first + _CHUNK], _BITS[dtype](chunk))
    return result.permute(tuple(np.argsort(order)))


def holds(given: Sequence[RuntimeValue], config: Config) -> Mapping[int, str]:
    """For positions of ``given`` the narrower dtype, or ``CODED``, of what may be a weight.

    Nothing where ``config`` does not want it, or has weights of another kind.
    """
    if not config.narrow_weights or config.rounded_bits or config.weights == "live":
        return {}
    if torch.is_grad_enabled() and any(_learns(t) for t in given):  # weights are about to change
        return {}
    asked: dict[int, torch.Tensor] = {k: t for k, t in enumerate(given) if _may_be_weight(t)}
    if not asked:
        return {}
    tensors = {id(t): t for t in asked.values()}
    # AOTAutograd compiles under its fake mode, in which nothing is computed.
    with _disable_current_modes(), ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        names = dict(zip(tensors, pool.map(kept_as, tensors.values()), strict=True))
    found = ((k, names[id(t)]) for k, t in asked.items())
    return {k: name for k, name in found if name is not None}


def _learns(value: RuntimeValue) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _may_be_weight(value: RuntimeValue) -> TypeGuard[torch.nn.Parameter]:
    """A plain parameter of the shape that weights have: no fake one, none of torchao's."""
    return (
        type(value) is torch.nn.Parameter
        and value.layout is torch.strided
        and all(type(n) is int for n in value.shape)
        and is_worth(tuple(value.shape))
    )


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether its memory is: storages are resized to nothing to free it."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end


def _flat(dense: torch.Tensor) -> Array:
    array: Array = dense.detach().reshape(-1).numpy()
    return array


def _chunks(flat: Array) -> Iterator[Array]:
    return (flat[first : first + _CHUNK] for first in range(0, len(flat), _CHUNK))


def _fits_bfloat16(chunk: Array) -> bool:
    return not int(np.bitwise_or.reduce(chunk.view(np.uint32))) & _LOW_HALVES


def _fits_float16(chunk: Array) -> bool:
    back = torch.from_numpy(chunk).to(torch.float16).to(torch.float32).numpy()
    same = np.array_equal(back.view(np.uint32), chunk.view(np.uint32))
    return same and not np.isnan(chunk).any()


def _bits_of_bfloat16(chunk: Array) -> Array:
    high: Array = chunk.view(np.int16)[1::2]  # x86 and aarch64 have the low half first
    return high


def _bits_of_float16(chunk: Array) -> Array:
    bits: Array = torch.from_numpy(chunk).to(torch.float16).view(torch.int16).numpy()
    return bits


_FITS: Mapping[str, Callable[[Array], bool]] = {
    "bfloat16": _fits_bfloat16,
    "float16": _fits_float16,
}
_BITS: Mapping[str, Callable[[Array], Array]] = {
    "bfloat16": _bits_of_bfloat16,
    "float16": _bits_of_float16,
}
