"""Tables, times, sizes and shares as text for people, ASCII and no wider than a terminal."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLUMNS = 100
_GAP = 2


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, align: str) -> list[str]:
    """Lines of a table of at most ``COLUMNS`` columns.

    ``align`` has ``<`` or ``>`` for each column. The first column is shortened where the table
    would be too wide.
    """
    lines = [tuple(headers), *(tuple(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    widths[0] = min(widths[0], max(8, COLUMNS - sum(widths[1:]) - _GAP * (len(widths) - 1)))

    def text(line: Sequence[str]) -> str:
        cells = zip(line, align, widths, strict=True)
        padded = (f"{shorten(cell, width):{side}{width}}" for cell, side, width in cells)
        return shorten((" " * _GAP).join(padded).rstrip())

    return [text(line) for line in lines]


def shorten(text: str, width: int = COLUMNS) -> str:
    """``text`` in at most ``width`` characters; dots show that some are missing."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def time_text(seconds: float | None) -> str:
    """A latency in the unit that suits it."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def flops_text(flops: float) -> str:
    """A number of floating-point operations with a decimal prefix."""
    return _scaled(flops, 1000, ("", " k", " M", " G", " T", " P"))


def bytes_text(size: int) -> str:
    """A size with a binary prefix."""
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def joules_text(joules: float | None) -> str:
    """An energy in the unit that suits it."""
    if joules is None:
        return "-"
    if joules < 1e-3:
        return f"{1e6 * joules:.1f} uJ"
    return f"{1e3 * joules:.2f} mJ" if joules < 1.0 else f"{joules:.2f} J"


def percent(part: float, whole: float) -> str:
    """A share, rounded so that only the whole is 100 %."""
    if not whole:
        return "-"
    share = 100.0 * part / whole
    return f"{share:.0f} %" if part in (0, whole) else f"{min(max(share, 0.1), 99.9):.1f} %"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    index = 0
    while value >= base and index < len(units) - 1:
        value, index = value / base, index + 1
    return f"{value:.0f}{units[index]}" if index == 0 else f"{value:.1f}{units[index]}"


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are escaped; nothing where there are no rows."""
    body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not body:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in headers)
    lines = "\n".join(f"<tr>{row}</tr>" for row in body)
    return f"<table>\n<tr>{head}</tr>\n{lines}\n</table>"
