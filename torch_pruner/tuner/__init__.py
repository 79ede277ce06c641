"""Tuning: given tasks, find schedules. The registries map option values to factories.

Names appear here only because text enters here (options, the command line); inside the package
objects are composed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch_pruner.exc import OptionError
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_pruner.tuner.cost_model.base import CostModel
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.search.base import SearchStrategy

log = logger(__name__)
T = TypeVar("T")


def _analytic(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.analytic import AnalyticModel

    return AnalyticModel()


def _random_model(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.random_model import RandomModel

    return RandomModel(seed)


def _xgb(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.xgb_model import XGBoostModel

    return XGBoostModel(seed)


def _residual(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.residual import ResidualModel

    return ResidualModel()


def _learned(name: str) -> Callable[[int], CostModel]:
    def make(seed: int) -> CostModel:
        log.debug("cost_model=%r verifies with the online residual model in this version", name)
        return _residual(seed)

    return make


COST_MODELS: Mapping[str, Callable[[int], CostModel]] = {
    "pacm": _learned("pacm"),
    "moa": _learned("moa"),
    "residual": _residual,
    "xgb": _xgb,
    "analytic": _analytic,
    "random": _random_model,
}


def _draft_verify(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.cost_model.analytic import AnalyticModel
    from torch_pruner.tuner.cost_model.random_model import RandomModel
    from torch_pruner.tuner.cost_model.residual import ResidualModel
    from torch_pruner.tuner.search.draft_verify import DraftThenVerify

    if isinstance(cost_model, (AnalyticModel, RandomModel)):  # the ablations: nothing learns
        return DraftThenVerify(AnalyticModel(), cost_model)
    if isinstance(cost_model, ResidualModel):
        return DraftThenVerify(cost_model, cost_model)
    return DraftThenVerify(ResidualModel(), cost_model)


def _random_search(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.search.random_search import RandomSearch

    return RandomSearch()


def _metaschedule(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.search.metaschedule import MetaScheduleSearch

    return MetaScheduleSearch()


STRATEGIES: Mapping[str, Callable[[CostModel, int], SearchStrategy]] = {
    "draft-verify": _draft_verify,
    "metaschedule": _metaschedule,
    "random": _random_search,
}


def _local(threads: int, seed: int) -> MeasureExecutor:
    from torch_pruner.tuner.measure.local import LocalExecutor

    return LocalExecutor(threads, seed=seed)


EXECUTORS: Mapping[str, Callable[[int, int], MeasureExecutor]] = {"local": _local}


def make_cost_model(name: str, seed: int = 0) -> CostModel:
    """The cost model behind option ``cost_model``; one may serve every task of a session."""
    return _look_up("cost_model", name, COST_MODELS)(seed)


def make_strategy(name: str, cost_model: CostModel, seed: int = 0) -> SearchStrategy:
    """The strategy behind option ``strategy``, for one task."""
    return _look_up("strategy", name, STRATEGIES)(cost_model, seed)


def make_executor(name: str, threads: int, seed: int = 0) -> MeasureExecutor:
    """The executor behind option ``executor``."""
    return _look_up("executor", name, EXECUTORS)(threads, seed)


def _look_up(option: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise OptionError(option, f"unknown value {name!r}; one of {', '.join(table)}")
    return table[name]
