"""Twelve bits lose nothing of what they take, and refuse what there is no room for."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.graph.coded import (
    VECTORS,
    NotCodedError,
    Places,
    coded,
    codes_well,
    decoded,
    used,
)
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.reference import numpy_dtype

ODD = (0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7F7F, 0x0080)
"""Zeros, denormals, infinities, NaN of both kinds, the largest and the least normal number."""


def usual(rng: np.random.Generator, columns: int, depth: int) -> np.ndarray:
    """Numbers of a normal distribution (k, n), as words; columns lie in one piece."""
    values = rng.standard_normal((columns, depth)).astype(np.float32) / 64
    return (values.view(np.uint32) >> 16).astype(np.uint16).T


def there_and_back(numbers: np.ndarray, lanes: int) -> np.ndarray:
    depth, columns = numbers.shape
    words = np.full(Places(columns, depth, lanes).words, 0xAAAA, np.uint16)
    coded(numbers, lanes, words)
    words[used(words, Places(columns, depth, lanes)) :] = 0xAAAA
    return decoded(words, columns, depth, lanes)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(("columns", "depth"), [(1, 16), (40, 128), (33, 200), (700, 768), (3, 1)])
def test_numbers_come_back(lanes: int, columns: int, depth: int) -> None:
    rng = np.random.default_rng(columns)
    numbers = usual(rng, columns, depth)
    assert np.array_equal(there_and_back(numbers, lanes), numbers)
    across = np.ascontiguousarray(numbers)
    assert np.array_equal(there_and_back(across, lanes), numbers)
    few = rng.choice(np.array(ODD, np.uint16), (depth, columns))
    assert np.array_equal(there_and_back(few, lanes), few)
    one = np.full_like(few, 0x7FC1)
    assert np.array_equal(there_and_back(one, lanes), one)


@pytest.mark.parametrize("lanes", [8, 16])
def test_any_bits_come_back_or_are_refused(lanes: int) -> None:
    """More and more of the numbers are any at all."""
    rng = np.random.default_rng(lanes)
    columns, depth = 96, 1024
    refused = []
    for share in (0.0, 1e-4, 4e-4, 1e-3, 0.1, 1.0):
        numbers = usual(rng, columns, depth)
        at = rng.random(numbers.shape) < share
        numbers[at] = rng.integers(0, 1 << 16, np.count_nonzero(at))
        upper = np.ascontiguousarray(numbers.T).reshape(-1).view(np.uint8)[1::2]
        try:
            assert np.array_equal(there_and_back(numbers, lanes), numbers)
            refused.append(False)
        except NotCodedError:
            refused.append(True)
            assert not codes_well(upper)
        assert codes_well(upper) <= (share < 1e-3)
        assert codes_well(upper) >= (share < 4e-4)
    assert refused[:3] == [False] * 3
    assert refused[-2:] == [True] * 2


@pytest.mark.parametrize("lanes", [8, 16])
def test_as_many_patches_as_there_is_room_for(lanes: int) -> None:
    """Every number of a patched block is any at all."""
    rng = np.random.default_rng(0)
    block = VECTORS * lanes
    numbers = rng.integers(0x3C00, 0x3F00, (4 * block, 64)).astype(np.uint16)
    blocks = numbers.T.reshape(-1, block).copy()
    room = Places(64, 4 * block, lanes).most - 1
    chosen = rng.permutation(len(blocks))
    blocks[chosen[:room]] = rng.integers(0, 1 << 16, (room, block))
    full = blocks.reshape(64, -1).T
    assert np.array_equal(there_and_back(full, lanes), full)
    blocks[chosen] = rng.integers(0, 1 << 16, (len(blocks), block))
    with pytest.raises(NotCodedError, match="exponents"):
        there_and_back(blocks.reshape(64, -1).T, lanes)


def test_a_layout_of_coded_numbers() -> None:
    b = GraphBuilder()
    view = b.finish([b.permute(b.input(0, (40, 128), "bfloat16"), (1, 0))])
    at = Places(40, 128, 16)
    layout = PackLayout(view, "matmul", 1, at.words, (1, 1, 1, at.words), code=16)
    assert PackLayout.from_json(layout.to_json()) == layout
    assert "code" not in PackLayout(view, "matmul", 1, 8, (1, 5, 128, 8)).to_json()
    numbers = usual(np.random.default_rng(0), 40, 128)
    given = np.ascontiguousarray(numbers.T).view(numpy_dtype("bfloat16"))
    packed = layout.pack(given)
    assert packed.shape == layout.shape
    assert at.patches < layout.used(packed) < at.words
    words = packed.reshape(-1).view(np.uint16)
    assert np.array_equal(decoded(words, 40, 128, 16), numbers)
