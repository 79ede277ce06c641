"""Which sizes of a graph vary, which of them together, and how far a program for all of them goes.

Dynamo captures a graph for the sizes that its guards allow. A symbol may be tied by them to one
number (an image that is flattened into a layer), or to another symbol (a mask that is one longer
than the cache). So a program is made for numbers that are as large as pays for symbols that vary
freely, and keeps the distances of those that do not.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_pruner.graph.bucket import NotAlikeError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    Numbers = Mapping[Hashable, int]

__all__ = [
    "Varying",
    "reached",
    "samples_below",
    "samples_of",
    "stretched",
    "varying_of",
    "ways_to_vary",
]

ROOM = 4  # times the size that came first which a program for every size takes
LEAST_ROOM = 8
ROOM_TO_GROW = 1024  # at least, for what one call hands to the next with more behind it
ROOM_OF_IMAGES = 2  # times a size that layers divide: lines lie as far apart as at the largest
FAR = 64  # times the first size: a limit that is no further is as large as the program takes
_NO_LIMIT = 1 << 40
_NEAR = 2  # a mask is one longer than the cache: what differs by more hardly grows together


@dataclass(frozen=True, slots=True)
class Varying:
    """``groups`` of symbols that vary, each with the distances that its members keep from the
    first of it; and the numbers of ``fixed`` ones."""

    groups: tuple[tuple[tuple[Hashable, int], ...], ...]
    fixed: tuple[tuple[Hashable, int], ...]

    def covers(self, numbers: Numbers, most: Numbers) -> bool:
        """Whether sizes vary as these do, and none is above ``most``."""
        if any(numbers.get(s) != n for s, n in self.fixed):
            return False
        for group in self.groups:
            base = numbers.get(group[0][0], _NO_LIMIT)
            if base > most[group[0][0]] or any(numbers.get(s) != base + d for s, d in group):
                return False
        return True


def ways_to_vary(numbers: Numbers, allows: Callable[[Numbers], bool]) -> Iterator[Varying]:
    """How the symbols of a graph may vary that came with ``numbers``: each by itself where guards
    allow it; those of one number together (keys and values of a cache, of which no guard says that
    they have one length); all together; all but one, which stays as it is; one alone. Those that
    come first say more; a graph may refuse them.
    """
    first = varying_of(numbers, allows)
    yield first
    free = {group[0][0]: group for group in first.groups}
    equal: dict[int, list[tuple[Hashable, int]]] = {}
    for symbol, group in free.items():
        equal.setdefault(numbers[symbol], []).extend(group)
    if len(equal) < len(free):
        yield Varying(tuple(tuple(group) for group in equal.values()), first.fixed)
    if len(equal) > 1 and max(equal) - min(equal) <= _NEAR:
        base = min(free, key=lambda s: numbers[s])
        members = [(s, numbers[s] - numbers[base]) for group in free.values() for s, _ in group]
        members.sort(key=lambda member: member[1])
        yield Varying((tuple(members),), first.fixed)
    for symbol, group in free.items() if len(free) > 1 else ():
        kept = tuple(g for g in first.groups if g is not group)
        yield Varying(kept, (*first.fixed, *((s, numbers[symbol] + d) for s, d in group)))
    for symbol, group in free.items() if len(free) > 2 else ():
        others = [(s, numbers[t] + d) for t, g in free.items() if t != symbol for s, d in g]
        yield Varying((group,), (*first.fixed, *others))


def varying_of(numbers: Numbers, allows: Callable[[Numbers], bool]) -> Varying:
    """How the symbols of a graph vary as far as its guards say."""
    groups: list[tuple[tuple[Hashable, int], ...]] = []
    fixed, tied = list[tuple[Hashable, int]](), list[Hashable]()
    for symbol in numbers:
        if _together(numbers, (symbol,), allows):
            groups.append(((symbol, 0),))
        else:
            tied.append(symbol)
    while tied:
        first, *others = tied
        partners = [s for s in others if _together(numbers, (first, s), allows)]
        if partners and _together(numbers, (first, *partners), allows):
            group = (first, *partners)
            groups.append(tuple((s, numbers[s] - numbers[first]) for s in group))
        else:
            group = (first,)
            fixed.append((first, numbers[first]))
        tied = [s for s in tied if s not in group]
    return Varying(tuple(groups), tuple(fixed))


def _together(
    numbers: Numbers, group: Sequence[Hashable], allows: Callable[[Numbers], bool]
) -> bool:
    """Whether guards let these symbols go on, or go back from where they end."""
    return any(
        all(allows({**numbers, **{s: numbers[s] + d for s in group}}) for d in distances)
        for distances in ((1, 3), (-1, -3))
    )


def reached(
    numbers: Numbers, varying: Varying, most: Numbers, allows: Callable[[Numbers], bool]
) -> dict[Hashable, int]:
    """``most``, and of what guards stop earlier (convolutions of few elements go another way in
    torch, which Dynamo guards) how far they let it go."""
    found = dict(most)
    for group in varying.groups:

        def allowed(number: int, group: Sequence[tuple[Hashable, int]] = group) -> bool:
            return allows({**numbers, **{s: number + d for s, d in group}})

        low = numbers[group[0][0]]
        high = max(LEAST_ROOM, 2 * ROOM * low)
        if allowed(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if allowed(middle) else (low, middle)
        found |= {s: min(low + d, most.get(s, _NO_LIMIT)) for s, d in group}
    return found


def stretched(
    numbers: Numbers, varying: Varying, most: Numbers, guards: Callable[[Numbers], bool]
) -> dict[Hashable, int]:
    """``most`` with room behind what ``guards`` allow.

    A guard may say where a graph ends (a table of positions), or nothing of it: torch's
    convolutions ask whether a batch is below 16, and how many elements there are; other captures of
    the same graph go on there.
    """
    far = dict(most)
    for group in varying.groups:
        ends = [(s, d, most[s]) for s, d in group if s in most and most[s] <= FAR * numbers[s]]
        if not ends:
            continue
        last = min(n - d for _, d, n in ends)
        if not guards({**numbers, **{s: last + 1 + d for s, d in group}}):
            room = max(last + 1, 2 * numbers[group[0][0]])
            far |= {s: (1 << (room - 1).bit_length() | 1) + d for s, d, _ in ends}
    return far


def samples_of(
    numbers: Numbers,
    varying: Varying,
    most: Numbers,
    room: Sequence[Numbers] = (),
    growing: Collection[Hashable] = (),
    grains: Mapping[Hashable, int] = MappingProxyType({}),
) -> list[dict[Hashable, int]]:
    """Numbers for the symbols: the largest that a program takes, and two that are smaller, by
    the ``grains`` of the symbols or more (one where nothing is said).

    The largest is as far as Dynamo found that a size goes (``most``), if that is not too far, else
    a power of two that leaves room, more of it for what is ``growing``, and no less than others had
    (``room``): what is not used costs nothing but addresses. Numbers of different symbols differ,
    so that they are not taken for each other. Raises ``NotAlikeError`` where there is no room for
    three.
    """
    samples: list[dict[Hashable, int]] = [dict(varying.fixed) for _ in range(3)]
    taken: list[tuple[int, ...]] = []
    for group in varying.groups:
        first = group[0][0]
        number, grain = numbers[first], grains.get(first, 1)
        limit = min(most.get(s, _NO_LIMIT) - d for s, d in group)
        least = ROOM_TO_GROW if any(s in growing for s, _ in group) else LEAST_ROOM
        wanted = max(least, 1 << (ROOM * number - 1).bit_length())
        if grain > 1:
            wanted = -(-ROOM_OF_IMAGES * number // grain) * grain
        elif max(grains.values(), default=1) > 1:
            wanted |= 1  # no extent of an image that was halved, for which it could be taken
        far = limit > FAR * number or grain > 1
        top = min(limit, wanted) if far else limit
        top = max([top, *(r.get(first, 0) for r in room)])
        while top in {s[0] for s in taken}:
            top += 1 if top < limit else -1
        small = tuple(
            next((n for n in range(begin, 1, -1) if all(n not in s for s in taken)), 0)
            for begin in (top // 2 // grain * grain + 1, (top - 1) // grain * grain - grain + 1)
        )
        taken.append((top, *small))
        if min(small) < 2 or len({*small, top}) < 3 or max(small) >= top or grain > top // 4:
            raise NotAlikeError("a size that hardly varies")
        for sample, chosen in zip(samples, (top, *small), strict=True):
            sample |= {s: chosen + d for s, d in group}
    if not varying.groups:
        raise NotAlikeError("sizes that do not vary")
    return samples


def samples_below(
    varying: Varying, room: Numbers, grains: Mapping[Hashable, int] = MappingProxyType({})
) -> list[dict[Hashable, int]]:
    """Three sizes that are smaller than ``room`` along each symbol, for a graph whose kernels are
    made for that. Otherwise as ``samples_of``, as which it raises ``NotAlikeError``."""
    samples: list[dict[Hashable, int]] = [dict(varying.fixed) for _ in range(3)]
    for group in varying.groups:
        grain = grains.get(group[0][0], 1)
        top = min(room.get(s, 0) - d for s, d in group)
        last = (top - 1) // grain * grain - grain + 1  # no quotient is what it is at the top
        begins = (last, top // 2 // grain * grain + 1, last - grain)
        for sample, begin in zip(samples, begins, strict=True):
            numbers = range(min(begin, top - 1), 1, -1)
            chosen = next((n for n in numbers if all(n not in s.values() for s in samples)), 0)
            if not chosen:
                raise NotAlikeError("a size that hardly varies")
            sample |= {s: chosen + d for s, d in group}
    if not varying.groups:
        raise NotAlikeError("sizes that do not vary")
    return samples
