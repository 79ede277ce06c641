"""Narrow copies are equal to the last bit, and what is not representable is not narrowed."""

from __future__ import annotations

from typing import Self

import numpy as np
import pytest
import torch
from torch import nn

from torch_pruner.config import Config
from torch_pruner.dynamo.run.narrow_weights import (
    NotNarrowError,
    holds,
    narrow_copy,
    narrower,
)
from torch_pruner.graph.lossless import CODED

SPECIAL = (
    0x00000000, 0x80000000,  # zeros
    0x00010000, 0x807F0000, 0x00000001, 0x007FFFFF,  # denormals
    0x7F800000, 0xFF800000,  # infinities
    0x7FC00000, 0xFFC10000, 0x7F810000, 0x7FC00001,  # NaN: quiet, signalling, with low bits
)  # fmt: skip


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.int32).numpy().view(np.uint32)


def of_bits(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def of_bfloat16() -> torch.Tensor:
    """Each bfloat16 there is, and more than one chunk of them."""
    every = np.arange(1 << 16, dtype=np.uint32) << 16
    return of_bits(np.concatenate([every, every[:192]])).reshape(-1, 64)


def of_float16() -> torch.Tensor:
    """Each float16 that is a number or infinite, denormal ones included."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    return every[~every.isnan()].reshape(-1, 2)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_every_bfloat16_is_kept(order: tuple[int, int]) -> None:
    given = of_bfloat16()
    assert narrower(given) == "bfloat16"
    copy = narrow_copy(given, "bfloat16", order)
    assert copy.shape == given.shape
    assert copy.permute(order).is_contiguous()
    back = copy.view(torch.int16).to(torch.int32) << 16
    assert np.array_equal(back.numpy().view(np.uint32), bits_of(given))


def test_every_float16_is_kept() -> None:
    given = of_float16()
    assert narrower(given) == "float16"
    assert np.array_equal(bits_of(narrow_copy(given, "float16", (0, 1)).float()), bits_of(given))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_is_equal_for_any_bits(seed: int) -> None:
    """Random bits, of which some have zeros at their end, and the special values among them."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, 64 * 70, dtype=np.uint32)
    bits[rng.integers(0, len(bits), 64)] = rng.choice(np.array(SPECIAL, np.uint32), 64)
    given = of_bits(bits >> (seed * 2) << (seed * 2 + 2)).reshape(70, 64)
    found = narrower(given)
    assert (found == "bfloat16") == bool(np.all(bits_of(given) & 0xFFFF == 0))
    for dtype in ("bfloat16", "float16"):
        try:
            copy = narrow_copy(given, dtype, (0, 1))
        except NotNarrowError:
            assert found != dtype
            continue
        wide = copy.view(torch.int16).to(torch.int32) << 16 if dtype == "bfloat16" else copy.float()
        assert np.array_equal(wide.view(torch.int32).numpy().view(np.uint32), bits_of(given))


@pytest.mark.parametrize("bits", SPECIAL)
@pytest.mark.parametrize("place", [0, (1 << 16) + 5, -1])
def test_one_element_decides(bits: int, place: int) -> None:
    given = of_bfloat16()
    flat = given.reshape(-1).view(torch.int32)
    flat[place] = int(np.uint32(bits).view(np.int32))
    assert narrower(given) == (None if bits & 0xFFFF else "bfloat16")
    if bits & 0xFFFF:
        with pytest.raises(NotNarrowError, match="bfloat16"):
            narrow_copy(given, "bfloat16", (0, 1))


def test_a_nan_is_no_float16() -> None:
    given = of_float16().clone()
    given[5, 1] = torch.nan
    assert narrower(given) is None
    with pytest.raises(NotNarrowError):
        narrow_copy(given, "float16", (0, 1))


def test_what_is_asked_about() -> None:
    def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.ones(*shape, dtype=dtype), requires_grad=False)

    gone = parameter(64, 64)
    gone.untyped_storage().resize_(0)
    given = [
        parameter(64, 64), torch.ones(64, 64), parameter(63, 64), parameter(64),
        parameter(64, 64, dtype=torch.bfloat16), gone, 3,
        nn.Parameter(torch.ones(64, 128).t(), requires_grad=False),
        nn.Parameter(torch.full((64, 64), 0.1), requires_grad=False),
    ]  # fmt: skip
    assert holds(given, Config()) == {0: CODED}
    for options in ({"narrow_weights": False}, {"weights": "live"}, {"int8_weights": True}):
        assert holds(given, Config(**options)) == {}
    given.append(nn.Parameter(torch.ones(64, 64)))
    assert holds(given, Config()) == {}, "what learns is not narrow for long"
    with torch.no_grad():
        assert set(holds(given, Config())) == {0, 9}


class Wrapper(torch.Tensor):
    """Looks like float32, as quantised weights do, and knows no operator but ``detach``."""

    @staticmethod
    def __new__(cls) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, (64, 64), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls()
        raise NotImplementedError(func)


def test_what_only_looks_like_floats_is_not_looked_at() -> None:
    weight = nn.Parameter(Wrapper(), requires_grad=False)
    assert isinstance(weight, nn.Parameter)
    assert holds([weight], Config()) == {}
