"""Where torch keeps what programs ask of tensors: found by experiment, and doubted."""

from __future__ import annotations

import struct

import pytest
import torch

from torch_pruner.dynamo.run import tensor_impl
from torch_pruner.dynamo.run.weight_checks import facts_of


def read(address: int, count: int) -> tuple[int, ...]:
    import ctypes

    return struct.unpack(f"{count}Q", ctypes.string_at(address, 8 * count))


def test_what_is_found_holds_for_tensors_of_many_kinds() -> None:
    found = tensor_impl.find()
    if found is None:
        pytest.skip("this build of torch lays tensors out in a way that experiments do not tell")
    linear = torch.nn.Linear(3, 4)
    for tensor in (torch.randn(90)[17:], linear.weight, torch.randn(3, 4).t(), torch.arange(5)):
        with torch.no_grad():
            for _ in range(3):
                tensor.add_(1)
        words = read(tensor._cdata, 20)
        storage = words[found.storage // 8]
        assert read(storage, 6)[found.data // 8] == tensor.untyped_storage().data_ptr()
        assert words[found.offset // 8] == tensor.storage_offset()
        counter = read(words[found.counter // 8], 4)[found.version // 8]
        assert counter & 0xFFFFFFFF == tensor._version


@pytest.mark.parametrize("lie", ["storage", "twice", "unreadable"])
def test_what_is_not_clear_is_not_used(monkeypatch, lie: str) -> None:
    def words(fd: int, address: int, count: int) -> tuple[int, ...]:
        if lie == "unreadable":
            raise OSError(5, "no memory there")
        real = list(read(address, count))
        if count == 20:  # a tensor's implementation
            real[2:4] = [real[2]] * 2 if lie == "twice" else [7, 7]
        return tuple(real)

    monkeypatch.setattr(tensor_impl, "_words", words)
    tensor_impl.find.cache_clear()
    try:
        assert tensor_impl.find() is None
        assert facts_of([torch.ones(3)], [0]) is None
    finally:
        tensor_impl.find.cache_clear()
