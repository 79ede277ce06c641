"""Kernel graphs run through ATen: the vendor's kernels as candidates, and what they take."""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_pruner.devices.aten_attention import AttentionCall, attention_call
from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.graph.ir import Graph, Node, const_value
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Clock = Callable[[Sequence[Callable[[], object]]], float]  # median seconds of calls

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "sin": torch.sin,
    "cos": torch.cos, "tanh": torch.tanh, "erf": torch.erf, "erfc": torch.erfc,
    "sigmoid": torch.sigmoid, "relu": torch.relu, "floor": torch.floor, "ceil": torch.ceil,
    "trunc": torch.trunc, "round": torch.round, "logical_not": torch.logical_not,
}  # fmt: skip
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or,
}  # fmt: skip

# As in ``tuner.measure``: copies of the weights fill this much, and are at most so many.
FLUSH_BYTES, MAX_COPIES = 32 << 20, 128
MAX_KNOWN = 1024  # graphs of which it is known whether they are attention


_CONTRACTIONS = frozenset(("matmul", "conv", "conv_transpose"))
_COMPETES = frozenset(
    (
        *_UNARY, *_BINARY, *_CONTRACTIONS, "input", "const", "cast", "where", "reshape", "permute",
        "broadcast", "slice",
    )
)  # fmt: skip
_RUNS = _COMPETES | frozenset(
    (
        "sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "iota", "flip", "pad", "cat",
        "take", "gather",
    )
)  # fmt: skip


def runs(spec: Graph) -> bool:
    """Whether ``run_spec`` knows every operator of ``spec``. ATen multiplies equal dtypes only."""
    return (
        bool(spec.inputs)
        and all(n.op in _RUNS for n in spec.nodes)
        and all(_multiplies(spec, n) for n in spec.nodes if n.op in _CONTRACTIONS)
    )


def competes(spec: Graph) -> bool:
    """Whether ``spec`` is of such operators alone for which a library may have a faster kernel."""
    call = _attention(spec)
    known = all(
        n.op in _COMPETES or (call is not None and (i == call.out or i not in call.read))
        for i, n in enumerate(spec.nodes)
    )
    return known and runs(spec)


def _multiplies(spec: Graph, node: Node) -> bool:
    """GPUs multiply nothing but floating point there."""
    x, w = (spec.nodes[i].dtype for i in node.inputs)
    return x == w and x in FLOATS


_attentions: dict[int, tuple[Graph, AttentionCall | None]] = {}


