"""The tables of ``benchmarks.decode``: every contestant, and ours over the best peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.decoding.contestants import is_ours

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HEADER = ["", "per token", "quartiles", "tokens/s", "weights", "of the read", "memory"]
HEADER += ["difference", "beside the best peer"]


def median_s(of: Mapping[str, Any]) -> float | None:
    """Of one contestant; None: it has a reason instead."""
    return float(of["latency"]["median_s"]) if "latency" in of else None


def fastest(row: Mapping[str, Any], *, ours: bool) -> str | None:
    """The name of the fastest of ours, or of the peers."""
    of = row["contestants"]
    timed = {n: median_s(c) for n, c in of.items() if is_ours(n) == ours and "latency" in c}
    return min(timed, key=lambda n: timed[n] or 0.0) if timed else None


def beside_the_best(row: Mapping[str, Any], name: str) -> float | None:
    """How many times as fast as the fastest peer of the row."""
    best, of = fastest(row, ours=False), row["contestants"]
    mine = median_s(of[name])
    theirs = median_s(of[best]) if best else None
    return theirs / mine if mine and theirs else None


def share(row: Mapping[str, Any], of: Mapping[str, Any]) -> float | None:
    """The rate at which a step reads the weights of its own format, over the streaming read."""
    seconds = median_s(of)
    return of["weight_bytes"] / seconds / row["read_bytes_per_s"] if seconds else None


def title(row: Mapping[str, Any]) -> str:
    """Of one table."""
    what = f"cache of {row['length']}"
    if row["prefill"]:
        what = f"prompts of {row['prefill']} tokens"
    rate = f"{row['read_bytes_per_s'] / 1e9:.1f} GB/s"
    return f"{row['title']}, {row['bits']} bits, {what}; streaming read {rate}"


def lines(row: Mapping[str, Any]) -> list[list[str]]:
    """The fastest first; those with a reason last."""
    of = row["contestants"]
    order = sorted(of, key=lambda n: median_s(of[n]) or float("inf"))
    return [_line(row, name, of[name]) for name in order]


def _line(row: Mapping[str, Any], name: str, of: Mapping[str, Any]) -> list[str]:
    if "latency" not in of:
        return [name, f"({_short(of['reason'])})", *[""] * (len(HEADER) - 2)]
    t = timing.Timing(**of["latency"])
    beside, part = beside_the_best(row, name), share(row, of)
    count = row["prefill"] or 1
    return [
        name,
        timing.duration(t.median_s),
        timing.spread(t),
        f"{count / t.median_s:.1f}",
        f"{of['weight_bytes'] / 1e6:.0f} MB",
        f"{100 * part:.0f} %" if part and not row["prefill"] else "",
        f"{of['rss_bytes'] / 1e6:.0f} MB",
        f"{of['difference']:.1e}",
        f"{beside:.2f}" if beside else "",
    ]


def _short(reason: str) -> str:
    return "not installed" if "ModuleNotFoundError" in reason else reason.split(":")[0][:40]


def reasons(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Whole, for those who could not."""
    for row in rows:
        for name, of in row["contestants"].items():
            if "reason" in of:
                yield f"{row['title']}, {name}: {of['reason']}"


def summary(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each table: the fastest of ours beside the fastest peer."""
    found = []
    for row in rows:
        mine, best = fastest(row, ours=True), fastest(row, ours=False)
        if not mine:
            continue
        of, count = row["contestants"], row["prefill"] or 1
        ratio, part = beside_the_best(row, mine), share(row, of[mine])
        found.append(
            [
                row["title"],
                f"prefill {row['prefill']}" if row["prefill"] else "decode",
                str(row["bits"]),
                mine,
                f"{count / (median_s(of[mine]) or 1):.1f}",
                f"{100 * part:.0f} %" if part and not row["prefill"] else "",
                best or "",
                f"{count / (median_s(of[best]) or 1):.1f}" if best else "",
                f"{ratio:.2f}" if ratio else "",
            ]
        )
    return found


SUMMARY = ["", "", "bits", "ours", "tokens/s", "of the read", "best peer", "tokens/s", "ratio"]


def render(content: Mapping[str, Any]) -> str:
    """For a terminal."""
    rows = list(content["rows"].values())
    parts = [f"{title(row)}\n{tables.plain(HEADER, lines(row))}" for row in rows]
    parts += [tables.plain(SUMMARY, summary(rows)), *reasons(rows)]
    return "\n\n".join(parts)


def page(content: Mapping[str, Any], source: str) -> str:
    """docs/decode.md."""
    rows = list(content["rows"].values())
    parts = [
        "# Decoding beside the peers",
        f"Written by `python -m benchmarks.decode`; all numbers are in `{source}`.",
        timing.machine_line(content["machine"]),
        EXPLAINED,
        "![](decode_bits.png)",
        "## Ours beside the best peer of the same number of bits",
        tables.markdown(SUMMARY, summary(rows)),
    ]
    for row in rows:
        of = row["machine"]
        commit = f"{of['cpu']}, commit {of['commit']}, {of['date']}."
        parts += [f"## {title(row)}", commit, tables.markdown(HEADER, lines(row))]
    if why := [f"* {line}" for line in reasons(rows)]:
        parts += ["## Who could not, and why", "\n".join(why)]
    return "\n\n".join(parts) + "\n"


EXPLAINED = """\
* Greedy decoding, batch 1. Every contestant is a process of its own and decodes a few tokens in \
turns with the others, with as many threads and a cache of the same length, from the same \
positions. Medians and quartiles are of single tokens.
* Weights are random, the same for all: float32 for 32 bits, bfloat16 numbers for fewer. \
**weights**: what a step reads of the contestant's own format, scales included, without the table \
of embeddings unless the output layer shares it. **of the read**: so many bytes in the median \
time, over the rate of a streaming read that took its turns in the same run.
* Of ours: `frozen` weights are packed once and looked at no more; `unguarded` are frozen, and \
torch is told that nobody changes the modules, either (`guard_filter_fn`, decoding.md).
* **memory** is resident at the end, pages of files included. **difference** is the largest of the \
scores after the prompt, over eager's largest, with the weights before they are rounded to 8 or 4 \
bits. Of torch's contestants that round no weights themselves it is that of the last step: eager \
puts the prompt before it into the cache.
* **beside the best peer**: how many times as many tokens per second as the fastest peer of the \
table."""
