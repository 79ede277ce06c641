"""The executor of a GPU: workers that build and time as ``LocalExecutor``'s do, on the device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.jobs import Limits
from torch_pruner.tuner.measure.local import LocalExecutor

if TYPE_CHECKING:
    from torch_pruner.fingerprint import Gpu

CUDA_BUILDER: Final = "torch_pruner.tuner.measure._cuda:CudaBuilder"
MAX_WORKERS: Final = 8  # a context of each takes some hundred megabytes of the device


def gpu_executor(gpu: Gpu, seed: int = 0) -> LocalExecutor:
    """Times on one GPU; each worker has a context of its own there, and they time in turns."""
    evaluator = EvaluatorSpec(flush_bytes=2 * gpu.fingerprint.l2_bytes, renew=False)
    return LocalExecutor(
        1,
        evaluator,
        n_workers=min(MAX_WORKERS, os.cpu_count() or 1),
        limits=Limits(build_s=60.0),
        seed=seed,
        builder=CUDA_BUILDER,
        device=gpu.fingerprint,
        environment={"CUDA_VISIBLE_DEVICES": gpu.selector},
    )
