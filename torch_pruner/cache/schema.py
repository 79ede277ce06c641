"""The tables of an index, and whether a file has them: these, and nothing beside them.

In: connections. Out: connections with the tables, or ``sqlite3.DatabaseError`` where a file has
others, or has views or triggers, which would run with our statements.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from typing import Final

SCHEMA_VERSION: Final = 2
SCHEMA: Final = (
    """CREATE TABLE kernels (
        digest TEXT PRIMARY KEY, workload TEXT NOT NULL, target TEXT NOT NULL, device TEXT NOT NULL,
        threads INTEGER NOT NULL, numerics TEXT NOT NULL, codegen TEXT NOT NULL,
        entry TEXT NOT NULL, checksum TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL)""",
    "CREATE INDEX kernels_by_workload ON kernels (workload)",
    "CREATE INDEX kernels_by_device ON kernels (target, device)",
    """CREATE TABLE artifacts (
        digest TEXT PRIMARY KEY, kind TEXT NOT NULL, blob TEXT NOT NULL, bytes INTEGER NOT NULL,
        entry TEXT NOT NULL, checksum TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL)""",
    "CREATE INDEX artifacts_by_blob ON artifacts (blob)",
    """CREATE TABLE tasks (
        digest TEXT PRIMARY KEY, entry TEXT NOT NULL, checksum TEXT NOT NULL,
        used REAL NOT NULL)""",
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY, task TEXT NOT NULL, candidate TEXT NOT NULL, status TEXT NOT NULL,
        entry TEXT NOT NULL, checksum TEXT NOT NULL, UNIQUE (task, candidate))""",
)
TABLES: Final = ("kernels", "artifacts", "tasks", "records")
FOREIGN: Final = "unknown schema"  # how the message about another schema begins

_OBJECTS = "SELECT type, name, tbl_name, sql FROM sqlite_master"


def create(conn: sqlite3.Connection, journal: str) -> sqlite3.Connection:
    """Make the tables in an empty database, in one transaction."""
    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
    conn.execute(f"PRAGMA journal_mode = {journal}").fetchall()
    conn.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        conn.execute(statement)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    conn.execute("COMMIT")
    return conn


def problem(conn: sqlite3.Connection) -> str:
    """The first difference between a database and what ``create`` makes; "" if there is none."""
    if (found := version(conn)) != SCHEMA_VERSION:
        return f"{FOREIGN} version {found}"
    objects = set(conn.execute(_OBJECTS).fetchall())
    if odd := sorted(objects ^ _expected(), key=str):
        kind, name, *_ = odd[0]
        return f"{FOREIGN}: {'unexpected' if odd[0] in objects else 'missing'} {kind} {name!r}"
    return ""


def version(conn: sqlite3.Connection) -> int:
    (found,) = conn.execute("PRAGMA user_version").fetchone()
    return int(found)


def is_unborn(conn: sqlite3.Connection) -> bool:
    """Whether this is what a process leaves that was killed before it had made the tables.

    There is nothing in it that would be worth keeping.
    """
    with contextlib.suppress(sqlite3.DatabaseError):
        (tables,) = conn.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return not tables and not version(conn)
    return False


@functools.cache
def _expected() -> frozenset[tuple[str, str, str, str | None]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        return frozenset(create(conn, "MEMORY").execute(_OBJECTS).fetchall())
