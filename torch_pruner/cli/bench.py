"""``torch-pruner bench MODEL``: latency of the compiled model beside others, in one process.

Contenders take turns and the order rotates, so that a machine that slows down slows all of them.
Times are medians of seconds per call; a ratio is the median over rounds of other / pruner.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.cli import arguments, explain, model, tune
from torch_pruner.report import Report
from torch_pruner.text_tables import table, time_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

OURS = "pruner"
AGAINST = ("eager", "inductor")
ROUNDS = 20
# Shorter calls are timed in groups, so that the clock does not count.
MIN_SAMPLE_S = 2e-3


@dataclass(frozen=True, slots=True)
class Contender:
    """One backend's times. ``ratio`` is how many times faster than it our backend is."""

    name: str
    first_call_s: float
    median_s: float
    q1_s: float
    q3_s: float
    ratio: float
    rounds: int
    difference: float  # largest from eager, over eager's largest magnitude


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set of inputs. ``failed`` maps contenders that could not run to the reason."""

    inputs: str
    contenders: tuple[Contender, ...]
    failed: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model.add_arguments(parser)
    parser.add_argument(
        "--against",
        default=",".join(AGAINST),
        metavar="NAMES",
        help="backends of torch.compile to compare with, or eager (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=arguments.positive,
        default=ROUNDS,
        metavar="N",
        help="samples of each (%(default)s)",
    )
    arguments.add_options(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """0 if every contender ran and everything is compiled and tuned, else 1."""
    options = arguments.options_of(args)
    against = [n for n in dict.fromkeys(args.against.split(",")) if n not in ("", OURS)]
    with arguments.clean_stdout(args.json):
        found, report = _measure(args, options, against)
    if args.json:
        data = {"comparisons": [asdict(c) for c in found], "report": report.to_json()}
        print(json.dumps(data, indent=2))
    else:
        print("\n\n".join(_text(comparison) for comparison in found))
        print(f"\n{tune.verdict(report)}")
    return int(not report.complete or any(c.failed for c in found))


def _measure(
    args: argparse.Namespace, options: dict[str, Any], against: Sequence[str]
) -> tuple[list[Comparison], Report]:
    loaded = model.load(args)
    import torch

    from torch_pruner.dynamo.run import reports

    if unknown := set(against) - {"eager", *torch.compiler.list_backends(exclude_tags=())}:
        usual = ", ".join(torch.compiler.list_backends())
        args.usage_error(f"--against: no backend {min(unknown)!r}; there are eager, {usual}")
    explain.use_threads(options)
    backends: dict[str, Callable[..., Any]] = {}
    for name in (OURS, *against):
        given = options if name == OURS else None
        # Each shape is compiled for itself, by every backend alike.
        compiled = torch.compile(loaded.module, backend=name, options=given, dynamic=False)
        backends[name] = loaded.module if name == "eager" else compiled
    with torch.set_grad_enabled(args.train), reports.collect() as graphs:
        found = [_compare(backends, loaded.module, i, args.rounds) for i in loaded.inputs]
    return found, Report(tuple(graphs))


def _compare(
    backends: Mapping[str, Callable[..., Any]],
    eager: Callable[..., Any],
    inputs: model.Inputs,
    rounds: int,
) -> Comparison:
    expected = model.call(eager, inputs)
    calls: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    first_s: dict[str, float] = {}
    differences: dict[str, float] = {}
    for name, function in backends.items():
        start = time.perf_counter()
        try:
            outputs = model.call(function, inputs)
        except Exception as err:
            if name == OURS:  # then there is nothing to compare with
                raise
            failed[name] = f"{type(err).__name__}: {next(iter(str(err).splitlines()), '')}"
            continue
        first_s[name] = time.perf_counter() - start
        differences[name] = difference(outputs, expected)
        calls[name] = functools.partial(model.call, function, inputs)
    found = contenders(interleave(calls, rounds), first_s, differences)
    return Comparison(_described(inputs), tuple(found), failed)


def contenders(
    samples: Mapping[str, Sequence[float]],
    first_s: Mapping[str, float],
    differences: Mapping[str, float],
) -> list[Contender]:
    """Summaries of samples; sample i of every contender is of round i."""
    found = []
    for name, seconds in samples.items():
        q1, median, q3 = _quartiles(seconds)
        ratio = statistics.median(s / o for s, o in zip(seconds, samples[OURS], strict=True))
        times = first_s[name], median, q1, q3
        found.append(Contender(name, *times, ratio, len(seconds), differences[name]))
    return found


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one sample per round. Each sample follows an untimed
    call, because the threads of the contender before may still be busy."""
    groups = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        groups[name] = max(1, math.ceil(MIN_SAMPLE_S / max(clock() - start, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            call, number = calls[name], groups[name]
            call()
            start = clock()
            for _ in range(number):
                call()
            samples[name].append((clock() - start) / number)
        order.append(order.pop(0))
    return samples


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, median, q3


def difference(outputs: Any, expected: Any) -> float:
    """The largest difference of any output, over the largest magnitude of what it should be."""
    worst = 0.0
    for ours, theirs in zip(_tensors(outputs), _tensors(expected), strict=True):
        if theirs.numel() and not theirs.is_complex():
            scale = theirs.double().abs().max().item() or 1.0
            worst = max(worst, (ours.double() - theirs.double()).abs().max().item() / scale)
    return worst


def _tensors(value: Any) -> list[Any]:
    from torch import Tensor
    from torch.utils import _pytree

    return [t.detach() for t in _pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _described(inputs: model.Inputs) -> str:
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    parts = []
    for name, value in named:
        shape = "x".join(str(d) for d in getattr(value, "shape", ()))
        parts.append(f"{name}: {shape or type(value).__name__}")
    return ", ".join(parts)


def _text(comparison: Comparison) -> str:
    rows = [
        (
            c.name,
            time_text(c.median_s),
            f"{time_text(c.q1_s)} .. {time_text(c.q3_s)}",
            "" if c.name == OURS else f"{c.ratio:.2f}x",
            time_text(c.first_call_s),
            f"{c.difference:.1e}",
        )
        for c in comparison.contenders
    ]
    headers = ("backend", "median", "quartiles", f"{OURS} is", "first call", "difference")
    lines = [f"inputs: {comparison.inputs}", *table(headers, rows, align="<>>>>>")]
    lines += [f"{name} failed: {reason}" for name, reason in comparison.failed.items()]
    return "\n".join(lines)
