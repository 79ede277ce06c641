"""Start without tracing: torch saves the compiled model, a fresh process loads it and runs.

``torch.compile`` captures a model anew in every process. ``.aot_compile()`` of torch keeps what was
captured in a file, with our graph in it; kernels stay in the cache, so ship both. The file is a
pickle, as everything that torch saves: load only what you made. It holds no weights, and no guards
here: call it with inputs of the shapes and types that it was saved for.

    python examples/save_and_load.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    """What both sides have: the code and the weights. A bare ``nn.Sequential`` cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=Path, metavar="FILE", help="what the second process runs")
    file = parser.parse_args().load
    if file is not None:
        load(file)
        return
    with tempfile.TemporaryDirectory(prefix="saved-") as folder:
        # The second process finds its kernels by this, and must not tune.
        cache = {"TORCH_PRUNER_CACHE_DIR": str(Path(folder) / "cache")}
        os.environ.update(cache)
        file = Path(folder) / "model.compiled"
        save(file)
        done = subprocess.run(
            [sys.executable, __file__, "--load", str(file)],
            env={**os.environ, "TORCH_PRUNER_ON_MISS": "error"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the second process failed:\n{done.stderr}")
        print("second process:", done.stdout.strip())


@torch.no_grad()
def save(file: Path) -> None:
    """What the build machine runs."""
    start = time.perf_counter()
    model = make_model()
    # Guards on what only this process has could not be written.
    options = {"time_budget_s": 5.0, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = torch.compile(model, backend="pruner", fullgraph=True, options=options)
    compiled.forward.aot_compile(((torch.randn(16, 256),), {})).save_compiled_function(str(file))
    seconds = time.perf_counter() - start
    print(f"tuned and saved in {seconds:.1f} s: {file.stat().st_size / 1024:.0f} KiB")


@torch.no_grad()
def load(file: Path) -> None:
    """What a serving process runs."""
    import torch_pruner.dynamo.backend  # noqa: F401  # imports are not what is shown

    model, x = make_model(), torch.randn(16, 256)
    start = time.perf_counter()
    with file.open("rb") as opened:
        compiled = torch.compiler.load_compiled_function(opened)
    result = compiled(model, x)
    seconds = time.perf_counter() - start
    difference = (result - model(x)).abs().max().item()
    print(json.dumps({"first result after": f"{seconds:.2f} s", "difference": difference}))


if __name__ == "__main__":
    main()
