"""What a sample of memory sees: a page of changes in every turn, one byte within a round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pruner.graph.weight_checksum import BLOCKS, LINE, PHASES, Span, checksums, plan_of

PAGE = 4096


def turns(array: np.ndarray) -> list[bytes]:
    plan = plan_of([Span.of(array.ctypes.data, array.nbytes)])
    return [checksums(plan, phase).tobytes() for phase in range(PHASES)]


def seen(before: list[bytes], array: np.ndarray) -> list[bool]:
    return [a != b for a, b in zip(before, turns(array), strict=True)]


def test_a_round_is_no_longer_than_64_calls_and_a_page_is_longer_than_a_gap() -> None:
    assert PHASES <= 64
    assert PHASES * LINE <= PAGE


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9000), st.integers(9, 40000), st.sampled_from([0, 1, 2, 4, 60]))
def test_any_write_of_a_page_is_seen_at_once(at: int, nbytes: int, shift: int) -> None:
    memory = np.zeros(nbytes + PAGE + shift, np.uint8)[shift:]
    before = turns(memory)
    first = at % nbytes
    memory[first : first + PAGE] += 1
    assert all(seen(before, memory))


@settings(deadline=None, max_examples=60)
@given(st.integers(65, 30000), st.integers(0, 1 << 30), st.integers(1, 255))
def test_any_byte_is_seen_within_a_round(nbytes: int, at: int, bits: int) -> None:
    memory = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    before = turns(memory)
    memory[at % nbytes] ^= bits
    assert any(seen(before, memory))


@pytest.mark.parametrize("nbytes", [64, 65, 100, 1000, PHASES * LINE - 1, PHASES * LINE])
def test_a_small_tensor_that_changes_as_a_whole_is_seen_at_once(nbytes: int) -> None:
    memory = np.zeros(nbytes, np.uint8)
    before = turns(memory)
    memory[:] = 7
    assert all(seen(before, memory))


@pytest.mark.parametrize("columns", [256, 512, 768, 1024, 1280, 2048, 4096])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_column_is_seen_at_once_though_its_elements_are_a_regular_distance_apart(
    columns: int, dtype: type
) -> None:
    weight = np.ones((1024, columns), dtype)
    before = turns(weight)
    weight[:, 3:5] = 2
    assert all(seen(before, weight))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_signs_that_flip_and_rows_that_change_places_are_seen(dtype: type) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 512)).astype(dtype)
    before = turns(weight)
    np.negative(weight, out=weight)
    assert all(seen(before, weight))
    before = turns(weight)
    weight[:] = np.roll(weight, 8, axis=0)
    assert all(seen(before, weight))


def test_a_long_span_has_rows_that_cover_it_once() -> None:
    memory = np.zeros(3 * BLOCKS * PHASES * LINE + 5, np.uint8)
    rows = plan_of([Span.of(memory.ctypes.data, memory.nbytes)])
    assert [int(count) for *_, count, _, _ in rows] == [BLOCKS, BLOCKS, BLOCKS, 0]
    assert {int(b - a) for a, b in itertools.pairwise(rows[:, 0])} == {BLOCKS * PHASES * LINE}
    before = turns(memory)
    memory[-1] = 1
    assert sum(seen(before, memory)) == 1


def test_spans_are_whole_words_around_the_bytes() -> None:
    span = Span.of(1003, 10)
    assert (span.address, span.words, span.small) == (1000, 2, True)
    assert span.rows() == []
