"""Greedy decoding with a static key/value cache: tokens per second against the memory's speed.

Llama 12x768 with its output layer, batch 1, one token per step. A step reads every weight once, so
the rate of a streaming read, which takes its turns with the contestants, bounds it. The contestant
``pruner-int8`` has the option ``int8_weights`` and reads a quarter of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks import accuracy, machine_peak, reports, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.job import compiled, timed

if TYPE_CHECKING:
    from collections.abc import Callable

READ = "streaming read"
INT8 = "pruner-int8"
HEADS, HIDDEN, INTERMEDIATE = 12, 768, 3072


def build(layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights; the same on every call."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=INTERMEDIATE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval().to(dtype)


def weight_bytes(model: LlamaForCausalLM, *, int8: bool = False) -> int:
    """What a step must read: all parameters but the embeddings, of which it takes one row.

    ``int8``: with the option ``int8_weights``, matrices as bytes with a float32 scale by column.
    """
    read = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    if int8:
        return sum(p.numel() + 4 * p.shape[0] if p.dim() == 2 else p.nbytes for p in read)
    return sum(p.nbytes for p in read)


@dataclass(slots=True)
class Decoder:
    """One backend with a cache of its own; calling it decodes one token."""

    step: Callable[..., torch.Tensor]
    cache: StaticCache
    length: int
    position: int = 0
    token: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int64))

    def __call__(self) -> torch.Tensor:
        at = torch.tensor([[self.position]])
        logits = self.step(self.token, at, self.cache)
        self.token = logits[:, -1:].argmax(-1)
        self.position += 1
        if self.position == self.length:  # go on from the start: a step costs the same anywhere
            self.restart()
        return logits

    def restart(self) -> None:
        self.position = 0
        self.cache.reset()


def decoder(model: LlamaForCausalLM, backend: str, options: dict[str, Any], length: int) -> Decoder:
    """``length`` is that of the cache, all of which every step attends to."""
    config, dtype = model.config, model.dtype
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(1, HEADS, HIDDEN // HEADS, dtype, torch.device("cpu"))

    def step(token: torch.Tensor, position: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        return model(
            input_ids=token, position_ids=position, past_key_values=cache, use_cache=True
        ).logits

    if backend == INT8:
        backend, options = "pruner", options | {"int8_weights": True}
    return Decoder(compiled(step, backend, options), cache, length)


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """First calls, differences over a few tokens, latencies in turns, and the rate of reading."""
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    model = build(options.layers, getattr(torch, options.precision))
    backends = list(dict.fromkeys(("eager", *options.against.split(","), "pruner", INT8)))
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    expected: list[torch.Tensor] = []
    for backend in (b for b in backends if b):
        this = decoder(model, backend, backend_options(options), options.length)
        first, seconds = timed(this)
        report = reports.last(backend)
        logits = [first]
        for k in range(options.check - 1):  # all are given the tokens that the first one chose
            this.token = (expected or logits)[k][:, -1:].argmax(-1)
            logits.append(this())
        expected = expected or logits
        found[backend] = {
            "first_call_s": seconds,
            "weight_bytes": weight_bytes(model, int8=backend == INT8),
            "difference": accuracy.difference(logits, expected),
            "report": reports.summary(report) if report else None,
        }
        this.restart()
        calls[backend] = this
    size = weight_bytes(model)
    read, read_bytes = machine_peak.read_loop(threads, max(size, machine_peak.read_bytes()))
    timings = timing.interleave(
        calls | {READ: read}, rounds=options.rounds, min_seconds=options.seconds
    )
    rate = read_bytes / timings.pop(READ).median_s
    for name, t in timings.items():
        found[name]["latency"] = t.to_json()
    return {
        "machine": timing.machine(),
        "weight_bytes": size,
        "read_bytes_per_s": rate,
        "layers": options.layers,
        "length": options.length,
        "precision": options.precision,
        "backends": found,
    }


def render(result: dict[str, Any]) -> str:
    """A line for each backend."""
    whole, rate = result["weight_bytes"], result["read_bytes_per_s"]
    lines = []
    for name, of in result["backends"].items():
        t, size = timing.Timing(**of["latency"]), of["weight_bytes"]
        lines.append(
            [
                name,
                timing.duration(t.median_s),
                timing.spread(t),
                f"{1 / t.median_s:.1f}",
                f"{size / t.median_s / 1e9:.1f}",
                f"{100 * size / t.median_s / rate:.0f} %",
                f"{of['difference']:.1e}",
                timing.duration(of["first_call_s"]),
            ]
        )
    header = ["", "per token", "quartiles", "tokens/s", "weights, GB/s", "of the read"]
    header += ["difference", "first call"]
    return (
        f"{result['layers']} layers, cache of {result['length']}, {result['precision']}: "
        f"{whole / 1e6:.0f} MB of weights per step; streaming read {rate / 1e9:.1f} GB/s\n"
        + tables.plain(header, lines)
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=256, help="of the cache")
    parser.add_argument("--against", default="inductor", help="other backends, by comma")
    parser.add_argument("--check", type=int, default=4, help="tokens whose scores are compared")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="at least, for each backend")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/decode.json")
    options = parser.parse_args(arguments)
    result = measure(options)
    print(render(result))
    write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
