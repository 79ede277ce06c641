"""Learned weights: the cost model of a tuning session starts from those of earlier sessions.

Weights are looked for in the cache, then in the package; afterwards the momentum model's go back to
the cache. A file that is damaged or of another version costs a warning and is ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_pruner.cache import learned
from torch_pruner.log import logger

if TYPE_CHECKING:
    from torch_pruner.config import Config
    from torch_pruner.target import TargetSpec
    from torch_pruner.tuner.cost_model.base import CostModel
    from torch_pruner.tuner.cost_model.weights import Weights

log = logger(__name__)

SHIPPED = Path(__file__).resolve().parent.parent.parent / "weights"


def cost_model_for(config: Config, target: TargetSpec) -> CostModel:
    """The model that verifies drafts under ``config``."""
    from torch_pruner.tuner import WEIGHED, make_cost_model

    name, seed = config.cost_model, config.seed
    if name not in WEIGHED:
        return make_cost_model(name, seed)
    weights = _weights(config, target)
    if weights is None and name == "offline":
        log.warning("no weights for %s to be used offline: drafts stay in their order", target.kind)
    return make_cost_model(name, seed, weights=weights)


def keep(model: CostModel, config: Config, target: TargetSpec) -> None:
    """Put what ``model`` learned where the next session finds it, if it is one that is kept."""
    from torch_pruner.tuner.cost_model.moa import MomentumModel

    if not isinstance(model, MomentumModel) or not model.changed:
        return
    path = learned.path_of(config.cache_root, _name(target))
    try:
        learned.write(path, model.weights().to_bytes())
    except OSError as err:
        log.warning("what the cost model learned cannot be kept for the next session: %s", err)


def _weights(config: Config, target: TargetSpec) -> Weights | None:
    from torch_pruner.tuner.cost_model.weights import Weights

    own = learned.path_of(config.cache_root, _name(target))
    for path in (own, SHIPPED / f"{target.kind}{learned.SUFFIX}"):
        try:
            content = learned.read(path)
            if content is not None:
                return Weights.from_bytes(content)
        except (OSError, ValueError) as err:
            log.warning("ignoring the weights in %s: %s", path, err)
    return None


def _name(target: TargetSpec) -> str:
    return f"moa-{target.kind}"
