"""The first-call check: a compiled graph is compared with eager once, on the first real inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from torch_pruner import exc
from torch_pruner.dynamo.lower import recurrent_ops
from torch_pruner.dynamo.run import in_double, rounding
from torch_pruner.dynamo.run.differences import Kept, Sampled, differences, parts_for
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx.node import Argument, Target

    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.run.first_call import Eager, Generators

aten = torch.ops.aten
log = logger(__name__)

# Relative to the largest magnitude of an output: what reordered sums may differ by; a bug differs
# by far more.
_BOUNDS = {
    torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2,
    torch.complex128: 1e-7, torch.complex64: 1e-3,
}  # fmt: skip
_ROUNDED_BOUNDS = {8: 0.1, 4: 0.8}
"""With weights rounded to so many bits: random networks were off by up to 0.05 and 0.43 of the
largest score. A bug in four bits still shows, since results that have nothing to do with each other
differ by more than the largest of them."""
TF32_BOUND = _BOUNDS[torch.float16]
"""With operands rounded to tf32, which has the mantissa of float16."""
FAST_BOUND = _BOUNDS[torch.bfloat16]
"""With operands rounded to bfloat16, as ``fast_math`` allows."""
_UNWRITTEN = frozenset(
    (
        aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.new_empty,
        aten.new_empty_strided,
    )
)  # fmt: skip
# These read only the shape of their first input.
_OVERWRITES = frozenset(
    (
        aten.fill, aten.full_like, aten.new_full, aten.new_ones, aten.new_zeros, aten.ones_like,
        aten.zero, aten.zeros_like,
    )
)  # fmt: skip
_SHIFT = 1 / 64  # of the bound: by how much inputs are shifted to see how an output reacts
_REACTIONS = 4.0  # an output may be off by this many times its reaction
_NO_DIGIT = 0.5  # of the largest number: what rounding alone moves by so much has no sure digit


class CheckedCall(FirstCall):
    """Runs ``call``; the first time also ``gm`` in eager, which stays if they differ."""

    def __init__(
        self,
        gm: fx.GraphModule,
        call: BoxedCall,
        name: str,
        *,
        strict: bool,
        failed: Callable[[Exception], None],
        on_match: Callable[[], None] = lambda: None,
        least_bound: float = 0.0,
        device: Device | None = None,
    ) -> None:
        super().__init__(
            partial(run_eager, gm), call, name, strict=strict, draws=may_draw(gm), failed=failed,
            device=device,
        )  # fmt: skip
        self._on_match = on_match
        self._gm: fx.GraphModule | None = gm
        self._bounds = [max(bound, least_bound) if bound else bound for bound in bounds_of(gm)]

    def _first(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        eager, values = self._eager, list(args)
        assert eager is not None
        args.clear()
        state = self._generators() if self._draws else None
        with torch.no_grad():
            got, error, after = self._compared(eager, values, state)
        self._rewind(after)
        if error is None:
            self._settle()
            self._on_match()
            self._improve(values)
        elif self._strict:
            self._failed(error)
            raise error
        else:
            self._give_up(error)
        return got

    def _settle(self) -> None:
        super()._settle()
        self._gm = None

    def _rehearsed(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        eager, values = self._eager, list(args)
        assert eager is not None
        args.clear()
        with torch.no_grad():
            got, error, _ = self._compared(eager, values, None)
        if error is None:
            self._settle()
            self._on_match()
        else:
            log.debug("%s: a rehearsal differed", self._name, exc_info=error)
        return got

    def _compared(
        self, eager: Eager, values: Sequence[RuntimeValue], state: Generators | None
    ) -> tuple[list[RuntimeValue], Exception | None, Generators | None]:
        """The compiled graph's results, or what is wrong with them and eager's; and what eager
        draws next.

        Of results too large to lie beside eager's some elements and sums are compared. Where these
        differ it is done in parts, for each of which both run once.
        """
        expected = eager(values)
        after = self._generators() if self._draws else None
        parts = parts_for(values, expected)
        kept: Sequence[Kept] | Sequence[Sampled]
        if parts == 1:
            kept = [Kept.of(value, 0, 1) for value in expected]
        else:
            kept = [Sampled.of(value, parts) for value in expected]
        del expected
        self._rewind(state)
        got, error = self._attempt(eager, values, kept, state)
        if error is None:
            return got, None, after
        del got
        self._rewind(state)
        if parts == 1:
            return [k.value for k in kept if isinstance(k, Kept)], error, after
        del kept
        return (*self._in_parts(eager, values, parts, state), after)

    def _in_parts(
        self,
        eager: Eager,
        values: Sequence[RuntimeValue],
        parts: int,
        state: Generators | None,
    ) -> tuple[list[RuntimeValue], Exception | None]:
        """As ``_compared``, element by element."""
        kept: list[Kept | None] = [None] * len(self._bounds)
        for part in range(parts):
            now = [
                Kept.of(value, part, parts, before)
                for value, before in zip(eager(values), kept, strict=True)
            ]
            self._rewind(state)
            got, error = self._attempt(eager, values, now, state)
            if error is None and part == parts - 1:
                return got, None
            del got
            self._rewind(state)
            if error is not None:
                break
            kept = [replace(k, value=None) for k in now]
        return eager(values), error

    def _attempt(
        self,
        eager: Eager,
        values: Sequence[RuntimeValue],
        expected: Sequence[Kept] | Sequence[Sampled],
        state: Generators | None,
    ) -> tuple[list[RuntimeValue], Exception | None]:
        """The compiled graph's results, or what is wrong with them."""
        try:
            got = self._call(list(values))
            return got, self._mismatch(eager, values, got, expected, state)
        except Exception as err:
            return [], err

    def _mismatch(
        self,
        eager: Eager,
        inputs: Sequence[RuntimeValue],
        got: Sequence[RuntimeValue],
        expected: Sequence[Kept] | Sequence[Sampled],
        state: Generators | None,
    ) -> exc.ResultMismatch | None:
        errors = differences(got, expected)
        pairs = zip(errors, self._bounds, strict=True)
        bad = [k for k, (e, bound) in enumerate(pairs) if not e <= bound]
        if not bad:
            return None
        # Sums that cancel (the gradient of a bias before a normalisation) are noise in eager too.
        self._rewind(state)
        reactions = differences(eager([_shifted(v) for v in inputs]), expected)
        allowed = {k: max(self._bounds[k], _REACTIONS * _finite(reactions[k])) for k in bad}
        bad = [k for k in bad if not errors[k] <= allowed[k]]
        if bad:
            noise = self._noise(inputs, expected, state)
            allowed |= {k: max(allowed[k], _REACTIONS * noise[k]) for k in bad}
            bad = [k for k in bad if not errors[k] <= allowed[k]]
        nearer = self._near_double(inputs, got, expected, bad)
        worse = next((k for k in bad if k not in nearer), None)
        if worse is None:
            return None
        return exc.ResultMismatch(self._name, worse, errors[worse], allowed[worse])

    def _noise(
        self,
        inputs: Sequence[RuntimeValue],
        expected: Sequence[Kept] | Sequence[Sampled],
        state: Generators | None,
    ) -> list[float]:
        """How far each of eager's results is moved by rounding, if no digit of it is sure."""
        assert self._gm is not None
        moved = [0.0] * len(expected)
        for seed in rounding.RUNS:
            self._rewind(state)
            try:
                got = rounding.rounded_otherwise(self._gm, inputs, seed)
            except RuntimeError:  # a matrix that was just definite no longer is: nothing is shown
                continue
            moved = [
                max(m, _finite(d)) for m, d in zip(moved, differences(got, expected), strict=True)
            ]
        return [m if m >= _NO_DIGIT else 0.0 for m in moved]

    def _near_double(
        self,
        inputs: Sequence[RuntimeValue],
        got: Sequence[RuntimeValue],
        expected: Sequence[Kept] | Sequence[Sampled],
        bad: Sequence[int],
    ) -> set[int]:
        """Those of ``bad`` results that are as near to double precision as they must be to eager,
        or as eager is, about."""
        whole = [e for e in expected if isinstance(e, Kept) and e.where is None]
        if not bad or self._draws or len(whole) < len(expected) or self._gm is None:
            return set()
        exact = in_double.bounds_by_double(self._gm, inputs, whole, bad)
        return {
            k
            for k, (truth, bound) in exact.items()
            if in_double.difference(truth, got[k]) <= max(bound, self._bounds[k])
        }


