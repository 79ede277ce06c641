"""Graphs that were captured before are found by what Dynamo gives, and not captured again.

AOTAutograd turns Dynamo's graph into one of ATen operators, which takes longer than everything that
we do in a process that finds its kernels. The result depends on the graph, on what is known of its
inputs, and on some settings of torch: these are the key, and the ``Program`` that came out is the
entry, in the kernel store beside libraries (``compiler.captured``).

Only inference, and only where nothing is left for AOTAutograd to do at run time (``aot_metadata``):
nothing is written, nothing shares memory, no size is a symbol. A graph with anything in it that has
no plain text is not looked up: user's functions, operators other than torch's own, subgraphs.
"""

from __future__ import annotations

import hashlib
import json
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from torch_pruner import devices
from torch_pruner.dynamo.lower import recurrent_ops, serialization

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import EllipsisType

    from torch.fx.node import Argument, Target

    from torch_pruner.dynamo.lower.calls import Json, RuntimeValue

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Where functions live that do the same in every process with the same torch.
_MODULES = frozenset(("torch", "torch._C._nn", "torch.functional", "torch.nn.functional"))


class _NoTextError(ValueError):
    """Something in a graph has no text that says all there is to say of it."""


def of(gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue]) -> str | None:
    """A digest of all that the captured graph depends on; None: it has to be captured."""
    try:
        rows = [_settings(), *_rows(gm, example_inputs)]
        text = json.dumps(rows, separators=(",", ":"), allow_nan=False)
    except (_NoTextError, AttributeError, RuntimeError):  # or another version of torch
        return None
    return hashlib.sha256(
        f"{serialization.version()} {torch.__version__} {text}".encode()
    ).hexdigest()


def _settings() -> list[Json]:
    """What capturing depends on beside the graph. Raises ``_NoTextError`` if that is too much."""
    functorch, dynamo = torch._functorch.config, torch._dynamo.config
    # Both keep what a compilation gives, and want AOTAutograd's.
    if functorch.bundled_autograd_cache or getattr(dynamo, "caching_precompile", False):
        raise _NoTextError("torch keeps what is compiled")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _NoTextError("a transform of torch.func")
    if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        raise _NoTextError("a mode that sees every operator")
    kinds = ("cpu", "cuda")
    cuda: Any = torch.backends.cuda
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        [[torch.is_autocast_enabled(k), str(torch.get_autocast_dtype(k))] for k in kinds],
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        bool(torch.backends.mkldnn.enabled),
        devices.settings(),
        sorted((k, repr(v)) for k, v in functorch.save_config_portable().items()),
    ]


def _rows(gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue]) -> list[Json]:
    index: dict[fx.Node, int] = {}
    rows: list[Json] = []
    inputs = iter(example_inputs)
    memory: set[int] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            given = next(inputs, None)
            role = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
            rows.append(["in", str(role), _tensor(given, memory)])
        elif node.op in ("call_function", "call_method"):
            name = node.target if node.op == "call_method" else _function(node.target)
            rows.append([node.op, name, _text(node.args, index), _text(node.kwargs, index)])
        elif node.op == "output":
            rows.append(["out", _text(node.args, index)])
        else:
            raise _NoTextError(node.op)
        index[node] = len(index)
    if next(inputs, None) is not None:
        raise _NoTextError("more inputs than the graph takes")
    return rows


def _tensor(value: RuntimeValue, memory: set[int]) -> list[Json]:
    """What AOTAutograd knows of an input; ``memory``: the storages of those before it."""
    if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN_TENSORS:
        raise _NoTextError(f"a {type(value).__name__}")
    if value.layout is not torch.strided:
        raise _NoTextError(f"a {type(value).__name__}")
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    if any(type(n) is not int for n in numbers):
        raise _NoTextError("a size that is a symbol")
    if value.requires_grad and torch.is_grad_enabled():
        raise _NoTextError("gradients")
    storage = value.untyped_storage()._cdata
    if storage in memory:
        raise _NoTextError("inputs that share memory")
    memory.add(storage)
    flags = [value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference()]
    kind = isinstance(value, torch.nn.Parameter)
    return [str(value.dtype), str(value.device), value.ndim, numbers, flags, kind]


def _function(target: Target) -> str:
    """The name of one of torch's or Python's own functions."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "prims", recurrent_ops.NAMESPACE):
            raise _NoTextError(str(target))
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    for place in (module, "torch"):  # what is built in has no module
        owner: object = torch
        if place not in _MODULES:
            continue
        for part in place.split(".")[1:]:
            owner = getattr(owner, part, None)
        if getattr(owner, name, None) is target:
            return f"{place}.{name}"
    raise _NoTextError(f"the function {target}")


def _text(value: Argument | EllipsisType, index: Mapping[fx.Node, int]) -> Json:
    """Arguments as JSON; different ones differ."""
    if value is None or (isinstance(value, (int, str)) and type(value) in (bool, int, str)):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if isinstance(value, (tuple, list)):  # torch.Size, too
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_text(v, index) for v in value]}
    if isinstance(value, dict):
        if not all(type(k) is str for k in value):
            raise _NoTextError("a dict")
        return {"dict": [[k, _text(v, index)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_text(v, index) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, _NAMED):
        return {"torch": str(value)}
    raise _NoTextError(f"a {type(value).__name__}")
