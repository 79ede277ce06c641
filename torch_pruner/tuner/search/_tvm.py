"""The names of MetaSchedule that the baseline uses, and the ways around what hurts in them.

The only module of ``search/`` that knows TVM's version. Importing it takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm import s_tir

from torch_pruner.codegen.tir.builders import tvm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.target import TargetSpec

__all__ = ["Evolution", "make_cost_model", "ms", "quiet", "tvm"]

_INTRINSICS = {"llvm": ("x86", "arm_cpu"), "cuda": ("cuda",)}


def _register_intrinsics(kind: str) -> None:
    """Register the tensor intrinsics of one kind of target.

    A tuning context imports those of every target, which takes 10 to 25 s of parsing, most of it
    for GPUs. A package that imports nothing by itself stands in for TVM's.
    """
    name = "tvm.s_tir.tensor_intrin"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(s_tir.__file__).parent / "tensor_intrin")]
        sys.modules[name] = package
    for part in _INTRINSICS.get(kind, ()):
        importlib.import_module(f"{name}.{part}")


_register_intrinsics("llvm")
from tvm.s_tir import meta_schedule as ms  # noqa: E402


def quiet() -> logging.Logger:
    """A logger that MetaSchedule may write to without being heard."""
    logger = logging.getLogger("torch_pruner.metaschedule")
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    return logger


class Evolution:
    """MetaSchedule's evolutionary search over the space of one module.

    With one thread results do not depend on timing.
    """

    def __init__(
        self,
        module: Any,
        target: TargetSpec,
        cost_model: Any,
        seed: int,
        round_size: int,
        threads: int = 1,
    ) -> None:
        _register_intrinsics(target.kind)
        self._target = tvm.target.Target(target.tvm_target())
        self._context = ms.TuneContext(
            mod=module,
            target=self._target,
            space_generator="post-order-apply",
            search_strategy=ms.search_strategy.EvolutionarySearch(),
            task_name="kernel",
            rand_state=seed,
            num_threads=threads,
            logger=quiet(),
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(module)
        self._cost_model = cost_model
        spaces = self._context.generate_design_space()
        self._context.pre_tuning(1 << 30, round_size, spaces, self._database, cost_model)

    def generate(self) -> list[Any]:
        """The next round of measure candidates; empty at the end."""
        return list(self._context.generate_measure_candidates() or ())

    def notify(self, candidates: Sequence[Any], seconds: Sequence[float | None]) -> None:
        """What measuring a round gave; None for a candidate that failed."""
        results = [
            ms.runner.RunnerResult([s], None)
            if s is not None
            else ms.runner.RunnerResult(None, "failed")
            for s in seconds
        ]
        for candidate, result in zip(candidates, results, strict=True):
            if result.run_secs is not None:
                record = ms.database.TuningRecord(
                    candidate.sch.trace,
                    self._workload,
                    result.run_secs,
                    self._target,
                    candidate.args_info,
                )
                self._database.commit_tuning_record(record)
        self._context.notify_runner_results(list(candidates), results)
        self._cost_model.update(self._context, list(candidates), results)


def make_cost_model(seed: int, threads: int = 1) -> Any:
    """MetaSchedule's gradient-boosted trees; chance where xgboost is not installed."""
    if importlib.util.find_spec("xgboost") is None:
        return ms.cost_model.RandomModel(seed=seed)
    return ms.cost_model.XGBModel(extractor="per-store-feature", num_tuning_cores=threads)
