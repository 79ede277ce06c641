"""Identities of what the cache holds.

A key is a list of named fields; its digest is the sha256 of their canonical JSON. Anything that can
change the code that is generated, or how fast it runs, is a field. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

MAX_DEPTH: Final = 64
_INT_BOUND: Final = 1 << 63  # sqlite's integers, and those of a kernel
_INT_DIGITS: Final = 20
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no blanks, ASCII. NaN raises ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_object(text: str) -> dict[str, Any]:
    """Parse JSON that has to be an object. Damage raises ValueError.

    So does what ``canonical_json`` cannot have written or nobody can keep: NaN and infinities,
    integers of more than 64 bits, text that has no UTF-8 form, and what is nested too deeply.
    """
    try:
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_float, parse_int=_int, strict=True
        )
    except RecursionError as err:
        raise ValueError("JSON is nested too deeply") from err
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")  # noqa: TRY004
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"JSON is nested more than {MAX_DEPTH} times")
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # lone ones raise UnicodeEncodeError
    return value


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        if (depth := depth + 1) > MAX_DEPTH:
            return True
        level = [v for held in level for v in (held.values() if isinstance(held, dict) else held)]
    return False


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number out of range: {text[:24]}")
    return value


def _int(text: str) -> int:
    value = int(text) if len(text) <= _INT_DIGITS else _INT_BOUND
    if not -_INT_BOUND <= value < _INT_BOUND:
        raise ValueError(f"a number out of range: {text[:24]}")
    return value


def is_number(value: object) -> bool:
    """Whether ``value`` is a number that a float can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]


def is_digest(text: object) -> bool:
    """Whether ``text`` is the lower-case hexadecimal form of a sha256."""
    return isinstance(text, str) and len(text) == 64 and not set(text) - set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class _Key:
    """The base of both keys: canonical JSON both ways, a digest, the difference of two keys."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """The inverse of ``to_json``. Missing, unknown or ill-typed fields raise ValueError."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a key is a JSON object, not {type(data).__name__}")  # noqa: TRY004
        kinds = {field.name: str(field.type) for field in fields(cls)}
        if set(data) != set(kinds):
            raise ValueError(f"key fields are {sorted(kinds)}, found {sorted(map(str, data))}")
        return cls(**{name: _field(name, kind, data[name]) for name, kind in kinds.items()})

    def digest(self) -> str:
        """The sha256 of the canonical JSON; the same in every process and on every machine."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def diff(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Each differing field with (my value, the other's), in the order of the fields."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}


@dataclass(frozen=True, slots=True)
class KernelKey(_Key):
    """Identity of one tuned kernel. Two keys are equal iff the same schedule is the right answer
    for both.

    Attributes:
        workload: digest of the kernel graph.
        target: canonical JSON of the TVM target dict.
        device: the measuring device (not this host, when measuring goes over RPC).
        threads: CPU threads the kernel runs on.
        numerics: canonical JSON of the flags that change results (``fast_math``, ...).
        codegen: versions of what generates the code, for example ``tvm 0.27.0 + codegen 1``.
    """

    workload: str
    target: str
    device: str
    threads: int
    numerics: str
    codegen: str


@dataclass(frozen=True, slots=True)
class GraphKey(_Key):
    """Identity of what is kept of one graph: of a library, a captured program, a verdict.

    Attributes:
        graph: digest of the graph, with whatever else the artifact depends on.
        kernels: the workloads of its kernels, in a library's key each with the digest of its
            decisions (``workload:decisions``); empty before the graph is cut into kernels.
        target, device, threads, numerics, codegen: as in ``KernelKey``.

    Tuning a kernel anew changes the key, so a stale library cannot be reached.
    """

    graph: str
    kernels: tuple[str, ...]
    target: str
    device: str
    threads: int
    numerics: str
    codegen: str


def _field(name: str, kind: str, value: object) -> str | int | tuple[str, ...]:
    """Check one field of a key that was read from JSON."""
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind.startswith("tuple") and isinstance(value, list | tuple):
        items = [item for item in value if isinstance(item, str)]
        if len(items) == len(value):
            return tuple(items)
    raise ValueError(f"key field {name!r} is not of type {kind}: {value!r}")
