"""What machine code for NVIDIA's GPUs is made of, as their disassembler prints it.

``nvdisasm`` comes with the CUDA toolkit, and with CUDA builds of Triton. Instructions are counted
as they stand in the code, not as often as they run: loops over tiles are unrolled, so what stands
in them is nearly all there is.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TIME_LIMIT_S = 120
PRODUCTS = ("HMMA", "IMMA", "HGMMA", "QGMMA")
SHARED_LOADS = ("LDS", "LDSM")
COPIES = ("LDGSTS", "UBLKCP")  # from global memory to shared memory, past registers
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([A-Z0-9_.]*)", re.MULTILINE
)
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True, slots=True)
class Instructions:
    """Counts of one image. ``loaded_bytes`` and ``stored_bytes``: of a thread, global memory."""

    products: int
    shared_loads: int
    copies: int
    barriers: int
    loads: int
    loaded_bytes: int
    stores: int
    stored_bytes: int
    spills: int  # stores to a thread's own memory

    @property
    def products_a_load(self) -> float | None:
        """Tensor-core products for each load from shared memory; None where there is none."""
        return self.products / self.shared_loads if self.shared_loads else None

    @property
    def bytes_a_load(self) -> float | None:
        return self.loaded_bytes / self.loads if self.loads else None

    @property
    def bytes_a_store(self) -> float | None:
        return self.stored_bytes / self.stores if self.stores else None


def counted(text: str) -> Instructions:
    """The instructions of a disassembly."""
    found: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for name, options in _INSTRUCTION.findall(text):
        found[name] += 1
        if name in ("LDG", "STG"):
            moved[name] += next((_WIDTHS[o] for o in options.split(".") if o in _WIDTHS), 4)
    products, loads, copies = (
        sum(found[name] for name in names) for names in (PRODUCTS, SHARED_LOADS, COPIES)
    )
    return Instructions(
        products, loads, copies, found["BAR"], found["LDG"], moved["LDG"], found["STG"],
        moved["STG"], found["STL"],
    )  # fmt: skip


def instructions(image: bytes, disassembler: str) -> Instructions:
    """Of a cubin. Raises ``OSError`` without the program, ``subprocess.SubprocessError``."""
    with tempfile.TemporaryDirectory(prefix="sass") as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(image)
        done = subprocess.run(
            [disassembler, str(path)],
            capture_output=True, text=True, timeout=TIME_LIMIT_S, check=True,
        )  # fmt: skip
    return counted(done.stdout)
