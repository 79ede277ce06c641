"""What a row of the benchmarks is: a network, and how its inputs are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.models.init import randomise

if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

BOTH = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Network:
    """One row of the tables.

    ``factory`` takes ``(layers, attention)``; for a network that has no repeated layers to leave
    out, ``depth`` is None. ``default_layers`` is less than ``depth`` where the full network does
    not fit in the memory of a small machine: layers repeat, so the tuning tasks are the same.
    ``kind``: ``language`` models, ``convolution`` networks, and ``vision`` transformers.
    ``in_papers``: whether it is a row of the papers' tables.
    """

    name: str
    title: str
    factory: Callable[[int, str], nn.Module]
    inputs: Callable[[int, torch.dtype], Inputs]
    precisions: tuple[str, ...] = ("float32",)
    batches: tuple[int, ...] = (1,)
    depth: int | None = None
    default_layers: int | None = None
    kind: str = "vision"
    in_papers: bool = True

    def build(self, layers: int | None = None, attention: str = "sdpa") -> nn.Module:
        """The network with weights from torch's global generator."""
        if layers is not None and self.depth is None:
            message = f"{self.name} has no repeated layers: leave out `layers`"
            raise ValueError(message)
        return self.factory(layers or self.default_layers or self.depth or 0, attention)


def whole(builder: Callable[[], nn.Module]) -> Callable[[int, str], nn.Module]:
    """A network without layers to leave out, with the weights that its modules begin with."""

    def factory(_layers: int, _attention: str) -> nn.Module:
        return builder()

    return factory


def convolutional(builder: Callable[[], nn.Module]) -> Callable[[int, str], nn.Module]:
    def factory(_layers: int, _attention: str) -> nn.Module:
        network = builder()
        randomise(network, torch.default_generator)
        return network

    return factory


def normal(*shape: int) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, dtype: torch.dtype) -> Inputs:
        return (torch.randn(batch, *shape).to(dtype),)

    return inputs


def tokens(vocabulary: int, length: int = 128) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, _dtype: torch.dtype) -> Inputs:
        return {"input_ids": torch.randint(vocabulary, (batch, length))}

    return inputs


def pixels(rows: int, columns: int = 0) -> Callable[[int, torch.dtype], Inputs]:
    def inputs(batch: int, dtype: torch.dtype) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, rows, columns or rows).to(dtype)}

    return inputs


def latents(batch: int, dtype: torch.dtype) -> Inputs:
    """What a step of Stable Diffusion takes: latents, the time step, and a text of 77 tokens."""
    latents, text = torch.randn(batch, 4, 32, 32), torch.randn(batch, 77, 768)
    return latents.to(dtype), torch.full((batch,), 500.0), text.to(dtype)


def step_and_class(batch: int, dtype: torch.dtype) -> Inputs:
    """What a step of a diffusion transformer takes: latents, the time step and a class."""
    latents = torch.randn(batch, 4, 32, 32).to(dtype)
    return latents, torch.full((batch,), 500.0), torch.randint(1000, (batch,))


def positions(vocabulary: int, length: int) -> Callable[[int, torch.dtype], Inputs]:
    """Tokens without a name."""

    def inputs(batch: int, _dtype: torch.dtype) -> Inputs:
        return (torch.randint(vocabulary, (batch, length)),)

    return inputs


def graph(batch: int, dtype: torch.dtype) -> Inputs:
    """``batch`` graphs side by side, of 2,000 nodes with 256 features and 16,000 edges."""
    nodes, edges = 2000 * batch, 16000 * batch
    source, target = torch.randint(nodes, (2, edges))
    return torch.randn(nodes, 256).to(dtype), source, target


def clicks(batch: int, dtype: torch.dtype) -> Inputs:
    """Requests of a recommender: 13 numbers and 26 categories."""
    return torch.randn(batch, 13).to(dtype), torch.randint(20000, (batch, 26))


def image_network(
    name: str, title: str, builder: Callable[[], nn.Module], *shape: int, **row: Any
) -> Network:
    """A convolution network of images of this shape; ``row``: what else the table says of it."""
    return Network(
        name, title, convolutional(builder), normal(*shape), **{"kind": "convolution", **row}
    )
