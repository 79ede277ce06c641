"""A ``Program`` as bytes and back: what rides in torch's own caches.

JSON and nothing else: regions as graphs of the IR, eager steps as lists of torch's operators by
name. Kernels are not in it; they are looked up in the kernel store when the program is built.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torch_pruner.dynamo.lower.aten.demand import KINDS, Range
from torch_pruner.dynamo.lower.bounds import IndexCheck
from torch_pruner.dynamo.lower.program import Program, ProgramStep, RegionStep
from torch_pruner.dynamo.lower.tensors import TensorSpec
from torch_pruner.graph.ir import Graph
from torch_pruner.report import OpFallback
from torch_pruner.versions import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx.node import Argument, Target

    from torch_pruner.dynamo.lower.calls import Json

FORMAT = 6
_KINDS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_PLAIN: Mapping[str, Callable[..., object]] = {
    f"operator.{f.__name__}": f for f in (operator.getitem, operator.add, operator.sub)
}


class UnsavableError(ValueError):
    """Something in a program has no text: a tensor, a submodule, a symbolic number."""


def dumps(program: Program, source: str) -> bytes:
    """The bytes of a program that ``source`` is the identity of.

    Raises:
        UnsavableError: The program cannot be written down.
    """
    if program.constants:
        raise UnsavableError("a constant tensor")
    data = {
        "format": FORMAT,
        "source": source,
        "steps": [
            [_step(step.does), list(step.reads), list(step.writes), list(step.dead)]
            for step in program.steps
        ],
        "values": program.n_values,
        "outputs": [[index, _encoded(value, {})] for index, value in program.outputs],
        "counts": [
            program.ops_total,
            program.ops_compiled,
            program.flops_total,
            program.flops_compiled,
        ],
        "device": str(program.device),
        "static": list(program.static),
        "unrecordable": program.unrecordable,
        "lasting": list(program.lasting),
        "refused": [[r.node, r.kind, r.detail] for r in program.refused],
    }
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def loads(data: bytes) -> Program:
    """Inverse of ``dumps``.

    Raises:
        ValueError: These are not the bytes of a program, or of another version's.
    """
    try:
        given = json.loads(data)
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']}, not {FORMAT}")
        total, compiled, flops, flops_compiled = map(int, given["counts"])
        return Program(
            tuple(
                ProgramStep(_read_step(does), _numbers(reads), _numbers(writes), _numbers(dead))
                for does, reads, writes, dead in given["steps"]
            ),
            int(given["values"]),
            {},
            tuple((int(index), _decoded(value, ())) for index, value in given["outputs"]),
            total,
            compiled,
            flops,
            flops_compiled,
            tuple(OpFallback(*map(str, row)) for row in given["refused"]),
            torch.device(str(given["device"])),
            _numbers(given["static"]),
            str(given["unrecordable"]),
            _numbers(given["lasting"]),
        )
    except (TypeError, KeyError, AttributeError, IndexError, RuntimeError) as err:
        raise ValueError(f"not a saved program: {err!r}") from err


_CODE = ("dynamo", "devices", "graph")  # folders of the package


@functools.cache
def version() -> str:
    """What the bytes of a graph depend on beside the graph: the code that makes and reads them."""
    package = Path(__file__).parents[2]
    files = (path for name in _CODE for path in package.joinpath(name).rglob("*.py"))
    digest = hashlib.sha256(f"{FORMAT}".encode())
    try:
        for path in sorted(files):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    except OSError:  # installed without sources
        digest.update(str(installed_version("torch-pruner")).encode())
    return digest.hexdigest()[:16]


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _step(does: RegionStep | fx.GraphModule) -> dict[str, Json]:
    if isinstance(does, RegionStep):
        return {
            "graph": does.graph.to_json(),
            "inputs": [_spec(s) for s in does.inputs],
            "outputs": [_spec(s) for s in does.outputs],
            "checks": [[c.input, c.ignored, list(c.added), *_range(c.range)] for c in does.checks],
            "flags": [_range(flag) for flag in does.flags],
        }
    index: dict[fx.Node, int] = {}
    rows: list[Json] = []
    results: Json = None
    for node in does.graph.nodes:
        if node.op == "output":
            results = _encoded(node.args[0], index)
            continue
        if node.op == "placeholder":
            rows.append(node.name)
        elif node.op == "call_function":
            arguments = [_encoded(node.args, index), _encoded(dict(node.kwargs), index)]
            rows.append([_name(node.target), *arguments])
        else:
            raise UnsavableError(f"{node.op} {node.target}")
        index[node] = len(index)
    return {"eager": rows, "results": results}


def _read_step(given: Mapping[str, Any]) -> RegionStep | fx.GraphModule:
    if "graph" in given:
        return RegionStep(
            Graph.from_json(given["graph"]),
            tuple(_read_spec(row) for row in given["inputs"]),
            tuple(_read_spec(row) for row in given["outputs"]),
            tuple(
                IndexCheck(int(place), _read_range(*row), ignored, (int(added[0]), int(added[1])))
                for place, ignored, added, *row in given["checks"]
            ),
            tuple(_read_range(*row) for row in given["flags"]),
        )
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for row in given["eager"]:
        if isinstance(row, str):
            nodes.append(graph.placeholder(row))
        else:
            name, args, kwargs = row
            arguments = tuple(_decoded(args, nodes)), _decoded(kwargs, nodes)
            nodes.append(graph.call_function(_operator(name), *arguments))
    graph.output(tuple(_decoded(given["results"], nodes)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _range(of: Range) -> list[Json]:
    return [of.low, of.high, of.kind, of.axis, of.rank]


def _read_range(low: int, high: int, kind: str, axis: int, rank: int) -> Range:
    if kind not in KINDS:
        raise ValueError(f"no index check {kind!r}")
    return Range(int(low), int(high), kind, int(axis), int(rank))


def _spec(spec: TensorSpec) -> list[Json]:
    return [list(spec.shape), list(spec.strides), str(spec.dtype).removeprefix("torch.")]


def _read_spec(row: Sequence[Any]) -> TensorSpec:
    shape, strides, dtype = row
    return TensorSpec.make(_numbers(shape), _numbers(strides), _named(dtype, torch.dtype))


def _named(name: str, kind: type) -> Any:
    """The member of ``torch`` of this name, if it is of this kind."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no {kind.__name__} {name!r}")  # noqa: TRY004  of damage
    return found


def _name(target: Target) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    for name, function in _PLAIN.items():
        if target is function:
            return name
    raise UnsavableError(f"the operator {target}")


def _operator(name: str) -> Callable[..., object]:
    """An operator of torch by its full name, "aten.add.Tensor"."""
    if name in _PLAIN:
        return _PLAIN[name]
    namespace, packet, overload = str(name).split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"no operator {name!r}")  # noqa: TRY004  of damage
    return found


def _encoded(value: Argument, index: Mapping[fx.Node, int]) -> Json:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return [_encoded(v, index) for v in value]
    if isinstance(value, dict):
        return {"dict": {str(k): _encoded(v, index) for k, v in value.items()}}
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise UnsavableError(f"a {type(value).__name__}")


def _decoded(value: Any, nodes: Sequence[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "dict":
        return {k: _decoded(v, nodes) for k, v in content.items()}
    if kind == "float":
        return float(content)
    if kind == "device":
        return torch.device(content)
    return _named(content, _KINDS[kind])
