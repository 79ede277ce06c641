"""What a longer cache costs: decoding steps with caches of several lengths, full to the end.

The whole of a cache is seen by every step, so a step with a longer one reads so many bytes of keys
and values more. Its time above that of the shortest cache is set against reading these bytes at the
rate of a streaming read, which takes its turns with the steps. ``--cache bfloat16`` or
``int8`` keeps keys and values of a float32 model so.

    python -m benchmarks.cache_lengths --lengths 256,4096 --kv-heads 4
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks import machine_peak, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.job import compiled
from examples.narrow_cache import NarrowCache

if TYPE_CHECKING:
    from collections.abc import Callable

READ = "streaming read"


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every call."""
    config = LlamaConfig(
        hidden_size=options.heads * options.head_size,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_size,
        vocab_size=options.vocabulary,
        max_position_embeddings=16384,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def stepper(
    model: LlamaForCausalLM, step: Callable[..., torch.Tensor], options: Any, length: int
) -> tuple[Callable[[], torch.Tensor], int]:
    """A call that decodes the last token of a cache of that length, and the bytes of the cache."""
    narrow = None if options.cache == "float32" else getattr(torch, options.cache)
    cache = (
        NarrowCache(model.config, length, narrow) if narrow else StaticCache(model.config, length)
    )
    shape = (options.batch, options.kv_heads, 1, options.head_size)
    for layer in cache.layers:
        layer.lazy_initialization(torch.zeros(shape), torch.zeros(shape))
        random = torch.Generator().manual_seed(0)
        for held in (layer.keys, layer.values):
            if narrow is torch.int8:
                held.random_(-127, 128, generator=random)
            else:
                held.normal_(generator=random)
        if narrow is torch.int8:
            layer.key_scales.fill_(1 / 64)
            layer.value_scales.fill_(1 / 64)
    token = torch.full((options.batch, 1), 7)
    at = torch.full((options.batch, 1), length - 1)

    def call() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length - 1)
        return step(token, at, cache)

    return call, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Latencies by backend and length, in turns, with the rate of a streaming read."""
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options)
    calls: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}

    def step(token: torch.Tensor, position: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        return model(
            input_ids=token, position_ids=position, past_key_values=cache, use_cache=True
        ).logits

    backends = [b for b in ("pruner", *options.against.split(",")) if b]
    expected: dict[int, torch.Tensor] = {}
    differences: dict[str, float] = {}
    for backend in backends:
        for length in options.lengths:
            torch._dynamo.reset()
            run = compiled(step, backend, backend_options(options))
            name = f"{backend} {length}"
            calls[name], sizes[name] = stepper(model, run, options, length)
            got = calls[name]()
            expected.setdefault(length, stepper(model, step, options, length)[0]())
            differences[name] = (got - expected[length]).abs().max().item()
    if options.prepare:
        return {"prepared": list(calls)}
    read, read_bytes = machine_peak.read_loop(torch.get_num_threads(), machine_peak.read_bytes())
    timings = timing.interleave(
        calls | {READ: read}, rounds=options.rounds, min_seconds=options.seconds
    )
    return {
        "machine": timing.machine(),
        "read_bytes_per_s": read_bytes / timings.pop(READ).median_s,
        "cache": options.cache,
        "shape": {k: getattr(options, k) for k in ("layers", "heads", "kv_heads", "head_size")},
        "steps": {
            name: {
                "latency": t.to_json(),
                "cache_bytes": sizes[name],
                "difference": differences[name],
            }
            for name, t in timings.items()
        },
    }


def render(result: dict[str, Any]) -> str:
    """A line for each backend and length."""
    rate, lines = result["read_bytes_per_s"], []
    shortest: dict[str, dict[str, Any]] = {}
    for name, of in result["steps"].items():
        backend = name.split()[0]
        base = shortest.setdefault(backend, of)
        t = timing.Timing(**of["latency"])
        more = t.median_s - base["latency"]["median_s"]
        reading = (of["cache_bytes"] - base["cache_bytes"]) / rate
        lines.append(
            [
                name,
                timing.duration(t.median_s),
                timing.spread(t),
                f"{of['cache_bytes'] / 1e6:.0f} MB",
                f"{more / reading:.2f}" if reading else "",
                f"{of['difference']:.1e}",
            ]
        )
    header = ["", "step", "quartiles", "cache", "above the shortest / reading", "difference"]
    return (
        timing.machine_line(result["machine"])
        + f"\n{result['shape']}, cache: {result['cache']}, streaming read {rate / 1e9:.1f} GB/s\n"
        + tables.plain(header, lines)
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_lengths", description=__doc__)
    parser.add_argument("--lengths", type=_numbers, default=[256, 1024, 4096, 8192])
    parser.add_argument("--cache", default="float32", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--against", default="", help="other backends, by comma")
    parser.add_argument("--prepare", action="store_true", help="only tune and compile")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="at least, for each step")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/cache_lengths.json")
    options = parser.parse_args(arguments)
    result = measure(options)
    if not options.prepare:
        print(render(result))
        write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
