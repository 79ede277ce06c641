"""Damaged ONNX models: every one runs or is refused with ``UnsupportedModel``.

    python -m tests.suites.onnx_fuzz --jobs 2 --out docs/onnx.md      2000 models (an hour)
    python -m tests.suites.onnx_fuzz --match 0.0123                   the one of that name again

A model is one of ONNX's node tests (a test of every operator that has some), or one with loops,
branches, functions or external data, with a few bytes or fields changed: ``seed.number`` is its
name, and all that is random about it. It is read, runs operator by operator on inputs of the shapes
that it declares, and is traced; one in 25 is compiled and called. It may take 10 s of processor
time and 1 GiB of memory.
"""

from __future__ import annotations

import collections
import functools
import re
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.suites.isolated import Outcome, cell, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx

SEED, MODELS, COMPILED = 0, 2000, 25
MAX_SECONDS, MAX_BYTES = 10.0, 1 << 30
MAX_SEED_BYTES = 20_000  # of a model that is changed
_INTS = (
    -(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 64, 99, 255, 4096, 10**6, 2**31 - 1, 2**31, 2**32,
    10**9, 10**12, 2**62, 2**63 - 1,
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "y", "a\0b", "x" * 5000, "../secret", "/etc/passwd", "data", "NOTSET", "linear")


@functools.cache
def seeds() -> list[tuple[str, onnx.ModelProto]]:
    """Models by name, in order. Short inputs of integers are weights, to be changed as well."""
    return [*_of_operators(), *_of_graphs()]


def _of_operators() -> Iterator[tuple[str, onnx.ModelProto]]:
    from tests.suites import onnx_nodes

    found = set()
    for case in onnx_nodes.cases():
        proto = case.model
        kinds = {n.op_type for n in proto.graph.node}
        tensors = all(i.type.HasField("tensor_type") for i in proto.graph.input)
        if not kinds - found or not tensors or onnx_nodes.reason_to_leave_out(case):
            continue
        if proto.ByteSize() > MAX_SEED_BYTES:
            continue
        found |= kinds
        yield case.name, _with_numbers(proto, case.data_sets[0][0])


def _with_numbers(proto: onnx.ModelProto, values: Sequence[Any]) -> onnx.ModelProto:
    import onnx
    from onnx import numpy_helper

    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for info, value in zip(proto.graph.input, values, strict=False):
        array = np.asarray(value) if not isinstance(value, (list, tuple)) else None
        if array is not None and array.dtype.kind in "iub" and array.size <= 16:
            made.graph.initializer.append(numpy_helper.from_array(array, info.name))
    return made


def _of_graphs() -> Iterator[tuple[str, onnx.ModelProto]]:
    from onnx import helper

    from tests.unit.onnx import hostile, test_hostile

    branch = test_hostile.with_branch
    value = hostile.number("v", np.ones((4, 8)), np.float32)
    for k in range(3):  # as often as all of them together are rare
        yield f"loop of {3 + k}", hostile.loop(3 + k)
        yield f"chain of {3 + k}", hostile.chain(3 + k)
        yield "branch", branch(value)
        yield "function", test_hostile.with_function(value)
        for place in test_hostile.PLACES:
            yield f"external, {place.__name__}", place(test_hostile.weight())
        yield "loop without end", hostile.loop(None)
        nodes = [
            helper.make_node("Reshape", ["x", "k"], ["r"]),
            helper.make_node("Tile", ["r", "t"], ["y"]),
        ]
        numbers = [hostile.number("k", [8, 4]), hostile.number("t", [2, 2])]
        yield "shapes", hostile.model(nodes, numbers)


def changed(name: str) -> tuple[str, bytes]:
    """The model of that name: what it was, and its bytes."""
    seed, number = map(int, name.split("."))
    random = np.random.default_rng([seed, number])
    models = seeds()
    origin, proto = models[number % len(models)]
    if random.random() < 0.3:
        return origin, _bytes_changed(random, bytearray(proto.SerializeToString()))
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for _ in range(int(random.integers(1, 3))):
        _field_changed(random, made)
    return origin, made.SerializeToString()


def _bytes_changed(random: np.random.Generator, data: bytearray) -> bytes:
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(len(data)))
        match int(random.integers(20)):
            case 0:
                del data[at : at + int(random.integers(1, 9))]
            case 1:
                data[at:at] = random.bytes(int(random.integers(1, 9)))
            case 2:
                data[at:at] = data[at : at + 16]
            case _:
                data[at] = int(random.integers(256))
    return bytes(data if random.random() < 0.95 else data[: int(random.integers(len(data)))])


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if hasattr(value, "extend") else (value,):
                yield from _messages(inner)


