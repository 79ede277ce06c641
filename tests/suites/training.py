"""A training step of every network of the benchmarks, beside eager: is all of it compiled?

    python -m tests.suites.training --out docs/training-networks.md

Compilation is strict: a graph, forward or backward, that fails to compile is a failure here, where
users would get eager's speed and a warning. Gradients of every parameter are compared. Language
models have two layers; convolution networks are whole, so the suite takes its time.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import Outcome, cell, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OPTIONS = {"effort": "none", "strict": True}
BATCH = 2  # batch norm wants more than one value of a channel
LAYERS = 2
LIMIT_S = 1200.0  # for one network
# Of the largest element of a parameter's gradient. Batch norm over two images amplifies rounding:
# eager's own gradients are as far as a few thousandths from those in float64.
TOLERANCE = 2e-2


def check(name: str) -> Outcome:
    """One network. Raises nothing."""
    import torch

    import torch_pruner
    from benchmarks import models

    try:
        network = models.NETWORKS[name]
        module, inputs = models.load(name, batch=BATCH, layers=network.depth and LAYERS)
        mine, theirs = module.train(), copy.deepcopy(module)
        run = torch.compile(mine, backend="pruner", dynamic=False, options=OPTIONS)
        for call in (run, theirs):
            torch.manual_seed(0)  # dropout draws the same for both
            _step(call, inputs)
        worst = _worst(mine, theirs)
        report = torch_pruner.last_report()
        assert report is not None
        kinds = sorted(g.name for g in report.graphs)
        left = sorted({f.node.partition(" ")[0] for f in report.ops_fallback})
    except Exception as err:  # any failure is a line of the table
        return Outcome(name, "failed", f"{type(err).__name__}: {str(err).strip()}"[:240])
    said = f"{report.ops_compiled} of {report.ops_total} in {len(kinds)} graphs"
    said += f"; in eager: {', '.join(left)}" if left else ""
    if not any(kind.endswith(".backward") for kind in kinds):
        return Outcome(name, "failed", f"no backward was compiled: {said}")
    if worst > TOLERANCE:
        return Outcome(name, "failed", f"gradients off by {worst:.1e}: {said}")
    return Outcome(name, "compiled", said, f"{worst:.0e}", differentiable=True)


def _step(call: Any, inputs: Any) -> None:
    import torch
    from torch.utils import _pytree as pytree

    from benchmarks import models

    output = models.call(call, inputs)
    plain = output.to_tuple() if hasattr(output, "to_tuple") else output
    leaves = [t for t in pytree.tree_leaves(plain) if isinstance(t, torch.Tensor)]
    random = torch.Generator().manual_seed(0)
    wanted = [t for t in leaves if t.requires_grad]
    # Of a sum of squares most models have no gradient: a normalisation comes last.
    losses = [(t * torch.randn(t.shape, generator=random)).mean() for t in wanted]
    torch.autograd.backward(sum(losses[1:], start=losses[0]))


def _worst(mine: Any, theirs: Any) -> float:
    """The largest difference of a gradient, relative to the largest element of all."""
    pairs = list(zip(mine.named_parameters(), theirs.parameters(), strict=True))
    found = [(name, a.grad, b.grad) for (name, a), b in pairs]
    scale = max(float(b.abs().max()) for _, _, b in found if b is not None)
    worst = 0.0
    for name, a, b in found:
        assert (a is None) == (b is None), f"{name}: one has no gradient"
        if a is not None:
            error = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale)
            worst = max(worst, error) if error == error else float("inf")
    return worst


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    yield "# Training steps of networks"
    yield ""
    yield (
        "Written by `python -m tests.suites.training`: forward and backward with `strict`, untuned,"
        f" batch {BATCH}, language models with {LAYERS} layers. Off by: the largest difference of a"
        " parameter's gradient from eager's, relative to its largest element."
    )
    yield ""
    yield "| network | status | off by | operators compiled |"
    yield "| --- | --- | --- | --- |"
    for o in outcomes:
        yield f"| {o.name} | {o.status} | {o.gradients} | {cell(o.reason)} |"


def networks() -> list[str]:
    from benchmarks import models

    return [*(n.name for n in models.NETWORKS.values() if n.in_papers), "resnet18"]


def main(arguments: list[str] | None = None) -> int:
    name = "tests.suites.training"
    return command(name, __doc__, networks, check, table, arguments, limit_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
