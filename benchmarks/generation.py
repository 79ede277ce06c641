"""``generate`` of a batch with all that is usual: padding, beams, caches that grow.

For every network, way and contestant a process of its own with empty caches: how many programs were
compiled, what the first and the second call took and how many steps of them had to wait, tokens per
second from then on, and whether all tokens are eager's.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.generation_job import NETWORKS, WAYS, GenerationJob
from benchmarks.job import launch_cold

if TYPE_CHECKING:
    from collections.abc import Collection

CONTESTANTS = ("eager", "inductor", "blocking", "background")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    rows: list[dict[str, Any]] = []
    for network in options.networks:
        for way in options.ways:
            for contestant in options.contestants:
                print(f"{network}, {way}, {contestant} ...", end=" ", flush=True)
                job = _job(network, way, contestant, options)
                found = launch_cold(
                    job, time_limit_s=options.time_limit, module="benchmarks.generation_job"
                )
                found.pop("steps_s", None)
                rows.append({"network": network, "way": way, "contestant": contestant} | found)
                print(f"{found['status']} {found['error']}".rstrip(), flush=True)
                write_json(options.out, {"machine": timing.machine(), "rows": rows})
    print("\n" + render(rows))
    right = all(row["status"] == "ok" and all(row["same_tokens"]) for row in rows)
    return 0 if right else 1


def render(rows: list[dict[str, Any]]) -> str:
    """A table: seconds of whole calls; stalls are steps that took 20 times as long as usual."""
    header = [
        "network", "way", "contestant", "programs", "first call", "stalls", "second call",
        "stalls", "tokens/s", "tokens",
    ]  # fmt: skip
    lines = []
    for row in rows:
        line = [row["network"], row["way"], row["contestant"]]
        if row["status"] != "ok":
            lines.append([*line, row["status"], *[""] * (len(header) - 4)])
            continue
        ours = row["contestant"] in ("blocking", "background")
        first, second = row["calls_s"][:2]
        lines.append(
            [
                *line,
                str(row["programs"]) if ours else "",
                timing.duration(first),
                str(row["stalls"][0]),
                timing.duration(second),
                str(row["stalls"][1]),
                f"{row['tokens_per_s']:.0f}",
                "eager's" if all(row["same_tokens"]) else "OTHERS",
            ]
        )
    return tables.markdown(header, lines)


def _job(network: str, way: str, contestant: str, options: argparse.Namespace) -> GenerationJob:
    ours = contestant in ("blocking", "background")
    return GenerationJob(
        network=network,
        way=way,
        backend="pruner" if ours else contestant,
        options=backend_options(options) | {"compile": contestant} if ours else {},
        threads=options.threads,
        layers=options.layers,
        width=options.width,
        tokens=options.tokens,
        calls=options.calls,
    )


def _names(known: Collection[str], text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    for flag, known, default in (
        ("--networks", NETWORKS, "llama,t5"),
        ("--ways", WAYS, "padded,padded-static"),
        ("--contestants", CONTESTANTS, ",".join(CONTESTANTS)),
    ):
        parser.add_argument(
            flag, default=default, metavar="NAME,...", help=f"of {', '.join(known)}",
            type=lambda text, known=known: _names(known, text),
        )  # fmt: skip
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=4, help="after the first")
    add_tuning(parser, cache=False)
    parser.add_argument("--time-limit", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/generation.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
