"""The devices that graphs are compiled for, in order: the one place that knows their names.

In: where tensors are, or a name. Out: a ``Device`` (see ``base``), which gives a compiler and knows
how its kernels are called. Another device is a file here and a line in ``NAMES``.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from torch_pruner.devices.base import parsed
from torch_pruner.devices.cpu import EagerDevice
from torch_pruner.exc import OptionError

if TYPE_CHECKING:
    from torch import fx

    from torch_pruner.compiler.bundles import BundleDevice
    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device

NAMES = (
    "fleet",
    "cuda",
    "absent",
    "cpu",
)
"""Files of this folder, each with a ``DEVICE``. The first that claims a graph or a name has it."""

DEVICES: tuple[type[Device], ...] = tuple(
    import_module(f"{__name__}.{name}").DEVICE for name in NAMES
)


def device_for(where: torch.device, config: Config) -> Device:
    """What graphs that live at ``where`` are compiled for: it, or a card that ``config`` names.

    Eager runs what nobody claims. Raises ``OptionError`` for a card of another kind than the device
    at hand is.
    """
    for kind in DEVICES:
        if (found := kind.claim(where, config)) is not None:
            return found
    return EagerDevice(where)


def bundle_device(name: str) -> BundleDevice:
    """The device of a bundle: "cpu", "cuda", "cuda:1", or the name of a card that is not at hand.

    Raises ``OptionError`` for anything else, and for a GPU that nothing is compiled for.
    """
    for kind in DEVICES:
        if (found := kind.named(name)) is not None:
            return found
    if parsed(name) is not None:
        raise OptionError("device", f"nothing is compiled for {name!r} on this machine")
    known = ", ".join(dict.fromkeys(n for kind in reversed(DEVICES) for n in kind.names))
    raise OptionError("device", f"expected one of {known}, not {name!r}")


def settings() -> list[str]:
    """What torch is set to now that changes what is generated for some device, for keys."""
    return [text for kind in DEVICES for text in kind.settings()]


def torch_device_of(gm: fx.GraphModule) -> torch.device:
    """Where a graph lives: where most of its values are, else the CPU.

    One GPU, if a GPU has as many as the CPU.
    """
    found: Counter[torch.device] = Counter()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            found[value.device] += 1
    order = sorted(found, key=lambda d: (-found[d], d.type == "cpu", str(d)))
    return order[0] if order else torch.device("cpu")
