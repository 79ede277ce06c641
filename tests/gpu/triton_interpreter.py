"""Runs kernels in Triton's language on this processor: Triton's own interpreter, by numpy.

As a script it is the process that does so: Triton decides when it is imported whether functions are
compiled or interpreted. A list of launches and files of arrays come in; arrays are written back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.parts.triton.kernel import TritonKernel

SECONDS = 600
LIBRARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "atan2", "fmod",
    "pow", "trunc", "nearbyint", "copysign",
)  # fmt: skip


def run(
    cases: Sequence[tuple[Sequence[TritonKernel], Sequence[np.ndarray[Any, Any]], Sequence[str]]],
) -> list[list[np.ndarray[Any, Any]]]:
    """The buffers of every case after its launches: kernels, buffers before, and their dtypes.

    Raises ``RuntimeError`` with what the process wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = []
        for n, (kernels, buffers, dtypes) in enumerate(cases):
            for k, array in enumerate(buffers):
                np.save(Path(folder, f"{n}-{k}.npy"), array, allow_pickle=False)
            launches = [[k.text, list(k.parameters), k.blocks] for k in kernels]
            work.append({"launches": launches, "dtypes": list(dtypes)})
        Path(folder, "work.json").write_text(json.dumps(work))
        environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, __file__, folder], capture_output=True, text=True,
            env=environment, timeout=SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-6000:])
        return [
            [np.load(Path(folder, f"{n}-{k}.npy")) for k in range(len(buffers))]
            for n, (_, buffers, _) in enumerate(cases)
        ]


def _main(folder: Path) -> None:
    import torch

    from torch_pruner.codegen.build.gpu.triton_child import function_of

    _complete()
    torch.set_num_threads(1)
    for n, case in enumerate(json.loads((folder / "work.json").read_text())):
        files = [folder / f"{n}-{k}.npy" for k in range(len(case["dtypes"]))]
        tensors = []
        for file, dtype in zip(files, case["dtypes"], strict=True):
            kept = getattr(torch, "int8" if dtype == "bool" else dtype)
            tensors.append(torch.from_numpy(np.load(file)).reshape(-1).view(torch.uint8).view(kept))
        for k, (text, parameters, blocks) in enumerate(case["launches"]):
            kernel = function_of(text, f"{n}_{k}")
            kernel[(blocks,)](*[tensors[p] for p in parameters], False)
        for file, tensor in zip(files, tensors, strict=True):
            before = np.load(file)
            raw = tensor.view(torch.uint8).numpy().view(before.dtype).reshape(before.shape)
            np.save(file, raw, allow_pickle=False)


def _complete() -> None:
    """What the interpreter of Triton 3.6 lacks: bounds of loops that were computed, products of
    bfloat16 and rounding to it, and functions of the device's library."""
    import torch
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def with_bounds(tensor: Any, *others: Any) -> None:
        """A number is an array of one element, which numpy 2.4 takes for no bound of a loop."""
        patched(tensor, *others)
        tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])

    interpreter._patch_lang_tensor = with_bounds
    plain = interpreter.InterpreterBuilder.create_dot

    def product(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        """Of bfloat16, which the interpreter holds as bits and would multiply as whole numbers."""
        return plain(builder, widened(a), widened(b), *others)

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        bits = value.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(builder: Any, value: Any, kind: Any) -> Any:
        """To the nearest bfloat16, as a GPU does it; the interpreter cuts."""
        if (value.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, value, kind)
        near = torch.from_numpy(np.array(value.data)).to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(near.numpy(), kind.scalar)

    interpreter.InterpreterBuilder.create_dot = product
    interpreter.InterpreterBuilder.cast_impl = rounded

    def on_host(name: str) -> Any:
        function = getattr(torch, {"nearbyint": "round"}.get(name, name))

        def call(*given: Any) -> Any:
            first = next(g for g in given if isinstance(g, tl.tensor))
            numpy = first.handle.data.dtype
            arrays = [
                g.handle.data if isinstance(g, tl.tensor) else np.full((), g, numpy) for g in given
            ]
            found = function(*(torch.from_numpy(np.array(a)) for a in arrays)).numpy()
            handle = interpreter.TensorHandle(found, first.dtype)
            scalar = first.type.scalar
            shape = list(found.shape)
            return tl.tensor(handle, tl.block_type(scalar, shape) if shape else scalar)

        return call

    for name in LIBRARY:
        setattr(libdevice, name, on_host(name))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    _main(Path(sys.argv[1]))
