"""What a token of ``generate`` costs beside our programs: guards, wrappers, Python.

    python -m benchmarks.outside --networks llama --layers 12 --tokens 64

A static cache; ``model.forward`` compiled for single tokens. Of each: the time in our programs
(machine code, nothing else), the rest of a call of ``model.forward`` (Dynamo's guards,
AOTAutograd's wrappers, our runtime), and what lies around it (transformers' loop, sampling).
Medians over tokens; the prompt and the first tokens, which compile, are left out. Twice more with
what torch offers where the model stays as it was compiled: no guards on modules (a
``guard_filter_fn``), and, in the loop, only those guards that tell graphs apart (``set_stance``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks import serving, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from torch_pruner.dynamo.run import build
from torch_pruner.dynamo.run.runtime import RegionCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SKIPPED = 4  # tokens at the start of a call that are not counted
MODULES = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
STANCE = {"skip_guard_eval_unsafe": True}
# Of each way its options of ``torch.compile`` and its stance.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "a stance": ({}, STANCE),
    "no guards on modules": (MODULES, {}),
}


@dataclass(slots=True)
class Stopwatch:
    """Seconds in programs, and how many were called."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, entry: Callable[[int], None]) -> Callable[[int], None]:
        clock = time.perf_counter

        def timed(address: int) -> None:
            begin = clock()
            entry(address)
            self.seconds += clock() - begin
            self.calls += 1

        return timed


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """What is compiled inside counts the time that its programs take, then and later."""
    watch = Stopwatch()

    class Watched(RegionCall):
        def __init__(self, name: str, compiled: Any, *rest: Any) -> None:
            steps = tuple(watch.around(s) if callable(s) else s for s in compiled.steps)
            super().__init__(name, replace(compiled, steps=steps), *rest)

    with mock.patch.object(build, "RegionCall", Watched):
        yield watch


@dataclass(slots=True)
class Tokens:
    """Of each call of ``forward``: when it began and ended, and the time in programs."""

    watch: Stopwatch
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, calls = self.watch.seconds, self.watch.calls
            self.begins.append(time.perf_counter())
            result = forward(*args, **kwargs)
            self.ends.append(time.perf_counter())
            self.inside.append(self.watch.seconds - before)
            self.programs.append(self.watch.calls - calls)
            return result

        return timed

    def summary(self) -> dict[str, float]:
        """Medians over tokens, in seconds."""
        kept = range(SKIPPED, len(self.begins) - 1)
        whole = [self.begins[k + 1] - self.begins[k] for k in kept]
        forward = [self.ends[k] - self.begins[k] for k in kept]
        inside = [self.inside[k] for k in kept]

        def middle(values: list[float]) -> float:
            return statistics.median(values)

        return {
            "whole_s": middle(whole),
            "programs_s": middle(inside),
            "forward_rest_s": middle([f - i for f, i in zip(forward, inside, strict=True)]),
            "around_s": middle([w - f for w, f in zip(whole, forward, strict=True)]),
            "outside_s": middle([w - i for w, i in zip(whole, inside, strict=True)]),
            "programs": statistics.median([self.programs[k] for k in kept]),
        }


def measure(network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of one network, a summary for each way."""
    prompt = torch.randint(1000, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    length = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 1, **serving.CACHES["static"]}
    model = serving.build(network, options.layers)
    found: dict[str, dict[str, float]] = {}
    before: dict[str, Any] | None = None
    forward = model.forward
    with torch.no_grad(), watched() as watch:
        expected = model.generate(prompt, **length, **greedy)
        for name in options.ways.split(","):
            compiling, stance = WAYS[name]
            if compiling != before:
                torch._dynamo.reset()
                given, before = {**backend_options(options), **compiling}, compiling
                step = torch.compile(forward, backend="pruner", dynamic=False, options=given)
                model.forward = _prompts_in_eager(forward, step)
                model.generate(prompt, **length, **greedy)
            rounds = []
            for _ in range(options.rounds):
                tokens = Tokens(watch)
                model.forward = _prompts_in_eager(forward, tokens.around(step))
                with torch.compiler.set_stance(**stance) if stance else nullcontext():
                    result = model.generate(prompt, **length, **greedy)
                same = bool(torch.equal(result, expected))
                rounds.append(tokens.summary() | {"same_tokens": same})
            found[name] = min(rounds, key=lambda r: r["outside_s"])
    return {"network": network, "ways": found}


def _prompts_in_eager(forward: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """As where ``generate`` compiles by itself: single tokens alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (step if kwargs["input_ids"].shape[1] == 1 else forward)(*args, **kwargs)

    return call


def render(result: dict[str, Any]) -> str:
    """A line for each network and way."""
    columns = ("whole_s", "programs_s", "outside_s", "forward_rest_s", "around_s")
    lines = [
        [
            f"{row['network']}, {name}", *(timing.duration(of[c]) for c in columns),
            f"{of['programs']:g}", "eager's" if of["same_tokens"] else "OTHERS",
        ]
        for row in result["rows"]
        for name, of in row["ways"].items()
    ]  # fmt: skip
    header = ["a token", "whole", "programs", "outside", "in forward", "around", "calls", "tokens"]
    return tables.plain(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outside", description=__doc__)
    parser.add_argument("--networks", default=",".join(serving.NETWORKS), help="names, by comma")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=16, help="tokens to begin with")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to add")
    parser.add_argument("--rounds", type=int, default=3, help="calls, of which the best counts")
    parser.add_argument("--ways", default=",".join(WAYS), help="names, by comma")
    add_tuning(parser)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/outside.json")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [measure(network, options) for network in options.networks.split(",")]
    result = {"machine": timing.machine(), "options": backend_options(options), "rows": rows}
    print(render(result))
    write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
