"""``model.generate`` of transformers as users call it: tokens per second beside eager and inductor.

``model.forward`` is compiled, prefill and decoding alike. ``static``: the key/value cache has its
length from the start. ``growing``: transformers' default, one position longer with every token.
Greedy tokens must be eager's. A figure counts a whole call: prompt, sampling and Python included.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks import reports, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.job import timed

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, HEADS, INTERMEDIATE, POSITIONS = 768, 12, 3072, 1024
WARM_UP = 3  # sizes that a growing cache comes to are compiled when they come again


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=POSITIONS,
    )
    return LlamaForCausalLM(config)


def gpt2(layers: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=layers))


NETWORKS: dict[str, Callable[[int], Any]] = {"llama": llama, "gpt2": gpt2}
CACHES = {"static": {"cache_implementation": "static"}, "growing": {}}


def build(network: str, layers: int) -> Any:
    """Random weights; the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[network](layers).eval()


def generator(
    network: str, cache: str, backend: str, prompt: torch.Tensor, options: argparse.Namespace
) -> Callable[[], torch.Tensor]:
    """One contestant with a model of its own; a call continues the prompt."""
    model = build(network, options.layers)
    if backend != "eager":
        model.forward = torch.compile(
            model.forward,
            backend=backend,
            # One graph for the prompt's length and one for single tokens; neither is dynamic.
            dynamic=False if cache == "static" else None,
            options=backend_options(options) if backend == "pruner" else None,
        )
    length = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 1}

    @torch.no_grad()
    def generate() -> torch.Tensor:
        return model.generate(prompt, **length, **greedy, **CACHES[cache])

    return generate


def measure(network: str, cache: str, options: argparse.Namespace) -> dict[str, Any]:
    """First calls, whether tokens are eager's, and latencies in turns."""
    torch._dynamo.reset()
    prompt = torch.randint(1000, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    found: dict[str, dict[str, Any]] = {}
    expected = None
    for backend in (b for b in ("eager", *options.against.split(","), "pruner") if b):
        calls[backend] = generator(network, cache, backend, prompt, options)
        tokens, first_s = timed(calls[backend])
        assert isinstance(tokens, torch.Tensor)
        expected = tokens if expected is None else expected
        same = bool(torch.equal(tokens, expected))
        for _ in range(WARM_UP):
            same = same and bool(torch.equal(calls[backend](), expected))
        report = reports.last(backend)
        found[backend] = {
            "first_call_s": first_s,
            "same_tokens": same,
            "report": reports.summary(report) if report else None,
        }
    timings = timing.in_turns(calls, rounds=options.rounds, min_seconds=options.seconds)
    for name, t in timings.items():
        found[name]["latency"] = t.to_json()
    return {"network": network, "cache": cache, "tokens": options.tokens, "backends": found}


def render(result: dict[str, Any]) -> str:
    """A line for each network, cache and contestant."""
    lines = []
    for row in result["rows"]:
        base = row["backends"]["pruner"]["latency"]["median_s"]
        for name, of in row["backends"].items():
            t = timing.Timing(**of["latency"])
            lines.append(
                [
                    f"{row['network']}, {row['cache']}, {name}",
                    f"{row['tokens'] / t.median_s:.1f}",
                    timing.duration(t.median_s),
                    timing.spread(t),
                    f"{t.median_s / base:.2f}x",
                    "eager's" if of["same_tokens"] else "OTHERS",
                    timing.duration(of["first_call_s"]),
                ]
            )
    header = ["", "tokens/s", "a call", "quartiles", "over pruner's", "tokens", "first call"]
    return tables.plain(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="names, by comma")
    parser.add_argument("--caches", default=",".join(CACHES), help="static, growing or both")
    parser.add_argument("--against", default="inductor", help="other backends, by comma")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=64, help="tokens to begin with")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to add")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.2, help="at least, for each contestant")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/serving.json")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [
        measure(network, cache, options)
        for cache in options.caches.split(",")
        for network in options.networks.split(",")
    ]
    result = {"machine": timing.machine(), "options": backend_options(options), "rows": rows}
    print(render(result))
    write_json(options.out, result)
    return 0 if all(of["same_tokens"] for row in rows for of in row["backends"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
