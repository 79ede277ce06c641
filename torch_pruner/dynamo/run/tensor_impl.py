"""Where torch keeps the address and the version of a tensor, for programs that look at hundreds.

Asking Python for either takes as long as reading a few lines of memory. What is looked for is
found by experiment, since no interface tells it: words of the tensor's implementation that hold
what Python says they should, in all of many tensors. Where that is not clear, ``find`` says None
and Python is asked.

A thread that gives a parameter other memory while another calls what was compiled races with the
program as it does with any kernel that reads the parameter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WORDS = 20  # of an implementation that are looked at: it is longer
_STORAGE_WORDS = 6
_COUNTER_WORDS = 4  # of the object with the version


@dataclass(frozen=True, slots=True)
class Implementation:
    """Distances in bytes: in a tensor's implementation of the pointer to its storage, of its
    offset in elements and of the pointer to its version counter; in a storage of the data pointer;
    in a counter of the version, which has 32 bits."""

    storage: int
    data: int
    offset: int
    counter: int
    version: int

    def as_words(self) -> tuple[int, ...]:
        """As the compiled program takes them."""
        return astuple(self)


@functools.cache
def find() -> Implementation | None:
    """How this build of torch lays tensors out, or None where experiments do not tell."""
    with contextlib.suppress(OSError, AttributeError, LookupError, struct.error):
        fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)  # reading elsewhere is an error
        try:
            return _found(functools.partial(_words, fd))
        finally:
            os.close(fd)
    return None


def _words(fd: int, address: int, count: int) -> tuple[int, ...]:
    raw = os.pread(fd, 8 * count, address)
    return struct.unpack(f"{count}Q", raw)


def _samples() -> list[torch.Tensor]:
    """Tensors of many versions, offsets and kinds of memory."""
    with torch.inference_mode(mode=False), torch.no_grad():
        found = [torch.zeros(41)[3 * k + 1 :] for k in range(6)]
        found += [torch.nn.Parameter(torch.zeros(5, 3)), torch.from_numpy(torch.ones(9).numpy())]
        found += [torch.zeros(3, 4, dtype=torch.bfloat16).t(), torch.tensor(2.5)]
        for k, tensor in enumerate(found):
            for _ in range(7 * k + 2):
                tensor.add_(1)
    return found


def _found(read: Callable[[int, int], tuple[int, ...]]) -> Implementation:
    tensors = _samples()
    parts = [read(t._cdata, _WORDS) for t in tensors]
    storage = _only(parts, [t.untyped_storage()._cdata for t in tensors])
    offset = _only(parts, [int(t.storage_offset()) for t in tensors])
    kept = [read(p[storage], _STORAGE_WORDS) for p in parts]
    data = _first(kept, [t.untyped_storage().data_ptr() for t in tensors])
    versions = [t._version for t in tensors]
    counters = []
    for k in range(2, _WORDS):
        with contextlib.suppress(OSError, LookupError, struct.error):
            objects = [read(p[k], _COUNTER_WORDS) for p in parts]
            low = [[word & 0xFFFFFFFF for word in words] for words in objects]
            counters.append((k, _only(low, versions)))
    if len(counters) != 1:
        raise LookupError(counters)
    ((counter, version),) = counters
    return Implementation(8 * storage, 8 * data, 8 * offset, 8 * counter, 8 * version)


def _places(parts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[int]:
    """The positions at which all of ``parts`` hold what is wanted."""
    width = len(parts[0])
    pairs = list(zip(parts, wanted, strict=True))
    return [k for k in range(width) if all(part[k] == value for part, value in pairs)]


def _only(parts: Sequence[Sequence[int]], wanted: Sequence[int]) -> int:
    places = _places(parts, wanted)
    if len(places) != 1:
        raise LookupError(places)
    return places[0]


def _first(parts: Sequence[Sequence[int]], wanted: Sequence[int]) -> int:
    """The data pointer is followed by what frees it, which may be the same address."""
    return _places(parts, wanted)[0]
