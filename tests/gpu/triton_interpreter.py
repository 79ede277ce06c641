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
    import triton.language as tl
    from triton.runtime import interpreter

    from torch_pruner.codegen.build.gpu.triton_child import function_of

    def number(builder: Any, axis: int) -> Any:
        """Of a block. As an array of one element it is no bound of a loop any more (numpy 2.4)."""
        return interpreter.TensorHandle(np.array(builder.grid_idx[axis], np.int32), tl.int32)

    interpreter.InterpreterBuilder.create_get_program_id = number
    plain = interpreter.InterpreterBuilder.create_dot

    def product(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        """Of bfloat16, which the interpreter holds as bits and would multiply as whole numbers."""
        return plain(builder, widened(a), widened(b), *others)

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        bits = value.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = product
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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    _main(Path(sys.argv[1]))
