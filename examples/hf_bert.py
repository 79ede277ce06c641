"""A small BERT from the ``transformers`` package, compiled with one line.

The weights are random, nothing is downloaded; with your own model, load it with
``AutoModel.from_pretrained`` instead.

    python examples/hf_bert.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModel, BertConfig

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--length", type=int, default=128, help="tokens")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModel.from_config(BertConfig(**SIZES, use_cache=False)).eval()
    tokens = torch.randint(model.config.vocab_size, (1, arguments.length))
    compiled = torch.compile(model, backend=arguments.backend)

    with torch.no_grad():
        start = time.perf_counter()
        hidden = compiled(tokens).last_hidden_state
        print(f"first call, with tuning: {time.perf_counter() - start:.1f} s")
        expected = model(tokens).last_hidden_state
        difference = ((hidden - expected).abs().max() / expected.abs().max()).item()
        print(f"largest difference from eager, relative to the largest output: {difference:.1e}")

        samples: dict[str, list[float]] = {"eager": [], arguments.backend: []}
        for _ in range(20):
            for name, function in (("eager", model), (arguments.backend, compiled)):
                function(tokens)
                start = time.perf_counter()
                function(tokens)
                samples[name].append(time.perf_counter() - start)
    for name, values in samples.items():
        print(f"{name:>10}: median {1e3 * statistics.median(values):.1f} ms")

    if arguments.backend == "pruner":
        import torch_pruner

        print(torch_pruner.last_report())
        print("Run it again: the kernels now come from the cache.")


if __name__ == "__main__":
    main()
