"""The measurement seam: candidates in, one result each out, and how a time is taken."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from torch_pruner.fingerprint import DeviceFingerprint
    from torch_pruner.task import MeasureInput, MeasureResult


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    """How a time is taken and what counts as a right answer; stored with every record.

    A repeat is a run of consecutive calls that lasts at least ``min_repeat_s``; its value is
    seconds per call. Static operands (weights) rotate over copies that together fill
    ``flush_bytes``, so that they come from memory as they do in a network, while activations stay
    in cache; 0 keeps everything hot. Each candidate has copies of its own. With ``renew``, threads
    write activations anew before every call, each its share, as the kernel before would have: what
    another core holds has to come from there. After the call they rewrite the results the same way,
    as a reader would have to fetch them; that is timed, less what it takes when each has written
    its own share. A repeat during which another process took a core away is disturbed: up to
    ``extra`` more are run in their place, and only if all were disturbed do the fastest of them
    count. After the first repeat a candidate slower than ``early_out`` times the best one known is
    given no further repeats (0 turns that off). Candidates of a task take turns, repeat by repeat,
    with one of its first batch (``measure/pace.py``): where that takes longer than it did, the
    machine is slower, and the others' times are divided by as much.
    ``rtol`` and ``atol``
    are for float32; see ``measure/check.py`` for how they scale.

    Example:
        quick = EvaluatorSpec(repeat=3, min_repeat_s=1e-3, flush_bytes=0)
        executor = LocalExecutor(2, quick)
    """

    repeat: int = 3
    extra: int = 6
    min_repeat_s: float = 0.002
    warmup: int = 1
    flush_bytes: int = 32 << 20
    renew: bool = True
    early_out: float = 2.5
    rtol: float = 1e-3
    atol: float = 1e-4

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EvaluatorSpec:
        return EvaluatorSpec(**data)


class MeasureExecutor(ABC):
    """Builds and times candidates on one device.

    Contract: ``measure`` returns one result per input, in input order. A candidate that fails to
    build, crashes, hangs or computes the wrong answer is a *result*, never an exception; an
    exception means the executor itself is unusable. Implementations may be slow to start but must
    be safe to ``close`` twice, and must still close after an interrupted ``measure``.

    Example:
        with LocalExecutor(threads=2) as executor:
            (result,) = executor.measure([MeasureInput(task, candidate)])
        print(result.status, result.latency_s)
    """

    evaluator: EvaluatorSpec
    device: DeviceFingerprint  # of the machine that runs the kernels

    def start(self) -> None:
        """Begin starting whatever ``measure`` needs, without waiting. Default: nothing to start."""

    @abstractmethod
    def measure(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]: ...

    def race(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        """Like ``measure``, for finalists of one task: side by side, so that moments do not count.

        The seconds are those of this moment, not put right. An executor that has a meter also tells
        the joules of those as fast as the fastest (``pareto.TIE``), where they could be had.
        Default: ``measure``.
        """
        return self.measure(inputs)

    @contextlib.contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """In the block, ``measure`` and ``race`` end after so many seconds, with the results that
        there are by then, fewer than were asked for. Default: they take their time."""
        yield

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Seconds spent so far in ``build`` and ``measure``. Default: not known."""
        return {}

    def close(self) -> None:
        """Release workers or sessions. Default: nothing to release."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