def _field_changed(random: np.random.Generator, proto: Any) -> None:
    """One field of one message, somewhere; mostly of what a model computes with."""
    messages = list(_messages(proto))
    if random.random() < 0.8:
        likely = ("NodeProto", "AttributeProto", "TensorProto", "Dimension")
        messages = [m for m in messages if type(m).__name__ in likely] or messages
    message = messages[int(random.integers(len(messages)))]
    if type(message).__name__ == "TensorProto" and message.raw_data and random.random() < 0.7:
        _numbers_changed(random, message)
        return
    # Names and kinds less often than values: without them little is run.
    fields = [f for f, _ in message.ListFields() if f.name not in _KINDS or random.random() < 0.2]
    if random.random() < 0.1:
        fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = fields[int(random.integers(len(fields)))]
    value = getattr(message, field.name)
    if hasattr(value, "append"):
        _list_changed(random, value, field)
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        _set(message, field.name, _scalar(random, field, value))


def _set(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):  # out of the field's range
        message.ClearField(name)


def _numbers_changed(random: np.random.Generator, tensor: Any) -> None:
    """Of a tensor of 64-bit integers one becomes another; of any other, bytes."""
    data = bytearray(tensor.raw_data)
    if tensor.data_type == 7 and len(data) >= 8:
        array = np.frombuffer(bytes(data), dtype=np.int64).copy()
        array[int(random.integers(len(array)))] = _INTS[int(random.integers(len(_INTS)))]
        tensor.raw_data = array.tobytes()
    else:
        data[int(random.integers(len(data)))] = int(random.integers(256))
        tensor.raw_data = bytes(data)


def _list_changed(random: np.random.Generator, values: Any, field: Any) -> None:
    how = int(random.integers(4))
    if not values:
        if field.message_type is None:
            _append(values, _scalar(random, field, None))
        return
    at = int(random.integers(len(values)))
    if how == 0:
        del values[at]
    elif how == 1:
        values.append(values[at])
    elif field.message_type is not None:
        values[at].CopyFrom(values[int(random.integers(len(values)))])
    elif how == 2:
        _append(values, _scalar(random, field, values[at]))
    else:
        new = _scalar(random, field, values[at])
        try:
            values[at] = new
        except (TypeError, ValueError):
            del values[at]


def _append(values: Any, value: Any) -> None:
    try:
        values.append(value)
    except (TypeError, ValueError):
        return


def _scalar(random: np.random.Generator, field: Any, old: Any) -> Any:
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            return random.bytes(int(random.integers(12)))
        names = (*_TEXTS, *_OPERATORS)
        return names[int(random.integers(len(names)))]
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return _FLOATS[int(random.integers(len(_FLOATS)))]
    if kind == field.CPPTYPE_ENUM:
        return int(random.integers(0, 18))
    near = [old + 1, old - 1, -old] if isinstance(old, int) else []
    choices = (*_INTS, *near, *near)
    return choices[int(random.integers(len(choices)))]


_KINDS = ("name", "type", "op_type", "output", "domain", "data_type", "elem_type")
_OPERATORS = (
    "Add", "Concat", "ConstantOfShape", "Conv", "Einsum", "Expand", "Gather", "GatherND", "If",
    "Loop", "LSTM", "MatMul", "MaxPool", "NonZero", "OneHot", "Pad", "Range", "Reshape", "Resize",
    "Scan", "ScatterND", "SequenceAt", "Slice", "Split", "Tile", "TopK", "Where",
)  # fmt: skip


