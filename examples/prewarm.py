"""Tune before deployment, never in a request: ``tune`` once, then serve with ``on_miss="error"``.

The cache lives in a temporary directory here, so that the example shows the same thing each time.
In production, give the directory to both sides, or ship it with ``torch_pruner.save_bundle``.

    python examples/prewarm.py
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

SHAPES = ((1, 256), (16, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner", help="another one skips the first two steps")
    backend = parser.parse_args().backend

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).eval()
    with tempfile.TemporaryDirectory(prefix="prewarm-") as cache, torch.no_grad():
        options = None
        if backend == "pruner":
            options = {"cache_dir": cache, "on_miss": "error"}
            refuse_cold_cache(model, options)
            prewarm(model, cache)
        serve(torch.compile(model, backend=backend, options=options, dynamic=False), model)


def refuse_cold_cache(model: nn.Module, options: dict[str, str]) -> None:
    """With an empty cache the production setting refuses to compile, and says what is missing."""
    strict = torch.compile(model, backend="pruner", options=options)
    try:
        strict(torch.randn(SHAPES[0]))
    except BackendCompilerFailed as failure:  # torch wraps what a backend raises, here `CacheMiss`
        reason = failure.inner_exception
        print(f"cold cache refused: {type(reason).__name__}: {reason}")
    else:
        raise SystemExit("expected a refusal: the cache is empty")
    torch.compiler.reset()


def prewarm(model: nn.Module, cache: str) -> None:
    """What a build job runs: every shape that will be served, once."""
    import torch_pruner

    inputs = [(torch.randn(shape),) for shape in SHAPES]
    start = time.perf_counter()
    report = torch_pruner.tune(model, inputs, options={"cache_dir": cache, "time_budget_s": 10.0})
    print(f"tuned in {time.perf_counter() - start:.1f} s:\n{report}")


def serve(compiled: nn.Module, model: nn.Module) -> None:
    """What a server runs: it compiles from the cache and never tunes."""
    for shape in SHAPES:
        x = torch.randn(shape)
        start = time.perf_counter()
        y = compiled(x)
        first = time.perf_counter() - start
        start = time.perf_counter()
        compiled(x)
        second = time.perf_counter() - start
        difference = (y - model(x)).abs().max().item()
        print(
            f"input {shape}: first call {1e3 * first:.0f} ms, then {1e6 * second:.0f} us, "
            f"largest difference from eager {difference:.1e}"
        )


if __name__ == "__main__":
    main()
