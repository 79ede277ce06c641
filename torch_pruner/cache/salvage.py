"""Carries over what can still be read of a damaged index into a fresh one.

In: the file that was moved aside. Out: rows of the new index. Rows are taken as they are: whoever
reads one checks its checksum. A damaged page costs what lies on it, since every table is read from
both of its ends.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

from torch_pruner.cache.schema import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def carry_over(
    opened: Callable[[str], sqlite3.Connection], aside: Path, fresh: sqlite3.Connection
) -> int:
    """Copy the legible rows of ``aside`` into ``fresh``; how many. ``opened`` opens a URI.

    Rows that are there stay. Call it within a transaction.
    """
    before = fresh.total_changes
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(opened(f"{aside.as_uri()}?mode=ro")) as old,
    ):
        for table in TABLES:
            for order in ("ASC", "DESC"):
                _copy(table, _rows(old, table, order), fresh)
    return fresh.total_changes - before


def _rows(old: sqlite3.Connection, table: str, order: str) -> Iterator[tuple[object, ...]]:
    """Rows of a table in the order of its pages, as far as they can be read."""
    with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
        yield from old.execute(f"SELECT * FROM {table} NOT INDEXED ORDER BY rowid {order}")


def _copy(table: str, rows: Iterator[tuple[object, ...]], fresh: sqlite3.Connection) -> None:
    for row in rows:
        values = ", ".join("?" * len(row))
        with contextlib.suppress(sqlite3.IntegrityError, sqlite3.OperationalError):
            fresh.execute(f"INSERT OR IGNORE INTO {table} VALUES ({values})", row)
