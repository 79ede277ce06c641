"""Tuning: given tasks, find schedules. The registries map option values to factories.

Names appear here only because text enters here (options, the command line); inside the package
objects are composed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch_pruner.exc import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_pruner.tuner.cost_model.base import CostModel
    from torch_pruner.tuner.cost_model.weights import Weights
    from torch_pruner.tuner.search.base import SearchStrategy

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


def _pacm(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.pacm import PatternAwareModel

    return PatternAwareModel(seed)


def _mlp(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.mlp import TensetMLP

    return TensetMLP(seed)


def _tlp(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.tlp import TLPModel

    return TLPModel(seed)


def _trees(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.trees import StatementTrees

    return StatementTrees(seed)


def _forest(seed: int) -> CostModel:
    from torch_pruner.tuner.cost_model.forest import ForestModel

    return ForestModel(seed)


def _moa(seed: int, weights: Weights | None = None) -> CostModel:
    """Without weights the residual model: at a few dozen trials a task, training the network from
    nothing ranked no better and cost more (docs/experiments.md has the figures).
    """
    if weights is None:
        return _residual(seed)
    from torch_pruner.tuner.cost_model.moa import MomentumModel

    return MomentumModel(seed, weights)


def _offline(seed: int, weights: Weights | None = None) -> CostModel:
    """Weights as they are, never trained; without any, what drafts have anyway."""
    if weights is None:
        return _analytic(seed)
    from torch_pruner.tuner.cost_model.moa import MomentumModel

    return MomentumModel(seed, weights, learn=False, local=False)


COST_MODELS: Mapping[str, Callable[[int], CostModel]] = {
    "pacm": _pacm,
    "moa": _moa,
    "offline": _offline,
    "residual": _residual,
    "mlp": _mlp,
    "tlp": _tlp,
    "trees": _trees,
    "forest": _forest,
    "xgb": _xgb,
    "analytic": _analytic,
    "random": _random_model,
}
# Those that start from weights.
WEIGHED: Mapping[str, Callable[[int, Weights], CostModel]] = {"moa": _moa, "offline": _offline}


def _draft_verify(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.cost_model.analytic import AnalyticModel
    from torch_pruner.tuner.cost_model.moa import MomentumModel
    from torch_pruner.tuner.cost_model.random_model import RandomModel
    from torch_pruner.tuner.cost_model.residual import ResidualModel
    from torch_pruner.tuner.search.draft_verify import DraftThenVerify

    fixed = isinstance(cost_model, MomentumModel) and not cost_model.learns
    if fixed or isinstance(cost_model, (AnalyticModel, RandomModel)):  # nothing learns, at all
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


def _ansor(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.search.ansor import AnsorSearch

    return AnsorSearch(cost_model)


def _felix(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.search.felix import FelixSearch

    return FelixSearch(cost_model)


def _adatune(cost_model: CostModel, seed: int) -> SearchStrategy:
    from torch_pruner.tuner.cost_model.forest import ForestModel
    from torch_pruner.tuner.search.adatune import AdatuneSearch

    if not isinstance(cost_model, ForestModel):
        raise OptionError("strategy", "'adatune' needs the cost model 'forest'")
    return AdatuneSearch(cost_model)


def _tlm(cost_model: CostModel, seed: int) -> SearchStrategy:
    """A generator that knows nothing: benchmarks give it what ``benchmarks.tlm`` trained."""
    from torch_pruner.tuner.generator.model import Generator
    from torch_pruner.tuner.search.tlm import TLMSearch

    return TLMSearch(Generator(seed=seed))


# Baselines of papers: for benchmarks, no values of the option. Each with the cost model it has.
BASELINES: Mapping[str, str] = {
    "ansor": "trees",
    "felix": "residual",
    "adatune": "forest",
    "tlm": "",  # none
}
STRATEGIES: Mapping[str, Callable[[CostModel, int], SearchStrategy]] = {
    "draft-verify": _draft_verify,
    "metaschedule": _metaschedule,
    "random": _random_search,
    "ansor": _ansor,
    "felix": _felix,
    "adatune": _adatune,
    "tlm": _tlm,
}


def make_cost_model(name: str, seed: int = 0, weights: Weights | None = None) -> CostModel:
    """The cost model behind option ``cost_model``; one may serve every task of a session.

    ``weights`` are what "moa" starts from and "offline" is; other models have no use for them.
    """
    if weights is not None and name in WEIGHED:
        return WEIGHED[name](seed, weights)
    return _look_up("cost_model", name, COST_MODELS)(seed)


def make_strategy(name: str, cost_model: CostModel, seed: int = 0) -> SearchStrategy:
    """The strategy behind option ``strategy``, for one task."""
    return _look_up("strategy", name, STRATEGIES)(cost_model, seed)


def _look_up(option: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise OptionError(option, f"unknown value {name!r}; one of {', '.join(table)}")
    return table[name]
