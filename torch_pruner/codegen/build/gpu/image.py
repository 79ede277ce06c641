"""A graph's kernels as one image of machine code and a list of launches, as bytes and back.

The calling convention is the CPU's: an entry takes the address of a table of 64-bit addresses, here
of device memory, and launches its kernels one after another on the caller's stream. Nothing is
copied, allocated or waited for. Nothing here needs a compiler, or TVM.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pruner.codegen.build.gpu.driver import Grid
from torch_pruner.codegen.build.gpu.together import MOST
from torch_pruner.graph.memory import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.codegen.build.gpu.driver import Driver

_MAGIC = b"torch_pruner cubin 4\n"
_LENGTH = struct.Struct("<Q")
MAX_HEADER = 64 << 20  # bytes of a list of launches
MAX_NULLS = 16
MAX_SHARED = 1 << 20  # more than any card has for a block

Calls = dict[str, list[tuple[str, list[Place]]]]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is called: its name in the source, its grid, and its parameters.

    ``parameters`` are positions among the kernel's buffers (inputs, outputs, scratch): what a
    kernel does not touch is no parameter of it. With several ``copies`` they are those of as many
    calls, one after another, and the kernel takes all of them as one parameter (``together``).
    A kernel that ``waits`` may be launched before those in front of it are done (``dependent``).
    ``image`` is the number of the image that it is in; ``nulls`` says how many pointers it takes
    after those, and never reads.
    """

    symbol: str
    blocks: int
    threads: int
    parameters: tuple[int, ...]
    shared_bytes: int = 0
    copies: int = 1
    waits: bool = False
    image: int = 0
    nulls: int = 0


@dataclass(frozen=True, slots=True)
class GpuProgram:
    """Machine code in images, how each kernel is launched, and what each entry launches."""

    arch: str
    images: tuple[bytes, ...]
    kernels: dict[str, Launch]
    entries: Calls

    def to_bytes(self) -> bytes:
        header = {
            "arch": self.arch,
            "images": [len(image) for image in self.images],
            "kernels": {name: asdict(launch) for name, launch in self.kernels.items()},
            "entries": {
                entry: [[name, [[p.slot, p.offset] for p in places]] for name, places in calls]
                for entry, calls in self.entries.items()
            },
        }
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        return b"".join([_MAGIC, _LENGTH.pack(len(text)), text, *self.images])

    @staticmethod
    def from_bytes(data: bytes) -> GpuProgram:
        """Inverse of ``to_bytes``. Raises ``ValueError`` on anything that is not a program."""
        start = len(_MAGIC) + _LENGTH.size
        if not data.startswith(_MAGIC) or len(data) < start:
            raise ValueError("not a program for GPUs")
        (length,) = _LENGTH.unpack(data[len(_MAGIC) : start])
        if length > min(MAX_HEADER, len(data) - start):
            raise ValueError("a list of launches that is longer than its file, or too long")
        try:
            header = json.loads(data[start : start + length])
            kernels = {str(n): _launch_from(k) for n, k in header["kernels"].items()}
            entries: Calls = {
                str(entry): [
                    (str(name), [Place(int(s), int(o)) for s, o in places])
                    for name, places in calls
                ]
                for entry, calls in header["entries"].items()
            }
            arch = str(header["arch"])
            images = _images(data[start + length :], [int(n) for n in header["images"]])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
            raise ValueError(f"not a list of launches: {err}") from err
        for calls in entries.values():
            for name, places in calls:
                if name not in kernels or max(kernels[name].parameters, default=-1) >= len(places):
                    raise ValueError(f"a call of {name!r}, which is not there or takes more")
        if any(not 0 <= k.image < len(images) for k in kernels.values()):
            raise ValueError("a kernel of an image that is not there")
        return GpuProgram(arch, images, kernels, entries)


def _images(data: bytes, sizes: Sequence[int]) -> tuple[bytes, ...]:
    if min(sizes, default=0) < 0 or sum(sizes) != len(data):
        raise ValueError("images that are longer or shorter than their file")
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(data[first:end] for first, end in itertools.pairwise(ends))


def _launch_from(data: Mapping[str, Any]) -> Launch:
    parameters = tuple(int(p) for p in data["parameters"])
    names = ("blocks", "threads", "shared_bytes", "copies", "image", "nulls")
    numbers = {name: int(data[name]) for name in names}
    waits = bool(data["waits"])
    launch = Launch(str(data["symbol"]), parameters=parameters, waits=waits, **numbers)
    fits = 0 < launch.blocks < 2**31 and 0 < launch.threads <= 1024
    fits = fits and 0 <= launch.shared_bytes <= MAX_SHARED and 0 < launch.copies <= MOST
    fits = fits and 0 <= launch.nulls <= MAX_NULLS
    if not fits or min(parameters, default=0) < 0:
        raise ValueError(f"a launch that no card takes: {launch}")
    return launch


def launches_of(name: str, launches: Mapping[str, Launch]) -> list[str]:
    """The names, in order, under which ``cuda_source`` has the launches of one kernel."""
    more = sum(1 for other in launches if other.startswith(f"{name}/"))
    return [name, *(f"{name}/{n}" for n in range(1, more + 1))]


class GpuEntry:
    """One entry of a loaded program. Thread safe: what a call needs is made for that call."""

    def __init__(
        self, program: GpuProgram, entry: str, driver: Driver, modules: Sequence[Any]
    ) -> None:
        """``modules``: the program's images, loaded by ``driver``."""
        slots: list[int] = []
        offsets: list[int] = []
        nulls: list[int] = []
        self._launches = []
        for name, places in program.entries[entry]:
            launch = program.kernels[name]
            function = driver.function(modules[launch.image], launch.symbol, launch.shared_bytes)
            grid = Grid(
                launch.blocks, launch.threads, launch.shared_bytes, launch.copies, launch.waits
            )
            self._launches.append((function, grid, 8 * len(slots)))
            slots += [places[p].slot for p in launch.parameters]
            offsets += [places[p].offset for p in launch.parameters]
            nulls += range(len(slots), len(slots) + launch.nulls)
            slots += [0] * launch.nulls
            offsets += [0] * launch.nulls
        self._nulls = np.array(nulls, dtype=np.intp)
        self._slots = np.array(slots, dtype=np.intp)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._steps = 8 * np.arange(len(slots), dtype=np.int64)
        self._size = 1 + max(slots, default=0)
        self._driver = driver

    def __call__(self, address: int) -> None:
        """Launch every kernel on the addresses in the table at ``address``."""
        table = np.ctypeslib.as_array((ctypes.c_int64 * self._size).from_address(address))
        values = table[self._slots] + self._offsets
        if self._nulls.size:
            values[self._nulls] = 0
        # A kernel's parameters are handed over as an array of their addresses.
        pointers = values.ctypes.data + self._steps
        first, launch = pointers.ctypes.data, self._driver.launch
        stream = self._driver.stream()
        for function, grid, at in self._launches:
            launch(function, grid, stream, first + at)


def load_gpu_program(data: bytes, names: Sequence[str], driver: Driver) -> list[GpuEntry]:
    """The named entries of a program. Raises ``ValueError`` if it is none, or not for this card."""
    program = GpuProgram.from_bytes(data)
    missing = [n for n in names if n not in program.entries]
    if missing:
        raise ValueError(f"the program has no {', '.join(missing)}")
    modules = [driver.load(image) for image in program.images]
    return [GpuEntry(program, name, driver, modules) for name in names]
