"""Runs the drafts of every kernel of networks in an emulated block of a GPU's threads.

    python -m tests.suites.cuda_emulated --networks bert_tiny --card h200 --precision float16

The text that NVRTC would get is run by ``tests.gpu.emulator`` on random inputs, and compared with
the reference. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.arguments import network_names
from benchmarks.gpu.kernels import drafted
from benchmarks.gpu.tasks import tasks_of
from tests.families import kernels as K
from tests.gpu.emulator import machine
from tests.gpu.test_gpu_kernels import tolerance
from torch_pruner import exc
from torch_pruner.cards import CARDS, Card
from torch_pruner.graph.describe import flops_of

if TYPE_CHECKING:
    from torch_pruner.task import Candidate, Task


def fault(task: Task, candidate: Candidate, card: Card, order: machine.Order) -> str:
    """What is wrong with a kernel; empty if nothing is."""
    from torch_pruner import families
    from torch_pruner.codegen.build.gpu.image import launches_of
    from torch_pruner.codegen.build.gpu.source import cuda_source
    from torch_pruner.graph.reference import evaluate
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Scheduled
    from torch_pruner.tuner.measure import check

    try:
        kernel = families.scheduled(Scheduled(task.spec, candidate), TargetSpec.cuda(card))
        text = machine.Text(*cuda_source({"kernel": kernel}, card.arch))
        kernels = machine.Kernels([text], card.arch)
        own = [text.launches[key] for key in launches_of("kernel", text.launches)]
        inputs = check.random_inputs(task.spec, 0)
        outputs = K.prepared_outputs(task.spec, kernel, inputs)
        machine.ran(kernels, own, kernel, inputs, order, outputs=outputs)
        error = K.error(outputs, evaluate(task.spec, inputs))
    except (exc.CompileError, ValueError, AssertionError, machine.Fault) as err:
        return str(err)
    growth = math.sqrt(max(1, check.reduction_length(task.spec) / 256))
    return f"off by {error}" if error > 4 * growth * tolerance(task.spec) else ""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    card, failed = CARDS[options.card], 0
    for name in options.networks:
        begin, seen = time.perf_counter(), 0
        tasks = tasks_of(name, options.precision, card, options.layers)
        small = [task for task in tasks if flops_of(task.spec) <= options.most]
        for n, task in enumerate(small):
            for _, candidate in drafted(task, options.count):
                order = machine.ORDERS[(n + seen) % len(machine.ORDERS)]
                started = time.perf_counter()
                said = fault(task, candidate, card, order)
                seen, failed = seen + 1, failed + bool(said)
                took = time.perf_counter() - started
                if said or options.all:
                    print(f"  {task.name} {candidate}: {said or 'right'}, {took:.1f} s", flush=True)
        took = time.perf_counter() - begin
        print(
            f"{name}, {options.precision}, {card.name}: {len(small)} of {len(tasks)} kernels, "
            f"{seen} drafts, {took:.0f} s",
            flush=True,
        )
    print(f"{failed} failed")
    return int(failed > 0)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.suites.cuda_emulated", description=__doc__
    )
    parser.add_argument("--networks", type=network_names, default=["bert_tiny"], metavar="NAME,...")
    parser.add_argument("--card", choices=sorted(CARDS), default="h200")
    choices = ["float32", "float16", "bfloat16"]
    parser.add_argument("--precision", default="float32", choices=choices)
    parser.add_argument("--layers", type=int, help="language models with so many layers")
    parser.add_argument("--count", type=int, default=1, help="drafts of each kernel and sketch")
    parser.add_argument("--most", type=float, default=2e8, help="operations of a kernel")
    parser.add_argument("--all", action="store_true", help="print those that are right, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
