"""Programs for every size, and who else may use them.

Dynamo captures one network several times: for one image and for several, for batches below and
above what a convolution of torch's asks for, for sizes at which it takes another way. What was
captured is often the same graph with the same weights, at other sizes. Then it needs no kernels of
its own, and no packed copies of the weights.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torch_pruner import fork_locks
from torch_pruner.dynamo.sizes import symbolic
from torch_pruner.dynamo.sizes.every_size import EverySize, Sample
from torch_pruner.dynamo.sizes.formulas import Formulas, grains_of
from torch_pruner.dynamo.sizes.padded_region import bucket_of
from torch_pruner.dynamo.sizes.sized_call import FARTHEST
from torch_pruner.dynamo.sizes.varying import samples_below, ways_to_vary
from torch_pruner.graph.bucket import Bucket, NotAlikeError
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import sympy
    from torch import fx

    from torch_pruner.config import Config
    from torch_pruner.dynamo.lower.calls import RuntimeValue
    from torch_pruner.dynamo.lower.program import Program
    from torch_pruner.dynamo.sizes.bucket_programs import Inner
    from torch_pruner.dynamo.sizes.padded_region import Spare
    from torch_pruner.dynamo.sizes.symbolic import SizedArguments
    from torch_pruner.dynamo.sizes.varying import Varying

    Weights = tuple[tuple[weakref.ref[torch.Tensor], ...], ...]
    """Of each region the static inputs."""

__all__ = ["Capture", "SharedProgram", "adopted", "alike", "offer", "offered"]

log = logger(__name__)
MOST_OFFERED = 64
MOST_TRIED = 4  # programs that are compared with a new capture


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedProgram:
    """A program for every size: what its graph is at the largest, and the kernels of its regions.

    ``spare`` has the memory for its inputs. ``weights``: None where somebody else's cannot be told
    from them.
    """

    wide: Program
    buckets: Sequence[Bucket]
    runs: Sequence[Inner]
    name: str
    config: Config
    spare: Spare
    weights: Weights | None
    room: int = field(init=False)

    def __post_init__(self) -> None:
        room = sum(math.prod(s.shape) for region in self.wide.regions for s in region.inputs)
        object.__setattr__(self, "room", room)


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A graph of symbolic sizes: it, its expressions, it as a program for given arguments, and the
    tensors that its arguments were when it was captured, by position."""

    gm: fx.GraphModule
    describe: Callable[[SizedArguments], Program]
    given: Mapping[int, weakref.ref[torch.Tensor]]

    def weights_of(self, program: Program) -> Weights | None:
        """The static inputs of the program's regions; None if some are not known."""
        found = []
        for step in program.steps:
            region = step.does
            if isinstance(region, torch.fx.GraphModule):
                continue
            nodes = region.graph.nodes
            static = [
                number
                for number, i in zip(step.reads, region.graph.inputs, strict=True)
                if nodes[i].attr("static")
            ]
            known = [self._tensor(program, number) for number in static]
            if any(ref is None for ref in known):
                return None
            found.append(tuple(ref for ref in known if ref is not None))
        return tuple(found)

    def _tensor(self, program: Program, number: int) -> weakref.ref[torch.Tensor] | None:
        constant = program.constants.get(number)
        if isinstance(constant, torch.Tensor):
            return weakref.ref(constant)
        return self.given.get(number)


_offered: dict[int, weakref.ref[SharedProgram]] = {}
_lock = fork_locks.lock()


def offer(program: SharedProgram) -> None:
    """Let other captures use ``program`` as long as somebody has it."""
    if program.weights is None:
        return
    with _lock:
        _offered[id(program)] = weakref.ref(program)
        for key in [k for k, ref in _offered.items() if ref() is None]:
            del _offered[key]
        if len(_offered) > MOST_OFFERED:
            del _offered[next(iter(_offered))]


def offered(weights: Weights | None, config: Config) -> list[SharedProgram]:
    """Programs of these weights, made under ``config`` or tuned under it; smallest first."""
    if weights is None:
        return []
    with _lock:
        known = [ref() for ref in _offered.values()]
    found = [p for p in known if p is not None and _same(p.weights, weights)]
    found = [p for p in found if _serves(p.config, config)]
    return sorted(found, key=lambda p: p.room)[:MOST_TRIED]


def _serves(made: Config, wanted: Config) -> bool:
    """Whether what was made under one configuration is as good as under another: what was tuned
    serves where nobody waits for tuning."""
    return made == wanted or (
        wanted.on_miss == "fallback" and made.replace(on_miss="fallback") == wanted
    )


