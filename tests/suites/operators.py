"""Every operator of torch's own OpInfo database through ``torch.compile(backend="pruner")``.

    python -m tests.suites.operators --out docs/operators.md --jobs 2    all (half an hour)
    python -m tests.suites.operators --sample 40                         about so many

Each operator runs its float32 samples, and where it takes them some of an integer, bool, bfloat16
and complex type; gradients of the differentiable ones are compared as well. Some samples at a time
are one compiled function; where such a one fails, each alone says which. Operators run in child
processes: a crash or a hang is a line of the table, and the next child goes on behind it. Samples
that eager itself refuses are passed over.
"""

from __future__ import annotations

import collections
import functools
import sys
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import (
    AS_CAPTURED,
    Found,
    Outcome,
    as_captured,
    cell,
    command,
    compare,
    compare_gradients,
    gradients,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OPTIONS = {"effort": "none"}
# How many samples of each operator at most, evenly spread: four operators have more than 500.
SAMPLES = {"float32": 96, "int64": 16, "bool": 16, "bfloat16": 16, "complex64": 16}
TOGETHER = 16  # samples in one compiled function
WIDE = {"float32": "float64", "bfloat16": "float64", "complex64": "complex128"}
LIMIT_S = 600.0  # for one operator
LEFT_OUT = {
    "random": "random numbers",
    "empty": "what memory happens to hold",
    "sparse": "sparse tensors",
    "jiterator": "kernels of the user's own, for GPUs",
}


def operators() -> list[Any]:
    """The database, in the order of names; variants of one operator follow each other."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=lambda op: op.formatted_name)


def reason_to_leave_out(op: Any) -> str:
    name = op.formatted_name
    if "jiterator" in name:
        return LEFT_OUT["jiterator"]
    if "sparse" in name:
        return LEFT_OUT["sparse"]
    if "empty" in name:
        return LEFT_OUT["empty"]
    words = ("rand", "bernoulli", "multinomial", "normal_", "uniform", "cauchy", "exponential")
    words = (*words, "geometric", "log_normal", "dropout", "rrelu", "nn_functional_fractional")
    if any(w in name for w in words) or name in ("normal", "normal_in_place", "normal_number_mean"):
        return LEFT_OUT["random"]
    return ""


def check(op: Any, options: dict[str, Any], limits: Mapping[str, int] | None = None) -> Outcome:
    """One operator, all of its types, at most so many samples of each. Raises nothing."""
    import torch

    differentiable = torch.float32 in op.supported_backward_dtypes("cpu")
    if reason := reason_to_leave_out(op):
        return Outcome(op.formatted_name, "left out", reason, differentiable=differentiable)
    compiled, captured, gradients = False, False, ""
    try:
        for name, limit in (limits or SAMPLES).items():
            dtype = getattr(torch, name)
            if dtype not in op.supported_dtypes("cpu"):
                continue
            grads = differentiable and name == "float32"
            samples = _samples(op, dtype, grads, limit)
            for some in (samples[i : i + TOGETHER] for i in range(0, len(samples), TOGETHER)):
                found = _check(op, some, options, grads)
                compiled, captured = compiled or found.compiled, captured or found.captured
                gradients = "agree" if grads else gradients
    except Exception as err:  # any failure is a line of the table
        reason = f"{type(err).__name__}: {str(err).strip()}"[:240]
        return Outcome(op.formatted_name, "failed", reason, gradients, differentiable)
    status = "compiled" if compiled else "eager"
    reason = AS_CAPTURED if captured else ""
    return Outcome(op.formatted_name, status, reason, gradients, differentiable)


def _samples(op: Any, dtype: Any, grads: bool, limit: int) -> list[Any]:
    """Up to ``limit`` of those that eager takes, with copies of their tensors, evenly spread."""
    import torch
    from torch.utils import _pytree as pytree

    found = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grads):
        copies = pytree.tree_map_only(
            torch.Tensor, torch.clone, (sample.input, sample.args, sample.kwargs)
        )
        try:
            op(copies[0], *copies[1], **copies[2])
        except Exception:
            continue
        found.append(sample)
    return found[:: -(-len(found) // limit)] if found else []


def _check(op: Any, samples: list[Any], options: dict[str, Any], grads: bool) -> Found:
    """Samples in one function and, where that fails, each alone, so that the failure names one."""
    try:
        return _check_together(op, samples, options, grads)
    except Exception:
        for sample in samples:
            _check_together(op, [sample], options, grads)
        raise


def _check_together(op: Any, samples: list[Any], options: dict[str, Any], grads: bool) -> Found:
    """Compare with eager. Raises ``AssertionError``."""
    import torch
    from torch.utils import _pytree as pytree

    import torch_pruner

    leaves, spec = pytree.tree_flatten([(s.input, s.args, s.kwargs) for s in samples])
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors: Any) -> Any:
        values = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            values[i] = tensor
        calls = pytree.tree_unflatten(values, spec)
        return [op.get_op()(given, *args, **kwargs) for given, args, kwargs in calls]

    def tensors(*, double: bool = False) -> list[Any]:
        given = []
        for leaf in (leaves[i] for i in places):
            dtype = WIDE.get(str(leaf.dtype).removeprefix("torch.")) if double else None
            value = leaf.detach().clone().to(getattr(torch, dtype) if dtype else leaf.dtype)
            given.append(value.requires_grad_(leaf.requires_grad))
        return given

    def outcome(call: Any, *, double: bool = False) -> tuple[Any, list[Any]]:
        torch._dynamo.reset()
        given = tensors(double=double)
        result = call(*given)
        # Eigenvectors are known up to a factor: the database says what of them is unique.
        unique = [s.output_process_fn_grad(r) for s, r in zip(samples, result, strict=True)]
        return result, gradients(unique, given) if grads else []

    def agree(truth: Any = (None, None)) -> None:
        compare(got, expected, truth[0])
        compare_gradients(found, theirs, truth[1])

    run = torch.compile(function, backend="pruner", dynamic=False, options=options)
    got, found = outcome(run)
    report = torch_pruner.last_report()
    expected, theirs = outcome(function)
    captured = False
    try:
        agree()
    except AssertionError:
        # Who is right? Eager's layer normalisation of one element is not exactly zero, for one.
        try:
            agree(outcome(function, double=True))
        except Exception:
            # Dynamo writes some calls as others: addcdiv with a factor is a division, a product and
            # a sum to it, each rounded. What its own capture gives in eager is not ours to change.
            expected, theirs = outcome(torch.compile(function, backend="aot_eager", dynamic=False))
            agree()
            captured = True
    return Found(report is not None and any(g.ops_compiled for g in report.graphs), captured)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    count = collections.Counter(o.status for o in outcomes)
    floats = [o for o in outcomes if o.differentiable and o.status != "left out"]
    share = 100 * sum(o.status == "compiled" for o in floats) / max(len(floats), 1)
    yield "# Operators"
    yield ""
    yield "Written by `python -m tests.suites.operators` from torch's own database of operators."
    yield ""
    yield (
        f"{count['compiled']} compiled, {count['eager']} run in eager, {count['failed']} failed,"
        f" {count['left out']} left out. Of {len(floats)} differentiable operators of floats"
        f" {share:.0f} % are compiled; the gradients of"
        f" {sum(o.gradients == 'agree' for o in outcomes)} were compared and agree."
    )
    for status, title in (
        ("failed", "fails"),
        ("eager", "runs in eager"),
        ("compiled", "compiled"),
    ):
        yield ""
        found = [o for o in outcomes if o.status == status]
        if status == "failed":
            yield f"| {title} | reason |"
            yield "| --- | --- |"
            yield from (f"| {o.name} | {cell(o.reason)} |" for o in found)
        else:
            yield f"{title}: " + ", ".join(o.name for o in found)
    yield from as_captured(outcomes)
    yield ""
    yield "| left out because of | operators |"
    yield "| --- | ---: |"
    reasons = collections.Counter(o.reason for o in outcomes if o.status == "left out")
    yield from (f"| {reason} | {n} |" for reason, n in reasons.most_common())


@functools.cache
def _by_name() -> dict[str, Any]:
    return {op.formatted_name: op for op in operators()}


def main(arguments: list[str] | None = None) -> int:
    def by_name(name: str) -> Outcome:
        return check(_by_name()[name], OPTIONS)

    names = list(_by_name())
    return command(
        "tests.suites.operators", __doc__, lambda: names, by_name, table, arguments, limit_s=LIMIT_S
    )


if __name__ == "__main__":
    sys.exit(main())
