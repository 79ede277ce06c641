"""Writes to pages, as the system notes them; and where it does not."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import pytest
import torch

from torch_pruner.dynamo.run import page_writes
from torch_pruner.dynamo.run.page_writes import page_ranges, watch

PAGE = mmap.PAGESIZE
BYTES = 1 << 20


def ranges(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return page_ranges([(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors])


@pytest.fixture
def tensor() -> torch.Tensor:
    made = torch.zeros(BYTES, dtype=torch.uint8)
    if watch(ranges(made)) is None:
        pytest.skip("this system notes no writes")
    return made


def from_a_file(tensor: torch.Tensor) -> None:
    with open("/dev/zero", "rb", buffering=0) as file:
        file.readinto(tensor.numpy()[BYTES // 2 :][:7])


WRITES = {
    "data": lambda t: t.data[BYTES // 2 :][:3].fill_(1),
    "numpy": lambda t: t.numpy().__setitem__(PAGE, 1),
    "memset": lambda t: ctypes.memset(t.data_ptr() + BYTES - PAGE, 0, 1),
    "the system": from_a_file,
    "its own value": lambda t: t.mul_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_any_write_is_noted_once_and_for_all(tensor, write) -> None:
    pages = watch(ranges(tensor))
    assert not pages.written()
    tensor.sum(), tensor.clone()
    assert not pages.written()
    WRITES[write](tensor)
    assert pages.written()
    assert pages.written()


def test_whoever_watches_anew_takes_nothing_from_others(tensor) -> None:
    first, end = ranges(tensor)[0]
    middle = first + BYTES // 2 // PAGE * PAGE
    low, high = watch([(first, middle)]), watch([(middle, end)])
    tensor[-2 * PAGE] = 1
    again = watch([(first, end)])
    assert (low.written(), high.written(), again.written()) == (False, True, False)
    tensor[2 * PAGE] = 1
    assert (low.written(), again.written()) == (True, True)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_to_look_for_itself(tensor) -> None:
    pages = watch(ranges(tensor))
    child = os.fork()
    if not child:
        own = watch(ranges(tensor))
        good = pages.written() and not own.written()
        tensor[BYTES // 2] = 1
        os._exit(0 if good and own.written() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not pages.written()


def test_memory_that_others_may_write_is_not_taken(tensor, tmp_path) -> None:
    shared = torch.zeros(BYTES, dtype=torch.uint8).share_memory_()
    path = tmp_path / "weights"
    path.write_bytes(bytes(BYTES))
    mapped = torch.from_file(str(path), shared=False, size=BYTES, dtype=torch.uint8)
    assert watch(ranges(shared)) is None
    assert watch(ranges(mapped)) is None
    assert watch(ranges(tensor, mapped)) is None
    assert watch([]) is None


def test_memory_that_is_another_counts_as_written(tensor) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    plain = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    first = libc.mmap(None, 16 * PAGE, *plain, -1, 0)
    pages = watch([(first, first + 16 * PAGE)])
    assert not pages.written()
    fixed = 0x10
    assert libc.mmap(first, 16 * PAGE, plain[0], plain[1] | fixed, -1, 0) == first
    assert pages.written()


def test_another_system_notes_nothing(monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    monkeypatch.setattr(page_writes, "_tracker", page_writes._tracker.__wrapped__)
    assert watch(ranges(torch.zeros(BYTES))) is None


def test_whole_pages_of_neighbours_are_one_range() -> None:
    base = 1 << 20
    spans = [(base + 64, base + 5 * PAGE), (base + 5 * PAGE + 64, base + 9 * PAGE + 8)]
    assert page_ranges(spans) == [(base + PAGE, base + 9 * PAGE)]
    assert page_ranges([(base + 1, base + PAGE)]) == []
    far = (base + 99 * PAGE, base + 100 * PAGE)
    assert page_ranges([far, spans[0]]) == [(base + PAGE, base + 5 * PAGE), far]
