"""Momentum online adaptation: the pattern-aware model, starting from weights of earlier tuning.

The weights it starts from (the siamese model) are trained in a copy, on what this session measures;
after each training they move a hundredth of the way to the copy. So they remember all devices and
tasks they have met, and whoever keeps ``weights()`` starts the next session from more than this one
did. The feature scaling stays that of the first weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.tuner.cost_model.pacm import STEPS, PatternAwareModel
from torch_pruner.tuner.cost_model.training import ADAPTING, Adam
from torch_pruner.tuner.cost_model.trust import Trust
from torch_pruner.tuner.cost_model.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.tuner.cost_model.base import Array
    from torch_pruner.tuner.cost_model.layers import Numbers
    from torch_pruner.tuner.cost_model.pattern import Patterns

MOMENTUM = 0.99  # of the siamese model, as in the paper


class MomentumModel(PatternAwareModel):
    """``learn=False`` is the offline mode: the weights are used as they are and never trained.

    With ``restart`` each training begins at the siamese model, as in the paper, else where the last
    one ended. ``momentum=0`` is plain fine-tuning: what was trained is what is kept.
    Without weights it begins from nothing, and the siamese model is the mean of what training gave
    until that has gone on for long enough to have momentum.
    """

    def __init__(
        self,
        seed: int = 0,
        weights: Weights | None = None,
        *,
        learn: bool = True,
        local: bool = True,
        prior: bool = True,
        steps: int = STEPS,
        momentum: float = MOMENTUM,
        restart: bool = False,
    ) -> None:
        super().__init__(seed, local=local, prior=prior, steps=steps)
        self.learns, self._momentum, self._restart = learn, momentum, restart
        self._updates = 0
        if weights is not None:
            self._flat, self._scaling = weights.flat.copy(), weights.scaling
            self._updates = weights.updates
            self._optimiser = Adam(ADAPTING)
        if not learn:
            self._trust = Trust(share=1.0)
        self._siamese = self._flat.copy()
        self._changed = False

    @property
    def changed(self) -> bool:
        """Whether ``weights()`` are other than those given."""
        return self._changed

    def weights(self) -> Weights:
        """The siamese model. Raises ``ValueError`` before there is anything to keep."""
        if self._scaling is None:
            raise ValueError("nothing was trained yet")
        return Weights(self._siamese.copy(), self._scaling, self._updates)

    def _judge(self, found: Sequence[tuple[Patterns, Array]]) -> bool:
        return self.learns and super()._judge(found)

    def _learn(self, workload: str) -> bool:
        if not self.learns:
            return False
        if self._restart:
            self._flat, self._optimiser = self._siamese.copy(), Adam(ADAPTING)
        if not super()._learn(workload):
            return False
        follow(self._siamese, self._flat, self._updates, self._momentum)
        self._updates += 1
        self._changed = True
        return True


def follow(siamese: Numbers, trained: Numbers, updates: int, most: float = MOMENTUM) -> None:
    """Move ``siamese`` to ``trained`` in place: a running mean, later a momentum of ``most``."""
    momentum = min(most, updates / (updates + 1))
    siamese *= momentum
    siamese += (1.0 - momentum) * trained