def check(name: str) -> Outcome:
    """Reads, runs and traces one model within the limits; compiles some."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _checked(name)


def _checked(name: str) -> Outcome:
    import torch

    from torch_pruner.exc import PrunerError

    origin, data = changed(name)
    limits = _Limits()
    try:
        status, reason = "refused", "when read"
        with tempfile.TemporaryDirectory() as folder:
            function = _loaded(data, Path(folder))
        reason = "when run"
        _run(function, compiled=int(name.split(".")[1]) % COMPILED == 0)
        status, reason = "ran", ""
    except PrunerError as err:
        if "allocate memory" in str(err) or isinstance(err.__cause__, MemoryError):
            status, reason = "failed", f"memory: {err}"
    except Exception as err:  # whatever else a damaged model leads to is what is looked for
        status, reason = "failed", f"{type(err).__name__}: {err}"
    torch._dynamo.reset()
    if beyond := limits.beyond():
        status, reason = "failed", f"{beyond} ({status} {reason})"
    reason = f"{origin}: {reason}" if status == "failed" else reason
    return Outcome(name, status, reason[:300])


def _loaded(data: bytes, folder: Path) -> Any:
    """From a file with another one beside it."""
    from torch_pruner.onnx.function import OnnxFunction
    from torch_pruner.onnx.load import load

    path = folder / "model.onnx"
    path.write_bytes(data)
    (folder / "data").write_bytes(np.ones(1024, dtype=np.float32).tobytes())
    return OnnxFunction(load(path), None, {"effort": "none"})


def _run(function: Any, *, compiled: bool) -> None:
    from torch_pruner.onnx.operators import DataDependentError

    inputs = list(function.examples(2, 3))
    function.eager(inputs)
    if compiled:
        function(*inputs)
        return
    try:
        function.traced(inputs)
    except DataDependentError:
        return


class _Limits:
    """What one model took of this process. Addresses are limited, too, for it not to take all."""

    def __init__(self) -> None:
        _limit_addresses()
        Path("/proc/self/clear_refs").write_text("5")  # the largest size is counted from here
        self._bytes, self._seconds = _status("VmRSS"), time.process_time()

    def beyond(self) -> str:
        took = time.process_time() - self._seconds
        grew = _status("VmHWM") - self._bytes
        if took > MAX_SECONDS:
            return f"{took:.1f} s of processor time"
        return f"{grew >> 20} MiB of memory" if grew > MAX_BYTES else ""


@functools.cache
def _limit_addresses() -> None:
    seeds()
    import torch

    import torch_pruner.dynamo.backend  # noqa: F401  as large as it gets without a model

    torch.set_num_threads(1)
    most = _status("VmSize") + 8 * MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(kilobytes) << 10


def names() -> list[str]:
    return [f"{SEED}.{k:04d}" for k in range(MODELS)]


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown section."""
    count = collections.Counter(o.status for o in outcomes)
    when = collections.Counter(o.reason for o in outcomes if o.status == "refused")
    compiled = sum(int(o.name.split(".")[1]) % COMPILED == 0 for o in outcomes)
    yield (
        "Written by `python -m tests.suites.onnx_fuzz`: bytes and fields of small models change"
        f" ({len(seeds())} models, one or more of every operator that ONNX has a node test of; seed"
        f" {SEED})."
    )
    yield (
        f"Each is read, runs operator by operator and is traced; {compiled} of them are compiled."
        f" Limits: {MAX_SECONDS:g} s of processor time and {MAX_BYTES >> 20} MiB each."
    )
    yield ""
    yield "| models | ran | refused when read | refused when run | failed |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    yield (
        f"| {len(outcomes)} | {count['ran']} | {when['when read']} | {when['when run']} "
        f"| {count['failed']} |"
    )
    if count["failed"]:
        yield ""
        yield "| fails | reason |"
        yield "| --- | --- |"
        yield from (f"| {o.name} | {cell(o.reason)} |" for o in outcomes if o.status == "failed")


def main(arguments: list[str] | None = None) -> int:
    return command(
        "tests.suites.onnx_fuzz", __doc__, names, check, table, arguments,
        limit_s=600, section="Damaged models",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
