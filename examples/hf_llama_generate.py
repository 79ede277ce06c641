"""Generation with a Llama from ``transformers``: prefill and decoding compiled, a static cache.

The weights are random, nothing is downloaded. Greedy tokens must equal eager's.

    python examples/hf_llama_generate.py
"""

from __future__ import annotations

import argparse
import time

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--prompt", type=int, default=64, help="tokens to begin with")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to add")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompt = torch.randint(SIZES["vocab_size"], (1, arguments.prompt))

    generate(model, prompt, arguments.tokens)  # what the first call of all sets up is nobody's time
    expected, eager_rate = generate(model, prompt, arguments.tokens)
    # One graph for the prompt's length and one for single tokens; neither is dynamic.
    model.forward = torch.compile(model.forward, backend=arguments.backend, dynamic=False)
    start = time.perf_counter()
    generate(model, prompt, arguments.tokens)
    print(f"first run, with tuning: {time.perf_counter() - start:.1f} s")
    tokens, rate = generate(model, prompt, arguments.tokens)
    if not torch.equal(tokens, expected):
        raise SystemExit("other tokens than eager's")
    print(f"{arguments.tokens} greedy tokens, the same as eager's")
    print(f"{'eager':>10}: {eager_rate:.0f} tokens/s")
    print(f"{arguments.backend:>10}: {rate:.0f} tokens/s")


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
