"""Every module of torch's own database, in training and in evaluation.

    python -m tests.suites.modules --out docs/modules.md --jobs 2

Each runs float32 samples through ``torch.compile(backend="pruner")`` beside a copy in eager:
results, gradients of parameters and inputs, and buffers must agree. Samples that eager itself
refuses are passed over.
"""

from __future__ import annotations

import collections
import copy
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

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
    from collections.abc import Iterator, Sequence

OPTIONS = {"effort": "none"}
SAMPLES = 8  # of each module and mode at most, evenly spread
LIMIT_S = 600.0  # for one of them
RANDOM = ("Dropout", "RReLU", "FractionalMaxPool")


def modules() -> dict[str, Any]:
    """The database by name, and whether in training: ``nn.Linear-train``."""
    from torch.testing._internal.common_modules import module_db

    found = {}
    for info in module_db:
        for mode in ("train", "eval"):
            found[f"{info.formatted_name}-{mode}"] = info
    return dict(sorted(found.items()))


def check(name: str) -> Outcome:
    """One module in one mode. Raises nothing."""
    import torch

    info, training = modules()[name], name.endswith("-train")
    if training and any(word in info.module_cls.__name__ for word in RANDOM):
        return Outcome(name, "left out", "random numbers", differentiable=True)
    compiled, captured, checked = False, False, False
    try:
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in samples[:: -(-len(samples) // SAMPLES)]:
            found = _check_sample(info, sample, training)
            if found is not None:
                compiled, captured = compiled or found.compiled, captured or found.captured
                checked = True
    except Exception as err:  # any failure is a line of the table
        reason = f"{type(err).__name__}: {str(err).strip()}"[:240]
        return Outcome(name, "failed", reason, differentiable=True)
    if not checked:
        return Outcome(name, "left out", "eager refuses all samples", differentiable=True)
    status, reason = "compiled" if compiled else "eager", AS_CAPTURED if captured else ""
    return Outcome(name, status, reason, "agree", differentiable=True)


def _check_sample(info: Any, sample: Any, training: bool) -> Found | None:
    """Compare with eager. Raises ``AssertionError``; None where eager itself refuses."""
    import torch

    import torch_pruner

    torch.manual_seed(0)
    made = sample.constructor_input
    first = info.module_cls(*made.args, **made.kwargs).train(training)

    def outcome(backend: str = "", *, double: bool = False) -> Run:
        module = copy.deepcopy(first)
        call = module.double() if double else module
        torch._dynamo.reset()
        if backend:
            options = OPTIONS if backend == "pruner" else None
            call = torch.compile(module, backend=backend, dynamic=False, options=options)
        args, kwargs = pytree.tree_map(
            functools.partial(_fresh, double=double),
            (sample.forward_input.args, sample.forward_input.kwargs),
        )
        torch.manual_seed(0)  # a lazy module makes its parameters when it is called
        result = call(*args, **kwargs)
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        found = gradients(result, [*inputs, *module.parameters()])
        return Run(result, found, dict(module.named_buffers()))

    try:
        theirs = outcome()
    except Exception:
        return None
    mine = outcome("pruner")
    report = torch_pruner.last_report()
    compiled = report is not None and any(g.ops_compiled for g in report.graphs)
    try:
        mine.agree(theirs)
    except AssertionError:
        try:
            mine.agree(theirs, outcome(double=True))
        except Exception:
            # What torch's own capture gives is not ours to change.
            mine.agree(outcome("aot_eager"))
            return Found(compiled, captured=True)
    return Found(compiled, captured=False)


@dataclass(frozen=True, slots=True)
class Run:
    """What a module gave."""

    result: Any
    gradients: list[Any]
    buffers: dict[str, Any]

    def agree(self, other: Run, truth: Run | None = None) -> None:
        """Raises ``AssertionError``. With ``truth`` as ``compare`` means it."""
        compare(self.result, other.result, truth and truth.result)
        compare_gradients(self.gradients, other.gradients, truth and truth.gradients)
        compare(self.buffers, other.buffers, truth and truth.buffers)


def _fresh(value: Any, *, double: bool = False) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    wide = double and value.dtype is torch.float32
    fresh = value.detach().clone().to(torch.float64 if wide else value.dtype)
    return fresh.requires_grad_(value.requires_grad)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    count = collections.Counter(o.status for o in outcomes)
    yield "# Modules"
    yield ""
    yield "Written by `python -m tests.suites.modules` from torch's own database of modules."
    yield ""
    yield (
        f"{count['compiled']} compiled, {count['eager']} run in eager, {count['failed']} failed,"
        f" {count['left out']} left out."
    )
    yield ""
    yield "| fails | reason |"
    yield "| --- | --- |"
    yield from (f"| {o.name} | {cell(o.reason)} |" for o in outcomes if o.status == "failed")
    yield from as_captured(outcomes)
    yield ""
    yield "eager: " + ", ".join(o.name for o in outcomes if o.status == "eager")
    yield ""
    yield "left out: " + ", ".join(
        f"{o.name} ({o.reason})" for o in outcomes if o.status == "left out"
    )


def main(arguments: list[str] | None = None) -> int:
    name, names = "tests.suites.modules", list(modules())
    return command(name, __doc__, lambda: names, check, table, arguments, limit_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
