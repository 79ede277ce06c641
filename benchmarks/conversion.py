"""A network as an ONNX file, written in a process of its own: exporting is slow and may hang.

In: a ``Conversion`` as JSON on the command line. Out: the file, its weights beside it, and an
answer for ``job.launch``. Inputs are positional and outputs are the network's tensors in order,
because runtimes know neither keywords nor classes.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks import models
from benchmarks.job import answer_with


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to write and where. ``widen``: in float32, with the weights of ``precision``."""

    network: str
    precision: str
    batch: int
    layers: int | None
    path: str
    widen: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Positional(nn.Module):
    """A network that takes its inputs by position and returns a tuple of tensors."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network = network
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.names, inputs, strict=True)) if self.names else inputs
        return tuple(tensors(models.call(self.network, named)))


def tensors(outputs: object) -> list[torch.Tensor]:
    """The tensors among a network's outputs, in order."""
    return [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]


def positional(inputs: models.Inputs) -> tuple[torch.Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else tuple(inputs.values())


def run(job: Conversion) -> dict[str, Any]:
    module, inputs = models.load(
        job.network, models.PRECISIONS[job.precision], job.batch, job.layers
    )
    names = () if isinstance(inputs, tuple) else tuple(inputs)
    values = positional(inputs)
    if job.widen:
        module = module.float()
        values = tuple(x.float() if x.is_floating_point() else x for x in values)
    start = time.perf_counter()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Positional(module, names).eval(),
            values,
            job.path,
            dynamo=True,
            external_data=True,  # one file holds two gigabytes at most
            verbose=False,
        )
    return {"status": "ok", "export_s": time.perf_counter() - start}


def main() -> None:
    job = Conversion(**json.loads(sys.argv[1]))
    answer_with(lambda: run(job), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
