"""Every module of torch's own database, in training and in evaluation.

    python -m tests.suites.modules --out docs/modules.md --jobs 2

Each runs float32 samples through ``torch.compile(backend="pruner")`` beside a copy in eager:
results, gradients of parameters and inputs, and buffers must agree. Samples that eager itself
refuses are passed over.
"""

from __future__ import annotations

import collections
import copy
import sys
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import (
    Outcome,
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
    compiled, checked = 0, 0
    try:
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in samples[:: -(-len(samples) // SAMPLES)]:
            found = _check_sample(info, sample, training)
            checked += found is not None
            compiled += found or False
    except Exception as err:  # any failure is a line of the table
        reason = f"{type(err).__name__}: {str(err).strip()}"[:240]
        return Outcome(name, "failed", reason, differentiable=True)
    if not checked:
        return Outcome(name, "left out", "eager refuses all samples", differentiable=True)
    return Outcome(name, "compiled" if compiled else "eager", "", "agree", differentiable=True)


def _check_sample(info: Any, sample: Any, training: bool) -> bool | None:
    """Compare with eager; whether anything was compiled by TVM, None where eager refuses."""
    import torch
    from torch.utils import _pytree as pytree

    import torch_pruner

    made, given = sample.constructor_input, sample.forward_input
    torch.manual_seed(0)
    mine = info.module_cls(*made.args, **made.kwargs).train(training)
    theirs = copy.deepcopy(mine)
    torch._dynamo.reset()
    run = torch.compile(mine, backend="pruner", dynamic=False, options=OPTIONS)
    pairs = []
    for call, module in ((theirs, theirs), (run, mine)):
        args, kwargs = pytree.tree_map(_fresh, (given.args, given.kwargs))
        torch.manual_seed(0)  # a lazy module makes its parameters when it is called
        try:
            result = call(*args, **kwargs)
        except Exception:
            if module is theirs:
                return None
            raise
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        pairs.append((result, [*inputs, *module.parameters()]))
    pairs.reverse()
    compare(pairs[0][0], pairs[1][0])
    compare_gradients(*(gradients(*pair) for pair in pairs))
    compare(dict(mine.named_buffers()), dict(theirs.named_buffers()))
    report = torch_pruner.last_report()
    return report is not None and any(g.ops_compiled for g in report.graphs)


def _fresh(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


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
