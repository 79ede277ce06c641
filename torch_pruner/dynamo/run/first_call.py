"""What goes wrong in the first call of a compiled graph never reaches the user: eager runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from torch_pruner import exc
from torch_pruner.dynamo.lower.calls import forwarded
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue

    Generators = tuple[torch.Tensor, torch.Tensor | None]
    Eager = Callable[[Sequence[RuntimeValue]], list[RuntimeValue]]
    Improve = Callable[[Sequence[RuntimeValue]], BoxedCall | None]

log = logger(__name__)


class FirstCall:
    """Runs ``call``, and ``eager`` for good if the first call fails where eager does not.

    The failure is said once and handed to ``failed``; under ``strict`` it is raised instead. What
    eager raises of the same inputs is the user's, and the next call is a first one again. Inputs
    reach eager as they came: a compiled graph writes into one only what eager would write there,
    whatever was there before (``lower/inplace.py``).
    """

    def __init__(
        self,
        eager: Eager,
        call: BoxedCall,
        name: str,
        *,
        strict: bool,
        draws: bool = True,
        failed: Callable[[Exception], None] = lambda _: None,
        device: Device | None = None,
    ) -> None:
        """``draws``: whether there may be random numbers, which eager would have to draw again."""
        # On the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True
        self._eager: Eager | None = eager
        self._call = call
        self._now: BoxedCall = self._until_settled
        self._name, self._strict, self._draws = name, strict, draws
        self._failed, self._device = failed, device
        self._lock = threading.Lock()
        self._settled = False
        self._improved: Improve | None = None
        self._when_settled: Callable[[], None] | None = None

    if TYPE_CHECKING:

        def __call__(self, args: list[RuntimeValue]) -> list[RuntimeValue]: ...

    else:
        __call__ = forwarded("_now")

    def _until_settled(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        with self._lock:
            if not self._settled:
                return self._first(args)
        return self._now(args)

    def _first(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        values = list(args)
        args.clear()
        state = self._generators() if self._draws else None
        try:
            got = self._call(list(values))
        except Exception as err:
            if self._strict:
                raise
            error = err
        else:
            self._settle()
            self._improve(values)
            return got
        self._rewind(state)
        assert self._eager is not None
        result = self._eager(values)
        self._give_up(error)
        return result

    @property
    def settled(self) -> bool:
        """Whether there was a first call, so that every call runs the same from now on."""
        return self._settled

    def rehearse(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        """A first call beside the user's own, on copies of real inputs; eager's results, or ours.

        It settles what goes well. What does not may be the moment's fault, in which somebody wrote
        to a parameter: the user's first call will find out.
        """
        with self._lock:
            if not self._settled:
                return self._rehearsed(args)
        return self._now(args)

    def _rehearsed(self, args: list[RuntimeValue]) -> list[RuntimeValue]:
        values = list(args)
        args.clear()
        try:
            got = self._call(list(values))
        except Exception as err:
            log.debug("%s: a rehearsal failed", self._name, exc_info=err)
            assert self._eager is not None
            return self._eager(values)
        self._settle()
        return got

    def _settle(self) -> None:
        """The compiled graph is good."""
        self._now, self._eager = self._call, None
        self._settled = True
        if self._when_settled is not None:
            self._when_settled()

    def when_settled(self, act: Callable[[], None]) -> None:
        """``act`` is called once the compiled graph is known to be good."""
        self._when_settled = act

    def then(self, improved: Improve) -> None:
        """``improved`` is given the inputs of the first call when that went well, and returns what
        is called from then on, or None. It raises nothing."""
        self._improved = improved

    def _improve(self, values: Sequence[RuntimeValue]) -> None:
        improved, self._improved = self._improved, None
        call = None if improved is None else improved(values)
        if call is not None:
            self._call = self._now = call

    def _give_up(self, error: Exception) -> None:
        """Eager runs from now on."""
        eager = self._eager
        assert eager is not None

        def call(args: list[RuntimeValue]) -> list[RuntimeValue]:
            values = list(args)
            args.clear()
            return eager(values)

        self._failed(error)
        if isinstance(error, exc.ResultMismatch):
            log.warning("%s; this graph runs in eager from now on", error)
        else:
            log.warning(
                "the first call of compiled graph %s failed, it runs in eager from now on: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )
            log.debug("the failure", exc_info=error)
        self._call = self._now = call
        self._settled = True

    def _generators(self) -> Generators:
        """What random numbers come next, on the CPU and on the graph's device."""
        device = self._device
        return torch.get_rng_state(), device.generator_state() if device else None

    def _rewind(self, state: Generators | None) -> None:
        if state is None:
            return
        torch.set_rng_state(state[0])
        if self._device is not None and state[1] is not None:
            self._device.restore_generator(state[1])
