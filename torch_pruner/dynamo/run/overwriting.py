"""Results that are written over inputs, of which they are new values: see ``graph.overwrites``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from torch_pruner.dynamo.lower.tensors import TensorSpec
    from torch_pruner.graph.memory import Slot

    # Number and slot of an output, what makes it, shape, strides and dtype, as ``RegionCall`` has.
    Made = tuple[
        int, int, Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...], torch.dtype
    ]


class Overwriting:
    """The results among ``made`` that may lie in an input, by the position of the input.

    Tensors that reach into one another stay apart: a kernel that writes over one would change what
    it has yet to read of the other. Torch sees to that where it captures a graph, not later.
    """

    def __init__(
        self, over: Mapping[int, int], made: Sequence[Made], slots: Sequence[Slot],
        inputs: Sequence[TensorSpec],
    ) -> None:  # fmt: skip
        """``over``: by the number of an output the position of an input of its kind."""
        at = {s.index: k for k, s in enumerate(slots) if s.kind == "input"}
        mine = [entry for entry in made if entry[0] in over]
        self._entries = tuple((e, over[e[0]], at[over[e[0]]]) for e in mine)
        read = sorted(i for i in at if i < len(inputs))
        self._slots = np.array([at[i] for i in read])
        sizes = [math.prod(inputs[i].shape) * inputs[i].dtype.itemsize for i in read]
        self._bytes = np.array(sizes)

    def place(
        self,
        table: ctypes.Array[ctypes.c_int64],
        inputs: Sequence[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        """Results and their addresses, where ``table`` has those of the inputs."""
        apart = self._are_apart(table)
        for (j, slot, make, shape, strides, dtype), i, read in self._entries:
            out = inputs[i]
            address = out.data_ptr()
            # Elsewhere kernels read a copy, of what lies in another order or is not aligned.
            if not apart or address != table[read] or out.stride() != strides:
                out = make(shape, strides, dtype)
                address = out.data_ptr()
            results[j] = out
            table[slot] = address

    def _are_apart(self, table: ctypes.Array[ctypes.c_int64]) -> bool:
        begins = np.ctypeslib.as_array(table)[self._slots]
        order = np.argsort(begins)
        begins, sizes = begins[order], self._bytes[order]
        return bool((begins[:-1] + sizes[:-1] <= begins[1:]).all())
