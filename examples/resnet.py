"""ResNet-50 on one image: what is compiled, how exact it is, how fast it is.

``torch_pruner.explain`` answers the first question before anything is tuned. The weights are
random, nothing is downloaded.

    python examples/resnet.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--effort", default="quick", choices=["none", "quick", "full"])
    arguments = parser.parse_args()
    ours = arguments.backend == "pruner"

    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).eval()
    image = torch.randn(1, 3, 224, 224)

    if ours:
        import torch_pruner

        print(torch_pruner.explain(model, (image,)))

    options = {"effort": arguments.effort} if ours else None
    compiled = torch.compile(model, backend=arguments.backend, options=options)
    with torch.no_grad():
        start = time.perf_counter()
        scores = compiled(image).logits
        print(f"first call, with tuning: {time.perf_counter() - start:.1f} s")
        expected = model(image).logits
        difference = ((scores - expected).abs().max() / expected.abs().max()).item()
        print(f"largest difference from eager, relative to the largest output: {difference:.1e}")
        print(f"same class as eager: {bool(scores.argmax() == expected.argmax())}")

        samples: dict[str, list[float]] = {"eager": [], arguments.backend: []}
        for _ in range(15):
            for name, function in (("eager", model), (arguments.backend, compiled)):
                function(image)
                start = time.perf_counter()
                function(image)
                samples[name].append(time.perf_counter() - start)
    for name, values in samples.items():
        print(f"{name:>10}: median {1e3 * statistics.median(values):.1f} ms")


if __name__ == "__main__":
    main()
