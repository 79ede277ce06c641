"""How much one call of a model may run and hold, which a few bytes of a file decide otherwise."""

from __future__ import annotations

import functools
import math
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from torch_pruner.exc import UnsupportedModel
from torch_pruner.onnx.boundary import ERRORS
from torch_pruner.onnx.operators.registry import DataDependentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

FREE_BYTES = 256 << 20  # that a tensor may have, however small the model
GROWTH = 256  # times what a model and its inputs hold that one tensor may
_FEW = 64  # numbers that may decide on a size
_LARGEST_ELEMENT = 16  # bytes
_MAX_KNOWN = 20_000

# Operators whose results are no larger than what goes in.
_NO_LARGER = frozenset({
    "Abs", "Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot",
    "Cast", "CastLike", "Ceil", "Celu", "Compress", "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp",
    "Flatten", "Floor", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish",
    "Hardmax", "Identity", "IsInf", "IsNaN", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax",
    "Mish", "Neg", "Not", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round", "Selu", "Shape", "Sigmoid",
    "Sign", "Sin", "Sinh", "Size", "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt",
    "Squeeze", "Tan", "Tanh", "Transpose", "Unique", "Unsqueeze",
})  # fmt: skip
# Operators that say themselves what they are going to hold: a trial would take too many steps.
_COUNTED = frozenset({"GRU", "LSTM", "RNN"})
# Operators whose results are as large as some number says.
_BY_NUMBERS = frozenset({
    "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "EyeLike",
    "HammingWindow", "HannWindow", "MaxUnpool", "MelWeightMatrix", "Multinomial", "OneHot", "Pad",
    "RandomNormal", "RandomUniform", "Range", "Resize", "RoiAlign", "STFT", "Tile", "Upsample",
    "AffineGrid", "ConvTranspose", "Conv", "AveragePool", "MaxPool", "LpPool",
})  # fmt: skip


class StepBudget:
    """What is left of a number of node steps; ``error`` makes what is raised when none are."""

    __slots__ = ("_error", "left")

    def __init__(self, most: int, error: Callable[[], Exception]) -> None:
        self.left, self._error = most, error

    def take(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise self._error()

    def foresee(self, count: int) -> None:
        """Raises now what taking that many would raise later."""
        if count > self.left:
            raise self._error()


class Trials:
    """The largest tensor that each operator made of shapes it was tried on, for all calls of a
    model. One thread tries at a time."""

    def __init__(self) -> None:
        # With the owner of the key, for its id to stay its own.
        self.largest: dict[Any, tuple[object, int]] = {}
        self.lock = threading.Lock()

    @functools.cached_property
    def mode(self) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode(allow_non_fake_inputs=True)


class Memory:
    """Bounds one tensor of a model. ``held`` are the bytes of its weights and inputs."""

    def __init__(self, model: str, held: int, trials: Trials) -> None:
        self._model, self._trials = model, trials
        self.limit = min(max(FREE_BYTES, GROWTH * held), _physical())

    def afford(self, size: int) -> None:
        """Raises ``UnsupportedModel`` where a tensor has more bytes than one may."""
        if size > self.limit:
            reason = f"a tensor of {size} bytes, more than the {self.limit} that one may have here"
            fix = f"that is {GROWTH} times what the model and its inputs hold"
            raise UnsupportedModel(self._model, reason, fix)

    def afford_graph(self, gm: fx.GraphModule) -> None:
        """``afford`` for all that a traced graph computes."""
        for node in gm.graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor):
                    self.afford(_bytes(value))

    def try_out(
        self,
        owner: object,
        op: str,
        function: Callable[..., Any],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        """Runs ``function`` on tensors without storage first, if its results could be large.

        Once for each set of shapes and small contents. What else may be wrong with the call is for
        the call itself to find.
        """
        if op in _COUNTED:
            return
        if op not in _BY_NUMBERS and _harmless(op, [t for t in tensors if t is not None]):
            return
        key = (id(owner), *(_signature(t) for t in tensors))
        largest = self._trials.largest
        if key not in largest:
            if len(largest) > _MAX_KNOWN:
                largest = self._trials.largest = {}
            with self._trials.lock:
                largest[key] = owner, self._tried(function, tensors)
        self.afford(largest[key][1])

    def _tried(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor | None]) -> int:
        """Bytes of the largest tensor that ``function`` makes, as far as it gets."""
        sizes = _Sizes(self)
        try:
            with _disable_current_modes(), self._trials.mode, sizes, torch.no_grad():
                made = [None if t is None else torch.empty(t.shape, dtype=t.dtype) for t in tensors]
                function(*made)
        except UnsupportedModel:
            raise
        except (*ERRORS, DataDependentError):
            pass
        return sizes.largest


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bounds all results of operators."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self.largest = memory, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, _bytes(value))
        self._memory.afford(self.largest)
        return made


def _harmless(op: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether results cannot be large. An extent that something without elements has can be."""
    extents = [d for t in tensors for d in t.shape]
    if op in _NO_LARGER:
        return 0 not in extents
    # Without numbers that say more, a result has an element for each combination at most.
    each = [max(2, t.numel(), *t.shape) for t in tensors]
    return bool(_LARGEST_ELEMENT * math.prod(each) <= FREE_BYTES)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _signature(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    most = _FEW if not tensor.dtype.is_floating_point else _FEW // 8
    content = tuple(tensor.reshape(-1).tolist()) if tensor.numel() <= most else ()
    return tuple(tensor.shape), tensor.dtype, content


def _physical() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nbytes(tensors: Sequence[Any]) -> int:
    """Bytes of all tensors together."""
    return sum(
        t.numel() * t.element_size() for t in tree_leaves(list(tensors)) if hasattr(t, "numel")
    )