def _same(mine: Weights | None, others: Weights) -> bool:
    if mine is None or [len(a) for a in mine] != [len(b) for b in others]:
        return False
    pairs = zip(itertools.chain(*mine), itertools.chain(*others), strict=True)
    return all(a() is b() is not None for a, b in pairs)


def adopted(
    host: SharedProgram,
    capture: Capture,
    args: SizedArguments,
    expressions: set[sympy.Expr],
) -> EverySize | None:
    """A capture at every size for which ``host`` has room, if ``args`` are of such a size and it is
    the same graph there; else None."""
    gm, program = capture.gm, capture.describe(args)
    symbols, most = symbolic.symbols_of(gm, args), _room(capture, program, host.wide)
    if most is None or any(n > most.get(s, n) for s, n in symbols.items()):
        return None
    ways = ways_to_vary(symbols, functools.partial(symbolic.allows, gm))
    first = next(ways)
    for varying in itertools.chain([first], ways):
        if varying.fixed != first.fixed:  # from there on fewer sizes vary
            return None
        try:
            sizes = _varied(host, capture, args, varying, most, expressions)
        except (NotAlikeError, ValueError, RuntimeError) as err:  # torch's, of sizes that clash
            log.debug("%s does not serve a capture that varies so: %s", host.name, err)
            continue
        if (found := sizes.at(symbols)) is not None and alike(found[0], program):
            return sizes
    return None


def _varied(
    host: SharedProgram,
    capture: Capture,
    args: SizedArguments,
    varying: Varying,
    most: Mapping[Hashable, int],
    expressions: set[sympy.Expr],
) -> EverySize:
    """Raises ``NotAlikeError``."""
    samples, buckets = list[Sample](), list[list[Bucket]]()
    grains = grains_of(expressions, varying)
    for numbers in samples_below(varying, most, grains):
        given = symbolic.with_symbols(capture.gm, args, numbers)
        if given is None:
            raise NotAlikeError("sizes that no argument has")
        program = capture.describe(given)
        samples.append(Sample(numbers, program))
        pairs = zip(host.wide.regions, program.regions, strict=True)
        buckets.append([bucket_of(a, b) for a, b in pairs])
        mine = zip(buckets[-1], host.buckets, strict=True)
        if any(a.graph.digest() != b.graph.digest() for a, b in mine):
            raise NotAlikeError("other kernels")
    if any(map(_wasteful, zip(*buckets, strict=True))):
        raise NotAlikeError("kernels that are for far larger sizes")
    formulas = Formulas(expressions, [s.symbols for s in samples], varying)
    return EverySize(formulas, varying, most, samples, buckets)


def _wasteful(alike: Sequence[Bucket]) -> bool:
    """Whether what does not vary in a capture (it has one image) is far less than kernels are for:
    those of its own serve all of its sizes, and better."""
    counts = zip(*(bucket.counts for bucket in alike), strict=True)
    pairs = [at[0] for at in counts if len(set(at)) == 1]
    return any(most > FARTHEST * n for most, n in pairs)


def _room(capture: Capture, program: Program, wide: Program) -> dict[Hashable, int] | None:
    """How far each symbol of a capture goes in ``wide``; None where that is another program."""
    if len(wide.regions) != len(program.regions):
        return None
    values = [n.meta.get("val") for n in capture.gm.graph.find_nodes(op="placeholder")]
    most: dict[Hashable, int] = {}
    steps = [s for s in program.steps if not isinstance(s.does, torch.fx.GraphModule)]
    for step, mine, large in zip(steps, program.regions, wide.regions, strict=True):
        if len(mine.inputs) != len(large.inputs):
            return None
        for number, small, spec in zip(step.reads, mine.inputs, large.inputs, strict=True):
            if len(small.shape) != len(spec.shape) or any(map(int.__gt__, small.shape, spec.shape)):
                return None
            value: RuntimeValue = values[number] if number < len(values) else None
            for symbol, n in symbolic.symbols_in([value], [spec.shape]).items():
                most[symbol] = min(n, most.get(symbol, n))
    return most


def alike(mine: Program, written: Program) -> bool:
    """Whether what was computed for a size is what is written down for it."""
    pairs = zip(mine.regions, written.regions, strict=True)
    same = all((a.inputs, a.outputs) == (b.inputs, b.outputs) for a, b in pairs)
    return same and mine.outputs == written.outputs