def _finite(reaction: float) -> float:
    return reaction if reaction < math.inf else 0.0


def bound_of_weights(bits: int | None) -> float:
    """How far results may be off where weights are rounded to so many bits; 0 for no rounding."""
    return 0.0 if bits is None else _ROUNDED_BOUNDS[bits]


def may_draw(gm: fx.GraphModule) -> bool:
    """Whether a graph may use the random number generator."""
    return any(_may_draw(n.target) for n in gm.graph.nodes if n.op == "call_function")


def _may_draw(op: Target) -> bool:
    """Whether an operator may use the random number generator; another thread may be using it."""
    if not isinstance(op, torch._ops.OpOverload):
        return isinstance(op, torch._ops.OperatorBase)
    return op.namespace not in ("aten", recurrent_ops.NAMESPACE) or _draws(op)


def _draws(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def run_eager(gm: fx.GraphModule, args: Sequence[RuntimeValue]) -> list[RuntimeValue]:
    """The graph's outputs by its own operators."""
    return list(gm.forward(*args))


def bounds_of(gm: fx.GraphModule) -> list[float]:
    """For every output of a graph, how far it may be off.

    That is as far as the least precise float that it is computed from, and infinitely for memory
    that nobody wrote: of the template of a dropout mask, which recomputation in the backward hands
    from graph to graph, only the shape and strides mean anything.
    """
    loosest: dict[fx.Node, float] = {}
    for node in gm.graph.nodes:
        if _is_unwritten(node, loosest):
            loosest[node] = math.inf
            continue
        values = tree_leaves(node.meta.get("val")) if node.op == "call_function" else ()
        own = [_BOUNDS.get(v.dtype, 0.0) for v in values if isinstance(v, torch.Tensor)]
        read = (loosest[a] for a in node.all_input_nodes)
        loosest[node] = max([*own, *(b for b in read if b < math.inf)], default=0.0)
    outputs = cast("Sequence[Argument]", gm.graph.output_node().args[0])
    return [loosest[o] if isinstance(o, fx.Node) else 0.0 for o in outputs]


def _is_unwritten(node: fx.Node, bounds: Mapping[fx.Node, float]) -> bool:
    """Whether elements of a value are, or are computed from, what memory held by chance."""
    if node.op != "call_function":
        return False
    # Behind torch's operators that save or restore the generator stands the one that draws.
    ops = [o for o in (node.target, *node.args) if isinstance(o, torch._ops.OpOverload)]
    if any(o.overloadpacket in _UNWRITTEN for o in ops):
        return True
    if any(o.overloadpacket in _OVERWRITES or _draws(o) for o in ops):
        return False
    # A copy keeps nothing of what it writes to.
    is_copy = any(o.overloadpacket is aten.copy for o in ops)
    read = [node.args[1]] if is_copy else node.all_input_nodes
    return any(bounds.get(a) == math.inf for a in read if isinstance(a, fx.Node))


def _shifted(value: RuntimeValue) -> RuntimeValue:
    """A tensor of floats with its elements off by a part of the bound, alternately up and down."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if value.dtype not in _BOUNDS:
        return value
    step = max(_BOUNDS[value.dtype] * _SHIFT, torch.finfo(value.dtype).eps)
    signs = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    signs.view(-1)[::2] = -1
    return value * (1 + step * signs)
