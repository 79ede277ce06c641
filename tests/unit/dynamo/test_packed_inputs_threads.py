"""Weights packed by several threads are those that one thread packs, each of them once."""

from __future__ import annotations

import pytest
import torch

from torch_pruner.dynamo.run import copies
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.packing import PackLayout

ROWS, COLUMNS, BLOCK = 192, 700, 32


@pytest.fixture
def layout() -> PackLayout:
    """Of a linear layer's weight, whose last panel is not full."""
    b = GraphBuilder()
    view = b.finish([b.permute(b.input(0, (COLUMNS, ROWS), "float32"), (1, 0))])
    return PackLayout(view, "matmul", 1, BLOCK, (1, -(-COLUMNS // BLOCK), ROWS, BLOCK))


def weights(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(COLUMNS, ROWS) for _ in range(count)]
    assert sum(w.nbytes for w in found) > copies.WORTH_THREADS
    return found


def packed(given, layout):
    return list(copies.all_packed([(w, layout, None, w) for w in given]))


@pytest.fixture
def threads(monkeypatch):
    """The sizes of the pools that were made."""
    made = []
    original = copies.ThreadPoolExecutor

    def counting(size):
        made.append(size)
        return original(size)

    monkeypatch.setattr(copies, "ThreadPoolExecutor", counting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    return made


def test_they_are_equal_to_those_of_one_thread(layout, threads, monkeypatch) -> None:
    found = packed(weights(5), layout)
    assert threads == [3]
    given = weights(5)
    monkeypatch.setattr(copies, "WORTH_THREADS", 1 << 60)
    expected = packed(given, layout)
    assert threads == [3]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() % 64 == 0


def test_a_weight_that_is_used_twice_is_packed_once(layout, threads) -> None:
    first, second, third = weights(3)
    found = packed([first, second, first, third, second], layout)
    assert found[0] is found[2]
    assert found[1] is found[4]
    assert not torch.equal(found[0], found[3])


def test_inference_tensors_are_packed_by_threads_outside_of_inference_mode(layout, threads) -> None:
    with torch.inference_mode():
        given = weights(3)
        found = packed(given, layout)
    assert threads == [3]
    assert torch.equal(found[0][0, 0, :, :BLOCK], given[0][:BLOCK].t())


def test_what_goes_wrong_in_a_thread_is_raised(layout, threads, monkeypatch) -> None:
    def broken(*_arguments):
        raise MemoryError("no memory")

    monkeypatch.setattr(PackLayout, "pack", broken)
    with pytest.raises(MemoryError, match="no memory"):
        packed(weights(3), layout)
