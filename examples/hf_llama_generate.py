"""Generation with a Llama from ``transformers``: float32, bfloat16 checkpoints, int8 and int4.

Prefill and decoding are compiled, with a static cache. The weights are random, nothing is
downloaded. ``lossless`` has weights that are bfloat16 numbers, as those of most checkpoints, loaded
as float32: greedy tokens must equal eager's there, as in float32. Int8 and int4 round the weights.
Each runs in a process of its own, so that its memory is its own.

    python examples/hf_llama_generate.py
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "lossless": {},
    "int8": {"weight_bits": 8},
    "int4": {"weight_bits": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--prompt", type=int, default=64, help="tokens to begin with")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to add")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    arguments = parser.parse_args()
    # Copies of this process, which has imported everything and has computed nothing yet.
    processes = multiprocessing.get_context("fork")
    for name in VARIANTS if arguments.backend == "pruner" else ["float32"]:
        process = processes.Process(target=run, args=(name, arguments))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: exit status {process.exitcode}")


def run(name: str, arguments: argparse.Namespace) -> None:
    """One line of the table."""
    empty = resident_bytes()
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": arguments.layers})
    model = LlamaForCausalLM(config).eval()
    if name != "float32":
        model = model.bfloat16().float()
    prompt = torch.randint(config.vocab_size, (1, arguments.prompt))

    generate(model, prompt, arguments.tokens)  # what the first call of all sets up is nobody's time
    expected, eager_rate = generate(model, prompt, arguments.tokens)
    eager_bytes = resident_bytes() - empty
    # One graph for the prompt's length and one for single tokens; neither is dynamic.
    options = {"options": VARIANTS[name]} if arguments.backend == "pruner" else {}
    model.forward = torch.compile(
        model.forward, backend=arguments.backend, dynamic=False, **options
    )
    start = time.perf_counter()
    generate(model, prompt, arguments.tokens)
    first_s = time.perf_counter() - start
    tokens, rate = generate(model, prompt, arguments.tokens)
    same = int((tokens == expected)[0, arguments.prompt :].cumprod(0).sum())
    if name in ("float32", "lossless") and same != arguments.tokens:
        raise SystemExit("other tokens than eager's")
    print(
        f"{name:>9}: {rate:.0f} tokens/s (eager {eager_rate:.0f}), "
        f"{(resident_bytes() - empty) / 1e6:.0f} MB (eager {eager_bytes / 1e6:.0f}); "
        f"the first {same} of {arguments.tokens} greedy tokens are eager's; "
        f"first run, with tuning: {first_s:.1f} s",
        flush=True,
    )


def resident_bytes() -> int:
    """Of this process, without pages of files."""
    gc.collect()
    fields = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@torch.no_grad()
def generate(
    model: LlamaForCausalLM, prompt: torch.Tensor, count: int
) -> tuple[torch.Tensor, float]:
    """The greedy continuation, and tokens per second, the prompt's part included."""
    settings = {"cache_implementation": "static", "do_sample": False, "pad_token_id": 0}
    start = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **settings)
    return tokens, count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