@torch.no_grad()
def run_spec(spec: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a kernel graph for which ``runs`` holds, on tensors of the inputs' shapes."""
    call, values = _attention(spec), list[torch.Tensor]()
    for i, node in enumerate(spec.nodes):
        if call is not None and i == call.out:
            values.append(call.run(values))
        elif call is not None and i not in call.read:
            values.append(inputs[0])  # nobody reads that
        else:
            values.append(_evaluate(node, [values[j] for j in node.inputs], inputs))
    return [values[o] for o in spec.outputs]


def _attention(spec: Graph) -> AttentionCall | None:
    """``attention_call``, asked once for each graph: this is on the way of every call."""
    known = _attentions.get(id(spec))
    if known is None or known[0] is not spec:
        if len(_attentions) >= MAX_KNOWN:
            _attentions.clear()
        known = _attentions[id(spec)] = spec, attention_call(spec)
    return known[1]


def _evaluate(node: Node, args: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    op = node.op
    if op == "input":
        index: int = node.attr("index")
        return inputs[index]
    if op == "const":
        value, device = const_value(node), inputs[0].device
        return torch.scalar_tensor(value, dtype=DTYPES[node.dtype], device=device)
    if op in _UNARY:
        return _UNARY[op](args[0])
    if op in _BINARY:
        return _BINARY[op](args[0], args[1])
    if op == "cast":
        return args[0].to(DTYPES[node.dtype])
    if op == "where":
        return torch.where(args[0], args[1], args[2])
    if op == "reshape":
        return args[0].reshape(node.shape)
    if op == "permute":
        return args[0].permute(node.attr("perm"))
    if op == "broadcast":
        return args[0].expand(node.shape)
    if op == "slice":
        spans = zip(node.attr("starts"), node.attr("steps"), node.shape, strict=True)
        return args[0][tuple(slice(a, a + h * (n - 1) + 1, h) for a, h, n in spans)]
    if op in _CONTRACTIONS:
        return _contract(node, args)
    if op == "iota":
        line = torch.arange(node.shape[dim := node.attr("dim")], device=inputs[0].device)
        line = line.to(DTYPES[node.dtype])
        return line.reshape([-1 if i == dim else 1 for i in range(len(node.shape))]).expand(
            node.shape
        )
    if node.kind is OpKind.REDUCE:
        return _reduce(node, args[0])
    return _moved(node, args)


def _reduce(node: Node, x: torch.Tensor) -> torch.Tensor:
    axes, dtype = list(node.attr("axes")), DTYPES[node.dtype]
    if node.op == "sum":
        return torch.sum(x, axes, dtype=dtype)
    if node.op in ("max", "min"):
        return (torch.amax if node.op == "max" else torch.amin)(x, axes)
    one_axis: Callable[[torch.Tensor, int], torch.Tensor] = getattr(torch, node.op)
    for axis in reversed(axes):  # the later ones first: the numbers of the others stay
        x = one_axis(x, axis)
    return x.to(dtype)


def _moved(node: Node, args: list[torch.Tensor]) -> torch.Tensor:
    """Elements of ``args`` in other places."""
    x = args[0]
    if node.op == "flip":
        return x.flip(list(node.attr("dims")))
    if node.op == "cat":
        return torch.cat(args, node.attr("dim"))
    if node.op == "pad":
        ends = zip(reversed(node.attr("lo")), reversed(node.attr("hi")), strict=True)
        widths = [n for pair in ends for n in pair]
        return torch.constant_pad_nd(x, widths, float(node.attr("value")))
    dim, index = node.attr("dim"), args[1].long()
    index = torch.where(index < 0, index + x.shape[dim], index).clamp(0, x.shape[dim] - 1)
    if node.op == "gather":
        return x.gather(dim, index)
    return x.index_select(dim, index.reshape(-1)).reshape(node.shape)


def _contract(node: Node, args: list[torch.Tensor]) -> torch.Tensor:
    if node.op == "matmul":
        return torch.matmul(args[0], args[1])
    x, w = args
    rank = x.dim() - 2
    stride, dilation = list(node.attr("stride")), list(node.attr("dilation"))
    lo, groups = list(node.attr("lo")), node.attr("groups")
    if node.op == "conv":
        hi = list(node.attr("hi"))
        if lo != hi:
            pads = [p for pair in zip(reversed(lo), reversed(hi), strict=True) for p in pair]
            x, lo = torch.nn.functional.pad(x, pads), [0] * rank
        return torch.convolution(x, w, None, stride, lo, dilation, False, [0] * rank, groups)
    extra = [
        o - ((i - 1) * s - 2 * p + d * (k - 1) + 1)
        for o, i, s, p, d, k in zip(
            node.shape[2:], x.shape[2:], stride, lo, dilation, w.shape[2:], strict=True
        )
    ]
    return torch.convolution(x, w, None, stride, lo, dilation, True, extra, groups)


class AtenVendor:
    """ATen on this process's threads, or on ``device`` by its ``clock``, timed on random data."""

    def __init__(
        self, rounds: int = 5, device: torch.device | None = None, clock: Clock | None = None
    ) -> None:
        self._rounds = rounds
        self._device = device or torch.device("cpu")
        self._clock = clock or _host_seconds

    def runs(self, spec: Graph) -> bool:
        return runs(spec)

    def latency_s(self, spec: Graph) -> float | None:
        """Median seconds of one call, or None where no library can have a faster kernel."""
        if not competes(spec):
            return None
        # AOTAutograd compiles under its fake mode, in which nothing is computed, at once.
        with _disable_current_modes(), torch.inference_mode():
            return self._timed(spec)

    def _timed(self, spec: Graph) -> float:
        generator = torch.Generator().manual_seed(0)
        operands = []
        for i in spec.inputs:
            node = spec.nodes[i]
            dtype = DTYPES[node.dtype]
            if dtype.is_floating_point:
                operands.append(
                    torch.randn(node.shape, generator=generator, dtype=torch.float32).to(dtype)
                )
            else:
                operands.append(torch.zeros(node.shape, dtype=dtype))
        operands = [t.to(self._device) for t in operands]
        rows = _rotated(operands, [bool(spec.nodes[i].attr("static")) for i in spec.inputs])
        run_spec(spec, rows[0])
        calls = [
            functools.partial(run_spec, spec, rows[(k + 1) % len(rows)])
            for k in range(max(self._rounds, len(rows)))
        ]
        return self._clock(calls)


def _host_seconds(calls: Sequence[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _rotated(operands: list[torch.Tensor], static: Sequence[bool]) -> list[list[torch.Tensor]]:
    """The operands of calls in turn: weights come from memory, as those of our kernels do."""
    weights = sum(t.nbytes for t, s in zip(operands, static, strict=True) if s)
    copies = min(MAX_COPIES, -(-FLUSH_BYTES // weights)) if weights else 1
    others = (
        [t.clone() if s else t for t, s in zip(operands, static, strict=True)]
        for _ in range(copies - 1)
    )
    return [operands, *others]
