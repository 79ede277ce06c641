"""Steps of decoding on the GPU at hand: what a token takes, beside reading the weights.

    python -m benchmarks.gpu.decode --models llama,tinyllama --out decode.json

Batch 1, greedy, a static cache, random weights in float16. Contestants of a model take turns in one
process, so device memory holds its weights, and what is packed or rounded beside them. A turn is
some tokens, timed until the device is done: what Python costs counts. ``read`` is a sum over as
many bytes as a step of the float16 model reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.decoding import shapes
from benchmarks.decoding.torch_models import TorchDecoder
from benchmarks.gpu.networks import prepare
from benchmarks.job import reason, timed

if TYPE_CHECKING:
    from collections.abc import Mapping

READ = "read"


@dataclass(frozen=True, slots=True)
class Contestant:
    """``runs``: its name in ``benchmarks.gpu.networks``; ``bits``: of weights that we round."""

    runs: str
    bits: int | None = None

    def decoder(self, model: Any, options: Mapping[str, Any], length: int) -> TorchDecoder:
        given = {**options, **({"weight_bits": self.bits} if self.bits else {})}
        made = TorchDecoder(model, partial(prepare, self.runs), given, length)
        made.rounded = self.bits is not None
        return made


CONTESTANTS = {
    "eager": Contestant("eager"),
    "inductor": Contestant("inductor"),
    "inductor-graphs": Contestant("inductor-graphs"),
    "pruner": Contestant("pruner"),
    "pruner-graphs": Contestant("pruner-graphs"),
    "pruner-8": Contestant("pruner-graphs", 8),
    "pruner-4": Contestant("pruner-graphs", 4),
}


def read_s(nbytes: int, device: torch.device, rounds: int = 5) -> float:
    """Seconds to read so many bytes once, nothing of which a cache holds from before."""
    words = torch.zeros(max(nbytes // 4, 1), dtype=torch.int32, device=device)

    def read() -> None:
        words.sum()
        _wait(device)

    return min([timed(read)[1] for _ in range(rounds)][1:])


def measure(name: str, options: argparse.Namespace, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a model: of each contestant seconds a token, or why there are none."""
    device = torch.device(options.device)
    model = shapes.build(name, options.layers).half().to(device)
    prompt = np.random.default_rng(0).integers(1000, size=options.prompt).tolist()
    found: dict[str, dict[str, Any]] = {}
    decoders: dict[str, TorchDecoder] = {}
    exact: np.ndarray | None = None
    for contestant in options.contestants:
        try:
            decoder = CONTESTANTS[contestant].decoder(model, ours, options.length)
            scores, seconds = timed(partial(decoder.fill, prompt))
            exact = scores if exact is None else exact
            found[contestant] = {"ready_s": seconds, "difference": _difference(scores, exact)}
            decoders[contestant] = decoder
        except Exception as error:  # one that cannot is a cell of the table
            found[contestant] = {"reason": reason(error)}
    turns: dict[str, list[float]] = {contestant: [] for contestant in decoders}
    for _ in range(options.rounds):
        for contestant, decoder in decoders.items():
            turns[contestant].append(_turn(decoder, prompt, options.tokens, device))
    for contestant, seconds_each in turns.items():
        found[contestant]["token_s"] = statistics.median(seconds_each)
        found[contestant]["turns"] = seconds_each
    nbytes = shapes.weight_bytes(model)
    return {"contestants": found, "weight_bytes": nbytes, "read_s": read_s(nbytes, device)}


def _turn(decoder: TorchDecoder, prompt: list[int], tokens: int, device: torch.device) -> float:
    """Seconds of a token, of some after the prompt; the first is not counted."""
    decoder.rewind(prompt)
    decoder.step()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(tokens):
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        decoder.step()
    _wait(device)
    return (time.perf_counter() - begin) / tokens


def _difference(scores: np.ndarray, exact: np.ndarray) -> float:
    """Of the largest score of eager in float16."""
    return float(np.abs(scores - exact).max() / np.abs(exact).max())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def render(content: Mapping[str, Any]) -> str:
    """A line for each contestant of each model."""
    header = ["model", "runs", "a token", f"{READ} takes of it", "differs by", "ready after"]
    lines = []
    for model, row in content["rows"].items():
        lines.append([model, READ, timing.duration(row["read_s"]), "", "", ""])
        for name, of in row["contestants"].items():
            if "token_s" not in of:
                lines.append([model, name, of["reason"], "", "", ""])
                continue
            share = f"{row['read_s'] / of['token_s']:.2f}"
            ready = timing.duration(of["ready_s"])
            cells = timing.duration(of["token_s"]), share, f"{of['difference']:.1e}", ready
            lines.append([model, name, *cells])
    return tables.markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    ours = backend_options(options)
    ours.pop("threads", None)
    content: dict[str, Any] = {"machine": timing.machine(), "rows": {}}
    for name in options.models:
        content["rows"][name] = measure(name, options, ours)
        write_json(options.out, content)
    print(render(content))
    failed = [
        f"{model} {name}: {of['reason']}"
        for model, row in content["rows"].items()
        for name, of in row["contestants"].items()
        if "reason" in of
    ]
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.decode", description=__doc__)
    parser.add_argument("--models", type=names, default=["llama"], metavar="NAME,...")
    parser.add_argument("--contestants", type=names, default=list(CONTESTANTS))
    parser.add_argument("--layers", type=int, help="in place of the model's own number")
    parser.add_argument("--length", type=int, default=512, help="of the cache, in tokens")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the first turn")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="for a try without a GPU: cpu")
    parser.add_argument("--out", help="write JSON there")
    add_tuning(parser)
    options = parser.parse_args(arguments)
    if unknown := {*options.contestants} - CONTESTANTS.keys():
        parser.error(f"no contestants: {', '.join(sorted(unknown))}")
    if unknown := {*options.models} - shapes.SHAPES.keys():
        parser.error(f"no models: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
