"""An ONNX model as a function of torch tensors, compiled for every set of shapes it meets.

For new shapes the model is traced once: the interpreter runs on fake tensors while torch records
ATen operators, and ``torch.compile(backend="pruner")`` takes it from there, with the partitions,
tasks and cache that any module has. Where shapes depend on the integers in short inputs, it is
compiled for those integers. A model whose shapes depend on more (NonZero, loops over data), or
whose loops are long, is compiled in pieces (``pieces.py``), with one warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_pruner import log
from torch_pruner.config import Config
from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx import tracing
from torch_pruner.onnx.boundary import unsupported
from torch_pruner.onnx.bounds import Memory, StepBudget, Trials, nbytes
from torch_pruner.onnx.interpreter import Derived, Interpreter
from torch_pruner.onnx.load import MAX_STEPS, Model, load
from torch_pruner.onnx.operators import DataDependentError
from torch_pruner.onnx.operators.types import torch_dtype
from torch_pruner.onnx.pieces import SHAPE_NUMEL, Pieces, Plan
from torch_pruner.onnx.tensors import elements
from torch_pruner.onnx.values import Env, OnnxValue, array_of, tensor_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from onnx import ModelProto
    from torch import fx

_log = log.logger(__name__)
MAX_SHAPES = 256  # sets of shapes that are compiled; any more run operator by operator

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

    Example:
        function = torch_pruner.onnx.compile("model.onnx", options={"effort": "quick"})
        y = function(x)
    """
    Config.from_options(mode, options)
    return OnnxFunction(load(source), mode, options)


