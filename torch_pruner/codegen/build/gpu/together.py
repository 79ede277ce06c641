"""Calls of one kernel that do not wait for each other, as one launch.

Queries, keys and values of a layer are products of one shape: each alone leaves much of a card idle
and pays for a launch. A kernel that is launched for several calls takes the pointers of all of them
and reads its own by the second coordinate of its block ("horizontal fusion").
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch_pruner.codegen.build.gpu.image import Launch
    from torch_pruner.graph.memory import KernelCall, Place
    from torch_pruner.graph.signature import Signature

MOST = 16  # calls of a launch: their pointers must fit a kernel's parameters (4 KiB)
SOURCE = """
template <int N> struct torch_pruner_pointers {
  void* at[N];
};
"""
_HEAD = re.compile(
    r'extern "C" __global__ void (?P<bounds>__launch_bounds__\([^)]*\) )?(?P<name>\w+)'
    r"\((?P<parameters>[^)]*)\) \{"
)

Range = tuple[int, int, int]  # a slot of the table, and its first byte and the one after the last


def runs(
    calls: Sequence[KernelCall],
    signatures: Mapping[str, Signature],
    alone: Collection[str] = (),
) -> list[list[KernelCall]]:
    """The calls in their order, those that one launch may do together.

    ``signatures`` of kernels by name. Together are neighbours of one kernel, none of which writes
    what another reads or writes; kernels ``alone`` have a launch for each call.
    """
    found: list[list[KernelCall]] = []
    written: list[Range] = []
    read: list[Range] = []
    for call in calls:
        reads, writes = _ranges(call, signatures[call.kernel])
        alike = found and found[-1][0].kernel == call.kernel and len(found[-1]) < MOST
        alike = alike and call.kernel not in alone
        if alike and not (_meet(writes, read) or _meet(writes, written) or _meet(reads, written)):
            found[-1].append(call)
            read, written = read + reads, written + writes
        else:
            found.append([call])
            read, written = reads, writes
    return found


def _ranges(call: KernelCall, signature: Signature) -> tuple[list[Range], list[Range]]:
    buffers = (*signature.inputs, *signature.outputs, *signature.scratch)
    places = [_range(place, b.nbytes) for place, b in zip(call.args, buffers, strict=True)]
    return places[: len(signature.inputs)], places[len(signature.inputs) :]


def _range(place: Place, nbytes: int) -> Range:
    return place.slot, place.offset, place.offset + nbytes


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


def key(name: str, copies: int) -> str:
    """The name of a kernel that is launched for so many calls at once."""
    return f"{name}*{copies}" if copies > 1 else name


def launch_of(launch: Launch, copies: int, arguments: int) -> Launch:
    """The launch for ``copies`` calls, each of which has so many arguments, one after another."""
    parameters = [c * arguments + p for c in range(copies) for p in launch.parameters]
    symbol = f"{launch.symbol}_x{copies}"
    return replace(launch, symbol=symbol, parameters=tuple(parameters), copies=copies)


def with_copies(code: str, wanted: Mapping[str, Collection[int]]) -> str:
    """CUDA C with further kernels: of each symbol in ``wanted`` one for every number of calls."""
    parts = re.split(r'(?=^extern "C" __global__)', code, flags=re.MULTILINE)
    heads = [(part, _HEAD.match(part)) for part in parts]
    more = [
        _together(part, copies)
        for part, head in heads
        if head
        for copies in sorted(wanted.get(head["name"], ()))
    ]
    return (SOURCE if more else "") + "".join([*parts, *more])


def _together(definition: str, copies: int) -> str:
    head = _HEAD.match(definition)
    assert head is not None
    names = [p.strip().rpartition(" ") for p in head["parameters"].split(",")]
    own = "".join(
        f"  {kind} {name} = static_cast<{kind.partition('*')[0]}*>"
        f"(given.at[blockIdx.y * {len(names)} + {k}]);\n"
        for k, (kind, _, name) in enumerate(names)
    )
    given = f"const __grid_constant__ torch_pruner_pointers<{copies * len(names)}> given"
    bounds = head["bounds"] or ""
    opened = f'extern "C" __global__ void {bounds}{head["name"]}_x{copies}({given}) {{\n'
    return opened + own + definition[head.end() :].lstrip("\n")
