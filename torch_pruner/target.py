"""What code is generated for, and on which device: plain values, found out without torch or TVM.

``TargetSpec`` is TVM's target in dict form plus the constants that analytical models need.
``DeviceFingerprint`` names the physical device, for cache keys. Both come from ``/proc/cpuinfo``
and sysfs; what cannot be read gets a modest default: an unknown machine is slow, not broken.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner.cards import CARDS, Card
from torch_pruner.cpus import AMD, BY_NAME, GENERIC, GENERIC_X86, INTEL, CpuModel
from torch_pruner.exc import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Attr = bool | int | str | tuple[str, ...]
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_AARCH64_TRIPLES = {"Darwin": "arm64-apple-darwin"}
# What kernels may use and therefore time differently; other flags differ between equal devices.
ISA_FLAGS = frozenset(
    {
        *("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16"),
        *("avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "asimd", "asimdhp", "sve", "bf16"),
    }
)


@dataclass(frozen=True, slots=True)
class CpuProbe:
    """What the operating system tells about the processor; empty or zero where it does not."""

    vendor: str
    name: str
    family: int
    model: int
    flags: frozenset[str]
    physical_cores: int
    logical_cores: int
    usable_cores: int  # by this process: affinity
    max_frequency_hz: float
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    machine: str

    @staticmethod
    def read(root: Path = Path("/")) -> CpuProbe:
        """Read ``/proc/cpuinfo`` and ``/sys`` below ``root``, skipping what cannot be read."""
        probe = _probed(root)
        if hasattr(os, "sched_getaffinity"):  # it changes while a process runs; the rest does not
            return replace(probe, usable_cores=len(os.sched_getaffinity(0)))
        return probe

    def cpu_model(self) -> CpuModel:
        """The most specific microarchitecture whose instructions are all there."""
        if self.machine not in ("x86_64", "amd64"):
            return GENERIC
        if self.vendor == "AuthenticAMD":
            named = tuple(m for family, m in AMD if self.family >= family)
        else:
            named = INTEL if self.vendor == "GenuineIntel" else ()
        return next(m for m in (*named, *GENERIC_X86) if m.needs <= self.flags)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A TVM target and the constants of its device that analytical models read.

    ``attrs`` is TVM's target dict in canonical form (sorted; lists as tuples). Caches: ``l1_bytes``
    and ``l2_bytes`` per core, ``l3_bytes`` in all. Rates are estimates good for ranking.
    """

    kind: str
    attrs: tuple[tuple[str, Attr], ...]
    cores: int
    vector_bytes: int
    vector_registers: int
    fma_per_cycle: int
    frequency_hz: float
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    dram_bytes_per_s: float
    bf16_dot: bool
    bf16_tiles: bool = False  # AMX; kernels also need ``tiles_allowed``
    byte_dot: bool = False  # AVX512-VNNI, dotprod: four products of bytes are added to a sum
    bf16_dot_fmas: float = 4.0  # multiply-adds that take as long as one ``vdpbf16ps``
    float16: bool = False  # vectors of float16 become float32, and back, in one instruction
    reads_ahead: bool = False  # streams of whole floats come soonest where nobody asks for lines

    @staticmethod
    def detect(threads: int | None = None, probe: CpuProbe | None = None) -> TargetSpec:
        """This machine's CPU, for kernels that run on ``threads`` (default: every usable core)."""
        probe = probe or CpuProbe.read()
        model = probe.cpu_model()
        return _cpu_spec({"kind": "llvm", **model.attrs()}, model, probe, threads)

    @staticmethod
    def from_dict(target: Mapping[str, Any], threads: int | None = None) -> TargetSpec:
        """A TVM target as the user wrote it, with the constants of its ``mcpu``.

        Without ``mcpu`` it is this machine's, or a generic one where ``mtriple`` names another
        architecture. An ``mcpu`` that is not in the tables counts as one
        with 128-bit vectors, which makes ranking poorer and code no worse. Kind ``cuda`` has a
        ``model``, a name of ``cards.CARDS``.

        Raises:
            OptionError: The dict is not a target that this package generates code for.
        """
        for key, value in target.items():
            parts = value if isinstance(value, (list, tuple)) else [value]
            if not isinstance(key, str) or not all(isinstance(p, (bool, int, str)) for p in parts):
                problem = f"attribute {key!r} must be a string, a number or a list, not {value!r}"
                raise OptionError("target", problem)
        if target.get("kind") == "cuda":
            return TargetSpec.cuda(_card_named(target))
        if target.get("kind") != "llvm":
            problem = f"kind {target.get('kind')!r} is not supported; give 'llvm' or 'cuda'"
            raise OptionError("target", problem)
        probe = CpuProbe.read()
        architecture = str(target.get("mtriple", "")).partition("-")[0] or probe.machine
        if "mcpu" not in target:
            if architecture != probe.machine:
                probe = replace(probe, machine=architecture, flags=frozenset())
            model = probe.cpu_model()
            return _cpu_spec({**model.attrs(), **target}, model, probe, threads)
        mcpu = str(target["mcpu"])
        model = BY_NAME.get(mcpu, CpuModel(mcpu, 16, 1, GENERIC.frequency_hz))
        return _cpu_spec(target, model, probe, threads)

    @staticmethod
    def resolve(option: str, threads: int | None = None) -> TargetSpec:
        """The target that ``Config.target`` means: ``auto``, or the JSON text of a target dict."""
        if option == "auto":
            return TargetSpec.detect(threads)
        return TargetSpec.from_dict(json.loads(option), threads)

    def with_threads(self, threads: int) -> TargetSpec:
        """The same device for kernels that run on so many CPU threads; a GPU's have none."""
        if "num-cores" not in dict(self.attrs):
            return self
        return replace(self, attrs=_canonical({**self.tvm_target(), "num-cores": threads}))

    @staticmethod
    def cuda(card: Card) -> TargetSpec:
        """A GPU of ``cards.CARDS``, or one like it."""
        return TargetSpec(
            kind="cuda",
            attrs=_canonical({"kind": "cuda", "arch": card.arch, "model": card.name}),
            cores=card.multiprocessors,
            vector_bytes=16,
            vector_registers=255,
            fma_per_cycle=int(card.float32_flops / card.multiprocessors / card.frequency_hz / 2),
            frequency_hz=card.frequency_hz,
            l1_bytes=card.shared_bytes,
            l2_bytes=card.l2_bytes,
            l3_bytes=card.l2_bytes,
            dram_bytes_per_s=card.dram_bytes_per_s,
            bf16_dot=card.has_bfloat16,
        )

    @property
    def card(self) -> Card | None:
        """The card's constants; None for a CPU or a card that is not in the table."""
        return CARDS.get(str(dict(self.attrs).get("model", "")))

    @property
    def mcpu(self) -> str:
        return str(dict(self.attrs).get("mcpu", ""))

    @property
    def is_x86(self) -> bool:
        """Whether it is an x86 of the tables."""
        named = self.mcpu in BY_NAME and self.mcpu != GENERIC.mcpu
        return self.kind == "llvm" and named

    def lanes(self, dtype: str) -> int:
        """Elements of ``dtype`` in one vector register."""
        return self.vector_bytes // ITEMSIZE[dtype]

    def peak_flops(self, dtype: str, threads: int | None = None) -> float:
        """Operations per second (an FMA is two); 16-bit types are float32's but for bf16 dots."""
        if (card := self.card) is not None:
            return card.peak_flops(dtype)
        wide = dtype == "bfloat16" and self.bf16_dot
        lanes = self.lanes(dtype if wide or dtype == "float64" else "float32")
        workers = min(threads or self.cores, self.cores)
        return 2.0 * lanes * self.fma_per_cycle * self.frequency_hz * workers

    def tvm_target(self) -> dict[str, Any]:
        """The dict form that TVM's ``Target`` takes."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self.attrs}

    def to_json(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "attrs": self.tvm_target()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TargetSpec:
        """Inverse of ``to_json``. Raises ``ValueError`` on anything that is not a target."""
        try:
            return TargetSpec(**{**data, "attrs": _canonical(data["attrs"])})
        except (TypeError, KeyError, AttributeError) as err:
            raise ValueError(f"not a target: {err}") from err

    def key(self) -> str:
        """The text that names this target in cache keys: what decides code, not what ranks it."""
        return json.dumps(self.tvm_target(), sort_keys=True, separators=(",", ":"))


def _cpu_spec(
    attrs: Mapping[str, Any], model: CpuModel, probe: CpuProbe, threads: int | None
) -> TargetSpec:
    cores = max(1, min(probe.physical_cores, probe.usable_cores))
    defaults: dict[str, Any] = {"num-cores": threads or cores}
    arm = probe.machine in ("aarch64", "arm64")
    if arm:
        defaults["mtriple"] = _AARCH64_TRIPLES.get(platform.system(), "aarch64-linux-gnu")
        if "asimddp" in probe.flags:
            defaults["mattr"] = ["+dotprod"]
    l2_bytes = probe.l2_bytes or 512 << 10
    return TargetSpec(
        kind="llvm",
        attrs=_canonical({**defaults, **attrs}),
        cores=cores,
        vector_bytes=model.vector_bytes,
        vector_registers=model.vector_registers,
        fma_per_cycle=model.fma_per_cycle,
        frequency_hz=probe.max_frequency_hz or model.frequency_hz,
        l1_bytes=probe.l1_bytes or 32 << 10,
        l2_bytes=l2_bytes,
        l3_bytes=probe.l3_bytes or l2_bytes * cores,
        dram_bytes_per_s=model.core_bytes_per_s * min(cores, 2),
        bf16_dot=_has("avx512_bf16", model, attrs),
        bf16_tiles=model.tiles and probe.flags >= {"amx_tile", "amx_bf16"},
        byte_dot=_has("avx512_vnni", model, attrs) or "+dotprod" in _features(attrs, defaults),
        bf16_dot_fmas=model.dot_fmas,
        float16=arm or _has("f16c", model, attrs),
        reads_ahead=model.reads_ahead,
    )


def _features(attrs: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sequence[str]:
    """What a target adds to its ``mcpu``."""
    found: Sequence[str] = attrs.get("mattr", defaults.get("mattr", ()))
    return found


def _has(flag: str, model: CpuModel, attrs: Mapping[str, Any]) -> bool:
    """Whether code for ``model`` may use instructions, which ``mattr`` may take away."""
    return flag in model.needs and f"-{flag.replace('_', '')}" not in attrs.get("mattr", ())


@cache
def tiles_allowed() -> bool:
    """Ask Linux, once per process, for the tile registers of AMX: without that their use is fatal.

    Covers every thread of the process. False where the CPU or the kernel does not have them.
    """
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(arch_prctl, request_permission, tile_data)) == 0


def _card_named(target: Mapping[str, Any]) -> Card:
    """The card that a target of kind ``cuda`` names."""
    card = CARDS.get(str(target.get("model", "")).lower())
    extra = sorted(set(target) - {"kind", "model", "arch"})
    if card is None or extra or target.get("arch", card.arch) != card.arch:
        problem = f"a GPU is named by its model, one of {', '.join(CARDS)}, not {dict(target)}"
        raise OptionError("target", problem)
    return card


def _canonical(attrs: Mapping[str, Any]) -> tuple[tuple[str, Attr], ...]:
    return tuple(
        (k, tuple(v) if isinstance(v, (list, tuple)) else v) for k, v in sorted(attrs.items())
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


@cache
def _probed(root: Path) -> CpuProbe:
    """What does not change, read once: nine files, at each of several looks a capture."""
    cpus = _cpuinfo(root / "proc/cpuinfo")
    first = cpus[0] if cpus else {}
    logical = len(cpus) or os.cpu_count() or 1
    cores = {(c["physical id"], c["core id"]) for c in cpus if "core id" in c}
    sysfs = root / "sys/devices/system/cpu/cpu0"
    caches = _cache_sizes(sysfs / "cache")
    return CpuProbe(
        vendor=first.get("vendor_id", first.get("CPU implementer", "")),
        name=first.get("model name", "") or platform.processor() or platform.machine(),
        family=_number(first.get("cpu family", "")),
        model=_number(first.get("model", "")),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        physical_cores=len(cores) or logical,
        logical_cores=logical,
        usable_cores=logical,
        max_frequency_hz=1e3 * _number(_text(sysfs / "cpufreq/cpuinfo_max_freq")),
        l1_bytes=caches.get(1, 0),
        l2_bytes=caches.get(2, 0),
        l3_bytes=caches.get(3, 0),
        machine=platform.machine().lower(),
    )


def _cpuinfo(path: Path) -> list[dict[str, str]]:
    """One dict for each logical processor."""
    cpus: list[dict[str, str]] = []
    for block in _text(path).split("\n\n"):
        rows = (line.partition(":") for line in block.splitlines() if ":" in line)
        cpu = {key.strip(): value.strip() for key, _, value in rows}
        if "processor" in cpu:
            cpus.append(cpu)
    return cpus


def _cache_sizes(folder: Path) -> dict[int, int]:
    """Bytes of the data or unified cache of each level."""
    sizes: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        text, level = _text(index / "size"), _number(_text(index / "level"))
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
        if level and _text(index / "type") in ("Data", "Unified"):
            sizes[level] = _number(text.rstrip("KkMm")) * unit
    return sizes