class OnnxFunction:
    """Call it with tensors in the order of ``inputs``, or by name. Returns a tensor, or a tuple in
    the order of ``outputs``.

    Example:
        function = torch_pruner.onnx.compile("model.onnx")
        outputs = function(*function.examples(batch=1, other=16))
    """

    def __init__(
        self, model: Model, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.inputs, self.outputs = model.inputs, model.outputs
        self._mode, self._options = mode, dict(options or {})
        self._weights: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, OnnxValue] = {}
        for name, array in model.weights.items():
            if array.dtype.kind in "iub" and array.size <= SHAPE_NUMEL and array.ndim <= 1:
                self._numbers[name] = OnnxValue.of(array)
            else:
                self._weights[name] = tensor_of(array)
        self._arrays = {name: model.weights[name] for name in self._weights}
        self._compiled: dict[tuple[Signature, Any], Callable[..., Any] | None] = {}
        self._fixed: dict[Signature, frozenset[int]] = {}  # inputs that count as numbers
        self._plan = Plan(frozenset(map(id, self._weights.values())), self._compile)
        self._derived, self._trials = Derived(), Trials()

    def __call__(self, *args: Any, **named: Any) -> Any:
        values = self._bound(args, named)
        plain = all(isinstance(v, torch.Tensor) for v in values)
        with unsupported(self.model.name, "running it", DataDependentError):
            results = self._call(values) if plain else self._in_pieces(values)
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
            return self._in_pieces(values)
        return list(compiled(*(v for k, v in enumerate(values) if k not in fixed)))

    def eager(self, values: Sequence[Any]) -> list[Any]:
        """The outputs by torch's operators, one after another. Takes sequences (lists) as well.

        Raises:
            UnsupportedModel: An operator is not known or refuses its inputs, or the model takes
                more steps or memory than it may.
        """
        with unsupported(self.model.name, "running it", DataDependentError):
            run = Interpreter(self.model, self._budget(), self._memory(values), self._derived)
            return self._outputs(run, values)

    def _in_pieces(self, values: Sequence[Any]) -> list[Any]:
        """The outputs where the model is no single graph."""
        limits = self._budget(), self._memory(values)
        return self._outputs(Pieces(self.model, *limits, self._derived, self._plan), values)

    def _outputs(self, interpreter: Interpreter, values: Sequence[Any]) -> list[Any]:
        env = self._known(list(self._weights.values()))
        env |= dict(zip(self.inputs, map(_value, values), strict=True))
        with torch.no_grad():
            interpreter.run(self.model.graph, env)
            return [_result(env[name]) for name in self.outputs]

    def _budget(self) -> StepBudget:
        reason = f"more than {MAX_STEPS} nodes run in one call, a loop's at each of its steps"
        return StepBudget(MAX_STEPS, lambda: UnsupportedModel(self.model.name, reason))

    def _memory(self, values: Sequence[Any]) -> Memory:
        return Memory(self.model.name, nbytes([*self._weights.values(), *values]), self._trials)

    def examples(self, batch: int, other: int) -> tuple[torch.Tensor, ...]:
        """Made-up inputs: ``batch`` for a dynamic first axis, ``other`` for any other dynamic one.

        Integers are zeros and ones, which most tables have rows for.
        """
        generator = torch.Generator().manual_seed(0)
        made = []
        for name in self.inputs:
            kind = self.model.types[name]
            shape = [d or (other if k else batch) for k, d in enumerate(kind.shape)]
            dtype = torch_dtype(kind.element)
            count = elements(self.model.name, f"input {name!r}", shape)
            self._memory([]).afford(count * max(dtype.itemsize, 4))
            values = (
                torch.randn(shape, generator=generator)
                if dtype.is_floating_point
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
        names = list(self._weights)
        free = [k for k in range(len(values)) if k not in fixed]
        numbers = {self.inputs[k]: OnnxValue.of(array_of(values[k])) for k in fixed}
        memory, budget = self._memory(values), tracing.step_budget(self.model)

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            env = self._known(tensors[: len(names)])
            env |= numbers
            rest = zip(free, tensors[len(names) :], strict=True)
            env |= {self.inputs[k]: OnnxValue(device=t) for k, t in rest}
            plain = Interpreter(self.model, budget, memory, self._derived, tracing=True)
            plain.run(self.model.graph, env)
            results = [env[name] for name in self.outputs]
            if any(r is None or r.items is not None for r in results):
                raise DataDependentError("an output is a sequence, or absent")
            return [r.tensor() for r in results if r is not None]

        weights = [self._weights[n] for n in names]
        return tracing.record(run, weights, [values[k] for k in free], memory)

    def _known(self, weights: Sequence[torch.Tensor]) -> Env:
        """What is known before any input: numbers, and weights, of which few are numbers, too."""
        env: Env = dict(self._numbers)
        for (name, array), tensor in zip(self._arrays.items(), weights, strict=True):
            few = array.size <= SHAPE_NUMEL and array.dtype.kind in "iubf"
            env[name] = OnnxValue(device=tensor, host=array if few else None)
        return env

    def _specialised(
        self, values: Sequence[torch.Tensor], fixed: frozenset[int]
    ) -> Callable[..., Any] | None:
        """A compiled module; None where there can be none, or where inputs should be fixed first,
        which is then noted."""
        try:
            module = self.traced(values, fixed)
        except (DataDependentError, UnsupportedModel) as err:
            few = frozenset(k for k, v in enumerate(values) if _may_be_shape(v))
            if few != fixed:
                self._fixed[tuple((tuple(v.shape), v.dtype) for v in values)] = few
                return None
            message = "%s is compiled in pieces; what depends on numbers operator by operator: %s"
            log.warn_once(_log, f"onnx {self.model.name}", message, self.model.name, err)
            return None
        return self._compile(module)

    def _compile(self, module: torch.nn.Module) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            module, backend="pruner", dynamic=False, mode=self._mode, options=self._options or None
        )
        return compiled


def _may_be_shape(value: torch.Tensor) -> bool:
    return value.dim() <= 1 and value.numel() <= SHAPE_NUMEL and value.dtype in _NUMBERS


_NUMBERS = (torch.int64, torch.int32)


def _value(given: Any) -> OnnxValue | None:
    if given is None:
        return None
    if isinstance(given, (list, tuple)):
        return OnnxValue(items=[_value(v) for v in given])
    return OnnxValue(device=given)


def _result(value: OnnxValue | None) -> Any:
    if value is None:
        return None
    if value.items is not None:
        return [_result(v) for v in value.items]
    return value.tensor()
