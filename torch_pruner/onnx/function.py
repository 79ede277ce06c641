"""An ONNX model as a function of torch tensors, compiled for every set of shapes it meets.

For new shapes the model is traced once: the interpreter runs on fake tensors while torch records
ATen operators, and ``torch.compile(backend="pruner")`` takes it from there, with the partitions,
tasks and cache that any module has. Where shapes depend on the integers in short inputs, it is
compiled for those integers. A model whose shapes depend on more (NonZero, loops over data) cannot
be traced; it runs operator by operator, with one warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from torch_pruner import log
from torch_pruner.config import Config
from torch_pruner.onnx.interpreter import Interpreter, Value, array_of, tensor_of
from torch_pruner.onnx.load import Model, load
from torch_pruner.onnx.operators import DataDependentError
from torch_pruner.onnx.operators.types import torch_dtype

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from onnx import ModelProto

_log = log.logger(__name__)
MAX_SHAPES = 256  # sets of shapes that are compiled; any more run operator by operator
SHAPE_NUMEL = 64  # so few numbers may be shapes, axes, limits or scales

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def compile(  # noqa: A001  the interface's name
    source: str | os.PathLike[str] | bytes | ModelProto,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> OnnxFunction:
    """A callable on torch tensors; ``mode`` and ``options`` are the backend's.

    Raises:
        UnsupportedModel: The model is damaged, too large, or uses operators that are not known.
        OptionError: An option is unknown or has a wrong value.
    """
    Config.from_options(mode, options)
    return OnnxFunction(load(source), mode, options)


class OnnxFunction:
    """Call it with tensors in the order of ``inputs``, or by name. Returns a tensor, or a tuple in
    the order of ``outputs``."""

    def __init__(
        self, model: Model, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.inputs, self.outputs = model.inputs, model.outputs
        self._mode, self._options = mode, dict(options or {})
        self._interpreter = Interpreter(model.opset, model.functions, model.name)
        self._weights: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, Value] = {}
        for name, array in model.weights.items():
            if array.dtype.kind in "iub" and array.size <= SHAPE_NUMEL and array.ndim <= 1:
                self._numbers[name] = Value.of(array)
            else:
                self._weights[name] = tensor_of(array)
        self._arrays = {name: model.weights[name] for name in self._weights}
        self._compiled: dict[tuple[Signature, Any], Callable[..., Any] | None] = {}
        self._fixed: dict[Signature, frozenset[int]] = {}  # inputs that count as numbers

    def __call__(self, *args: Any, **named: Any) -> Any:
        values = self._bound(args, named)
        plain = all(isinstance(v, torch.Tensor) for v in values)
        results = self._call(values) if plain else self.eager(values)
        return results[0] if len(self.outputs) == 1 else tuple(results)

    def _bound(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        unknown = set(named) - set(self.inputs)
        if unknown or len(args) > len(self.inputs):
            raise TypeError(
                f"inputs are {', '.join(self.inputs)}; got {len(args)} and {sorted(named)}"
            )
        given = dict(zip(self.inputs, args, strict=False)) | dict(named)
        missing = [n for n in self.inputs if n not in given]
        if missing:
            raise TypeError(f"inputs are missing: {', '.join(missing)}")
        return [given[n] for n in self.inputs]

    def _call(self, values: Sequence[torch.Tensor]) -> Sequence[Any]:
        shapes = tuple((tuple(v.shape), v.dtype) for v in values)
        fixed = self._fixed.get(shapes, frozenset())
        key = shapes, tuple(tuple(values[k].reshape(-1).tolist()) for k in sorted(fixed))
        if key not in self._compiled:
            room = len(self._compiled) < MAX_SHAPES
            self._compiled[key] = self._specialised(values, fixed) if room else None
            if self._fixed.get(shapes, frozenset()) != fixed:
                return self._call(values)  # by the numbers of some inputs, it turned out
        compiled = self._compiled[key]
        if compiled is None:
            return self.eager(values)
        return list(compiled(*(v for k, v in enumerate(values) if k not in fixed)))

    def eager(self, values: Sequence[Any]) -> list[Any]:
        """The outputs by torch's operators, one after another. Takes sequences (lists) as well."""
        env = self._known(list(self._weights.values()))
        env |= dict(zip(self.inputs, map(_value, values), strict=True))
        with torch.no_grad():
            self._interpreter.run(self.model.graph, env)
            return [_result(env[name]) for name in self.outputs]

    def examples(self, batch: int, other: int) -> tuple[torch.Tensor, ...]:
        """Made-up inputs: ``batch`` for a dynamic first axis, ``other`` for any other dynamic one.

        Integers are zeros and ones, which most tables have rows for.
        """
        generator = torch.Generator().manual_seed(0)
        made = []
        for info in self.model.graph.input:
            if info.name not in self.inputs:
                continue
            kind = info.type.tensor_type
            shape = [d.dim_value or (other if k else batch) for k, d in enumerate(kind.shape.dim)]
            dtype = torch_dtype(kind.elem_type)
            floating = dtype.is_floating_point
            values = (
                torch.randn(shape, generator=generator)
                if floating
                else torch.randint(0, 2, shape, generator=generator)
            )
            made.append(values.to(dtype))
        return tuple(made)

    def traced(
        self, values: Sequence[torch.Tensor], fixed: frozenset[int] = frozenset()
    ) -> fx.GraphModule:
        """The model for these shapes as ATen operators; weights are parameters.

        Inputs at the positions ``fixed`` count as the numbers they are, and are none of the
        module's.

        Raises:
            DataDependentError: It needs to know more than shapes.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        names = list(self._weights)
        free = [k for k in range(len(values)) if k not in fixed]
        numbers = {self.inputs[k]: Value.of(array_of(values[k])) for k in fixed}

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            env = self._known(tensors[: len(names)])
            env |= numbers
            rest = zip(free, tensors[len(names) :], strict=True)
            env |= {self.inputs[k]: Value(device=t) for k, t in rest}
            self._interpreter.run(self.model.graph, env)
            results = [env[name] for name in self.outputs]
            if any(r is None or r.items is not None for r in results):
                raise DataDependentError("an output is a sequence, or absent")
            return [r.tensor() for r in results if r is not None]

        with torch.no_grad():
            weights = [self._weights[n] for n in names]
            tracer = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
            gm = tracer(*weights, *(values[k] for k in free))
        return _with_parameters(gm, weights)

    def _known(self, weights: Sequence[torch.Tensor]) -> dict[str, Value | None]:
        """What is known before any input: numbers, and weights, of which few are numbers, too."""
        env: dict[str, Value | None] = dict(self._numbers)
        for (name, array), tensor in zip(self._arrays.items(), weights, strict=True):
            few = array.size <= SHAPE_NUMEL and array.dtype.kind in "iubf"
            env[name] = Value(device=tensor, host=array if few else None)
        return env

    def _specialised(
        self, values: Sequence[torch.Tensor], fixed: frozenset[int]
    ) -> Callable[..., Any] | None:
        """A compiled module; None where there can be none, or where inputs should be fixed first,
        which is then noted."""
        try:
            module = self.traced(values, fixed)
        except DataDependentError as err:
            few = frozenset(k for k, v in enumerate(values) if _may_be_shape(v))
            if few != fixed:
                self._fixed[tuple((tuple(v.shape), v.dtype) for v in values)] = few
                return None
            message = "%s runs operator by operator: %s"
            log.warn_once(_log, f"onnx {self.model.name}", message, self.model.name, err)
            return None
        compiled: Callable[..., Any] = torch.compile(
            module, backend="pruner", dynamic=False, mode=self._mode, options=self._options or None
        )
        return compiled


def _may_be_shape(value: torch.Tensor) -> bool:
    return value.dim() <= 1 and value.numel() <= SHAPE_NUMEL and value.dtype in _NUMBERS


_NUMBERS = (torch.int64, torch.int32)


def _value(given: Any) -> Value | None:
    if given is None:
        return None
    if isinstance(given, (list, tuple)):
        return Value(items=[_value(v) for v in given])
    return Value(device=given)


def _result(value: Value | None) -> Any:
    if value is None:
        return None
    if value.items is not None:
        return [_result(v) for v in value.items]
    return value.tensor()


def _with_parameters(gm: fx.GraphModule, weights: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Its first placeholders become parameters, so that the compiler knows that they stay."""
    places = list(gm.graph.find_nodes(op="placeholder"))
    for k, (node, weight) in enumerate(zip(places, weights, strict=False)):
        name = f"weight{k}"
        setattr(gm, name, nn.Parameter(weight, requires_grad=False))
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(gm.graph.get_attr(name))
        gm.graph.erase_node(node)
    gm.recompile()
    return gm
