"""Where a graph is cut into kernels otherwise than rules say.

Rules (``fuse``, ``layout``) decide what is computed together and how it lies in memory. Each such
decision that could be taken the other way is a ``Site``. ``Cuts`` are the sites where it is taken
so; without any the rules hold. Who can estimate or measure programs chooses among them
(``compiler/recut.py``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

PARTS: Final = "parts"
"""An attention in kernels for its products and its softmax, in place of one."""
APART: Final = "apart"
"""What follows a product or convolution elementwise in another kernel."""
ONCE: Final = "once"
"""What several read is computed once, into a buffer, in place of by each of them."""
AGAIN: Final = "again"
"""What several read is computed by each of them, in place of once."""
PLANES: Final = "planes"
"""The result of a convolution in planes, in place of channels last."""
TURNED: Final = "turned"
"""What a reduction reads across, while it reads more along another axis, is read as it lies, in
place of turned once, into a buffer."""
JOINED: Final = "joined"
"""Products of one operand with several constant ones as one product."""
SPLIT: Final = "split"
"""A product whose result is read part by part as a product for each part."""
KINDS: Final = (PARTS, APART, ONCE, AGAIN, PLANES, TURNED, JOINED, SPLIT)
STAGES: Final = ((SPLIT,), (JOINED,), (PARTS, APART, ONCE, AGAIN, PLANES, TURNED))
"""Kinds whose sites are named by nodes of one graph: what the first changes is the next one's."""

MOST: Final = 1 << 14
"""Sites that are read from a text."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A decision about a node of a graph: of the one that its stage (``STAGES``) begins with."""

    kind: str
    node: int


Cuts = frozenset[Site]
NO_CUTS: Cuts = frozenset()


def of_kind(cuts: Iterable[Site], kind: str) -> set[int]:
    """The nodes of the sites of one kind."""
    return {site.node for site in cuts if site.kind == kind}


def to_text(cuts: Cuts) -> str:
    """JSON that ``from_text`` reads: equal for equal cuts."""
    return json.dumps([[s.kind, s.node] for s in sorted(cuts)], separators=(",", ":"))


def from_text(text: str) -> Cuts:
    """Inverse of ``to_text``. Raises ``ValueError`` for what it did not write."""
    rows = json.loads(text)
    if not isinstance(rows, list) or len(rows) > MOST:
        raise ValueError("not a list of sites")
    sites = set()
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or row[0] not in KINDS:
            raise ValueError(f"not a site: {row!r}")
        if not isinstance(row[1], int) or isinstance(row[1], bool) or row[1] < 0:
            raise ValueError(f"not a node: {row[1]!r}")
        sites.add(Site(*row))
    return frozenset(sites)
