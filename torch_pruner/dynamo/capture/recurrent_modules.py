"""Has Dynamo trace recurrent modules for this backend, and for no other.

Dynamo leaves to eager whatever has an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` in it, unless
``torch._dynamo.config.allow_rnn`` is set, which counts for all backends of the process. So the two
places of Dynamo that meet such a module, and torch's function that it calls, ask here which backend
they trace for. Where gradients are recorded, or another thing is not what kernels are for, the
graph breaks at the call, and eager does it. A torch without these places does as it always did.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torch_pruner.dynamo.lower import recurrent_ops
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    F = TypeVar("F", bound=Callable[..., object])

_MARK = "_torch_pruner_traces_recurrent_modules"
# How Dynamo, and who calls it, wrap a backend.
_AROUND = ("_torchdynamo_orig_backend", "compiler_fn", "func", "__wrapped__")
_DEEPEST = 8
_MODULES = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
# Places among the arguments of torch's functions.
_HAS_BIASES, _DROPOUT, _TRAIN, _ARGUMENTS = 3, 5, 6, 9

_log = logger(__name__)


def traced(backend: F) -> F:
    """``backend``, for which Dynamo traces recurrent modules from now on."""
    setattr(backend, _MARK, True)
    _installed()
    return backend


def takes(module: torch.nn.Module) -> bool:
    """Whether a recurrent module is traced: one as it was made. Calls that are not compiled break
    the graph later, at torch's function."""
    plain = type(module) in _MODULES and not module._forward_pre_hooks
    return plain and not module._forward_hooks


def _is_ours(backend: object) -> bool:
    for _ in range(_DEEPEST):
        if backend is None or getattr(backend, _MARK, False):
            return backend is not None
        backend = next((b for n in _AROUND if (b := getattr(backend, n, None)) is not None), None)
    return False


@functools.cache
def _installed() -> bool:
    """Whether Dynamo asks here; it is made to, once."""
    try:
        from torch._dynamo.variables.builder import VariableBuilder
        from torch._dynamo.variables.constant import ConstantVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable as Function

        _ask_of_modules(VariableBuilder)
        _ask_of_functions(Function, ConstantVariable.create)
    except (ImportError, AttributeError) as err:
        _log.log(logging.INFO, "recurrent modules run in eager with torch %s: %s",
                 torch.__version__, err)  # fmt: skip
        return False
    return True


def _ask_of_modules(builder: Any) -> None:
    wrap, config = builder.wrap_module, torch._dynamo.config

    @functools.wraps(wrap)
    def wrap_module(self: Any, value: torch.nn.Module) -> object:
        if isinstance(value, _MODULES) and _traces_for_us(self.tx) and takes(value):
            with config.patch(allow_rnn=True):
                return wrap(self, value)
        return wrap(self, value)

    assert config.allow_rnn in (True, False)
    builder.wrap_module = wrap_module


def _ask_of_functions(function: Any, constant: Callable[[float], object]) -> None:
    call = function.call_function

    @functools.wraps(call)
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        found = recurrent_ops.operator_of(self.value)
        if found is not None and not kwargs and _traces_for_us(tx) and _takes(args):
            given = [*args]
            given[_DROPOUT] = constant(0.0)  # it has no effect; a number of its own may be a symbol
            return call(function(found), tx, given, kwargs)
        if found is not None and _traces_for_us(tx) and _is_of_module(tx):
            _break(found)
        return call(self, tx, args, kwargs)

    function.call_function = call_function


def _is_of_module(tx: Any) -> bool:
    """Whether what is called is called by a recurrent module that is traced since we ask for it."""
    code = getattr(tx, "f_code", None)
    of_module = getattr(code, "co_filename", None) == torch.nn.modules.rnn.__file__
    return of_module and not torch._dynamo.config.allow_rnn


def _break(found: torch._ops.OpOverload) -> None:
    """Break the graph at this call: eager does it, and what is around it is compiled."""
    torch._dynamo.exc.unimplemented(
        gb_type="Recurrent layer that eager runs",
        context=str(found),
        explanation="Gradients are recorded, or it is not of float32 on the CPU.",
        hints=[],
    )


def _traces_for_us(tx: Any) -> bool:
    output = getattr(tx, "output", None)
    return _is_ours(getattr(output, "compiler_fn", None))


def _takes(args: Sequence[Any]) -> bool:
    """Whether a function's arguments are those of the form for whole sequences, and it draws no
    random numbers."""
    if torch.is_grad_enabled() or len(args) != _ARGUMENTS:
        return False
    numbers = [a.as_python_constant() if a.is_python_constant() else None for a in args]
    # The other form has a list of weights where this one has a bool.
    if type(numbers[_HAS_BIASES]) is not bool or (numbers[_DROPOUT] != 0 and numbers[_TRAIN]):
        return False
    if any(n is None for k, n in enumerate(numbers) if k > _HAS_BIASES and k != _DROPOUT):
        return False
    fake = args[0].as_proxy().node.meta["example_value"]
    return bool(fake.device.type == "cpu" and fake.dtype == torch.float32)
