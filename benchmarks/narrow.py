"""Models of bfloat16 and float16, as checkpoints are loaded by default, beside float32.

    python -m benchmarks.narrow --targets native,avx512,avx2

One model in each dtype, in turns: a prompt, and tokens that are decoded with a static cache, with
what of it is in our programs. Targets take away what this processor has: arithmetic of bfloat16,
then vectors of 64 bytes. Asked of a narrow model is a prompt that takes no longer than float32's,
and half of its time for a token.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine_peak, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.decoding import shapes
from benchmarks.decoding.torch_models import TorchDecoder
from benchmarks.outside import Stopwatch, watched
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel

READ = "streaming read"
DTYPES = ("float32", "bfloat16", "float16")
ASKED = {"prompt": 1.0, "token": 0.5}  # of float32's time


def targets() -> Mapping[str, dict[str, Any] | None]:
    """What code is generated for: this processor, and what it would be with fewer instructions."""
    here = TargetSpec.detect().tvm_target()
    without = [*here.get("mattr", []), "-avx512bf16"]
    amd = here["mcpu"].startswith("znver")
    return {
        "native": None,
        "avx512": {
            "kind": "llvm",
            "mcpu": here["mcpu"] if amd else "icelake-server",  # which has no tiles either
            "mattr": without,
        },
        "avx2": {"kind": "llvm", "mcpu": "znver3" if amd else "haswell"},
    }


@dataclass(slots=True)
class Watched:
    """A call, and the seconds of each that were spent in our programs."""

    call: Callable[[], object]
    watch: Stopwatch
    inside: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        begin = self.watch.seconds
        self.call()
        self.inside.append(self.watch.seconds - begin)


def calls_of(
    model: PreTrainedModel, backend: str, given: dict[str, Any], options: argparse.Namespace
) -> dict[str, Watched]:
    """A prompt and a token, both compiled."""
    prompt = torch.randint(1000, (options.prefill,), generator=torch.Generator().manual_seed(0))
    tokens, middle = prompt.tolist(), options.length // 2
    whole = TorchDecoder(model, backend, given, options.prefill)
    steps = TorchDecoder(model, backend, given, options.length)
    steps.goto(middle)

    def step() -> None:
        if steps.position == options.length:
            steps.goto(middle)
        steps.step()

    calls: dict[str, Callable[[], object]] = {"prompt": lambda: whole.prefill(tokens)}
    with watched() as watch:
        found = {what: Watched(call, watch) for what, call in (calls | {"token": step}).items()}
        for call in found.values():
            call()
    return found


@torch.no_grad()
def measure(
    model: PreTrainedModel, target: dict[str, Any] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Times of each dtype for one target, in turns."""
    given = backend_options(options) | ({"target": target} if target else {})
    calls: dict[str, dict[str, Watched]] = {what: {} for what in ASKED}
    for dtype in options.dtypes:
        narrow = model if dtype == "float32" else copy.deepcopy(model).to(getattr(torch, dtype))
        for backend in ("pruner", *options.against):
            name = dtype if backend == "pruner" else f"{dtype} {backend}"
            for what, call in calls_of(narrow, backend, given, options).items():
                calls[what][name] = call
    if options.prepare:
        return {}
    read, read_bytes = machine_peak.read_loop(torch.get_num_threads(), machine_peak.read_bytes())
    found: dict[str, Any] = {"target": target or TargetSpec.detect().tvm_target()}
    for what, of in calls.items():
        for call in of.values():
            call.inside.clear()
        rounds = options.rounds if what == "prompt" else options.rounds * 5
        times = timing.interleave({**of, READ: read}, warmup=1, rounds=rounds)
        found["read_bytes_per_s"] = read_bytes / times.pop(READ).median_s
        found[what] = {
            name: t.to_json() | {"inside_s": statistics.median(of[name].inside)}
            for name, t in times.items()
        }
    return found


def render(result: Mapping[str, Any]) -> str:
    """A line for each target and dtype: times and what they are of float32's."""
    lines = []
    for name, of in result["targets"].items():
        for dtype in of["token"]:
            line = [name, dtype]
            for what in ASKED:
                base, here = of[what]["float32"], of[what][dtype]
                line += [timing.duration(here["median_s"])]
                line += [f"{timing.duration(here['q1_s'])} .. {timing.duration(here['q3_s'])}"]
                line += [f"{here['median_s'] / base['median_s']:.2f}"]
                line += [f"{here['inside_s'] / base['inside_s']:.2f}" if here["inside_s"] else ""]
            lines.append([*line, f"{of['read_bytes_per_s'] / 1e9:.1f}"])
    each = ["quartiles", "of float32", "in programs"]
    header = ["target", "dtype", "prompt", *each, "token", *each, "GB/s"]
    asked = ", ".join(f"{what} {share}" for what, share in ASKED.items())
    head = f"{timing.machine_line(result['machine'])}\nAsked, of float32: {asked}\n"
    return head + tables.plain(header, lines)


def _chosen(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.narrow", description=__doc__)
    parser.add_argument("--model", default="llama", choices=list(shapes.SHAPES))
    parser.add_argument("--layers", type=int, help="default: as many as the model has")
    parser.add_argument("--targets", type=_chosen, default=list(targets()))
    parser.add_argument("--dtypes", type=_chosen, default=list(DTYPES), help="float32 is needed")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--length", type=int, default=256, help="of the cache of decoded tokens")
    parser.add_argument("--against", type=_chosen, default=[], help="other backends, e.g. eager")
    parser.add_argument("--prepare", action="store_true", help="only tune and compile")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/narrow.json")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    model, found = shapes.build(options.model, options.layers), {}
    for name in options.targets:
        found[name] = measure(model, targets()[name], options)
        torch._dynamo.reset()
        gc.collect()
    if not options.prepare:
        result = {"machine": timing.machine(), "targets": found}
        print(render(result))
        write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
