"""Whether ``objective="energy"`` can be had: said before anything is compiled, and not hours later.

A search that may run needs a meter, whatever the cache has: what it lacks is not known until graphs
are cut, and a size that comes later is no time to find out. What was tuned elsewhere needs none:
``on_miss="error"`` and ``"fallback"`` choose by the energy that the cache has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.devices import device_for
from torch_pruner.exc import MeterError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_pruner.config import Config

ELSE = "; on_miss='error' runs what was tuned with a meter, objective='memory' needs none"


def expect(inputs: Iterable[object], config: Config) -> None:
    """Return if the energy of kernels for graphs with these inputs can be measured, or need not be.

    Raises ``OptionError`` that names what is missing.
    """
    if config.objective != "energy" or config.on_miss != "tune":
        return
    if config.effort == "none":
        problem = "'energy' is measured, and effort='none' measures nothing; use 'quick' or 'full'"
        raise OptionError("objective", problem + ELSE)
    where = {v.device for v in inputs if isinstance(v, torch.Tensor)} or {torch.device("cpu")}
    # Where there is a GPU, what lies on the CPU are mostly scalars.
    for device in sorted({d for d in where if d.type != "cpu"} or where, key=str):
        source = device_for(device, config).meter()
        if source is None:
            name = f"executor={config.executor!r}" if config.executor == "rpc" else str(device)
            raise OptionError("objective", f"'energy' needs a meter, and {name} has none" + ELSE)
        try:
            source.open()
        except MeterError as err:
            raise OptionError("objective", f"'energy' needs a meter: {err}" + ELSE) from err
