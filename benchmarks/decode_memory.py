"""Memory of a language model: loaded, compiled, and while it decodes; eager's beside ours.

    python -m benchmarks.decode_memory --layers 20

A Llama with random weights, a prompt and single tokens with a static cache. Ours has
``weights="frozen"`` and ``free_originals`` after the first tokens. Each variant is a process of its
own, and all sizes are above what the process had before it loaded the model. A first process fills
the cache of kernels, so that no compiler is in memory, unless ``--cold``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, read_json, write_json
from benchmarks.job import ProcessJob, answer_with, launch

if TYPE_CHECKING:
    import torch

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "float32": {},
    "bfloat16 numbers": {},  # in float32, as most checkpoints are loaded
    "int8": {"weight_bits": 8},
    "int4": {"weight_bits": 4},
}
LENGTH = 256
STEPS = 8


@dataclass(frozen=True, slots=True)
class DecodeMemoryJob(ProcessJob):
    """A Llama of so many layers, and how it runs."""

    variant: str
    layers: int
    prompt: int


def run(job: DecodeMemoryJob) -> dict[str, Any]:
    """Bytes above those of the process before it loaded the model, at each stage."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import torch_pruner
    from benchmarks.decoding.torch_models import TorchDecoder

    job.use_threads()
    torch.ones(64, 64) @ torch.ones(64, 64)  # threads, and what they need
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    before = memory()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=job.layers, **sizes)).eval()
    if job.variant == "bfloat16 numbers":
        _round(model)
    found = {"parameters": sum(p.nbytes for p in model.parameters()), "loaded": _since(before)}
    backend = "eager" if job.variant == "eager" else "pruner"
    frozen = {} if backend == "eager" else {"weights": "frozen"}
    decoder = TorchDecoder(model, backend, job.options | frozen, LENGTH)
    _restart_peak()
    _decode(decoder, job.prompt)
    found["compiling_peak"] = _since(before, "VmHWM")
    found["compiled"] = _since(before)
    if backend == "pruner":
        found["freed"] = torch_pruner.free_originals(model)
    _restart_peak()
    _decode(decoder, job.prompt)
    found["decoding_peak"] = _since(before, "VmHWM")
    found["decoding"] = _since(before)
    found["process"] = memory()["VmRSS"]
    return {"status": "ok", "bytes": found}


def _decode(decoder: Any, prompt: int) -> None:
    decoder.prefill(list(range(prompt)))
    decoder.steps(STEPS)


def _round(model: torch.nn.Module) -> None:
    import torch

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())


def memory() -> dict[str, int]:
    """Bytes: resident, of them in no file, and resident at most."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon", "VmHWM")}


def _since(before: dict[str, int], name: str = "RssAnon") -> int:
    return memory()[name] - before["VmRSS" if name == "VmHWM" else name]


def _restart_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the process said that was measured, or the first one's failure."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        settings = {"cache_dir": folder} | backend_options(options) | VARIANTS[variant]
        job = DecodeMemoryJob(
            variant, options.layers, options.prompt, options=settings, threads=options.threads
        )
        module = "benchmarks.decode_memory"
        if variant != "eager" and not options.cold:
            first = launch(job, module=module)
            if first["status"] != "ok":
                return first
        return launch(job, module=module)


HEADER = ["", "parameters", "loaded", "peak while compiled", "compiled", "freed"]
HEADER += ["peak while decoding", "decoding", "over the parameters"]


def render(results: dict[str, Any], *, markdown: bool = False) -> str:
    rows = []
    for name, r in results.items():
        if r["status"] != "ok":
            rows.append([name, r["status"], r["error"][:60], *[""] * (len(HEADER) - 3)])
            continue
        of = r["bytes"]
        order = ("parameters", "loaded", "compiling_peak", "compiled", "freed")
        order += ("decoding_peak", "decoding")
        cells = [f"{of[k] / 1e6:.0f} MB" if k in of else "" for k in order]
        rows.append([name, *cells, f"{of['decoding'] / of['parameters']:.2f}"])
    return (tables.markdown if markdown else tables.plain)(HEADER, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_memory", description=__doc__)
    parser.add_argument("--layers", type=int, default=20, help="20: 1.3 GB of float32")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--variants", default=",".join(VARIANTS), metavar="NAME,...")
    parser.add_argument("--cold", action="store_true", help="kernels are built in that process")
    add_tuning(parser)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/decode_memory.json")
    options = parser.parse_args(arguments)
    content = read_json(options.out) or {"results": {}}
    for name in options.variants.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        content["results"][name] = measure(name, options)
        write_json(options.out, content | {"machine": timing.machine()})
    results = {name: content["results"][name] for name in VARIANTS if name in content["results"]}
    print(render(results, markdown=bool(options.out)))
    return 0 if all(r["status"] == "ok" for r in results.values()) else 1


def _child(text: str, answer: Path) -> None:
    job = DecodeMemoryJob.from_json(text)
    answer_with(lambda: run(job), answer)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):  # started by ``launch``
        _child(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
