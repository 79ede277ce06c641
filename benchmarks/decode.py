"""Greedy decoding, batch 1: tokens per second of ours and of the peers, at each number of bits.

A step reads every weight once, so the rate of a streaming read, which takes its turns with the
contestants, bounds it. Each contestant has a process of its own with the same weights, threads and
length of the cache; they decode a few tokens each in turns. ``--prefill 512`` times prompts of so
many tokens instead. Peers come with the extra ``decode-peers`` (README.md); one that is not there
or cannot is a cell with its reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import decode_table, machine_peak, timing
from benchmarks.arguments import add_tuning, backend_options, read_json, write_json
from benchmarks.decoding import turns
from benchmarks.decoding.contestants import CONTESTANTS, is_ours
from benchmarks.decoding.decoder import Setting
from benchmarks.decoding.shapes import SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READ = "streaming read"
BITS = (32, 16, 8, 4)
WAKE = 2  # untimed tokens at the beginning of a turn
TOKENS = 48  # a turn begins so many positions before the end of the cache, at least


def chosen(options: argparse.Namespace, bits: int) -> list[str]:
    """Of so many bits, in the order of the list; ours are always among them."""
    return [
        name
        for name, of in CONTESTANTS.items()
        if of.bits == bits
        and (is_ours(name) or options.against is None or name in options.against)
        and name not in options.without
    ]


def setting_of(model: str, options: argparse.Namespace, folder: Path) -> Setting:
    tuning = backend_options(options)
    threads = tuning.pop("threads", None) or torch.get_num_threads()
    layers = options.layers if options.layers != SHAPES[model].layers else None
    return Setting(
        model=model,
        folder=folder / (model if layers is None else f"{model}-{layers}"),
        threads=threads,
        length=max(options.length, options.prefill),
        start=max(options.length - TOKENS, 1),
        layers=layers,
        options=tuning,
    )


def title_of(setting: Setting) -> str:
    layers = f" of {setting.layers} layers" if setting.layers else ""
    return SHAPES[setting.model].title + layers


def prepare(names: Sequence[str], setting: Setting) -> dict[str, dict[str, Any]]:
    """Weights, scores, conversions that are not in the folder yet; reasons for what cannot be."""
    if not setting.has_reference and (why := turns.once("eager", setting, "checkpoint")):
        raise RuntimeError(f"no weights: {why}")
    found = {}
    for name in (n for n in names if CONTESTANTS[n].convert):
        done = setting.folder / f"{name}.converted"
        if done.exists():
            continue
        if why := turns.once(name, setting, "convert"):
            found[name] = {"reason": f"{why} (while converting)"}
        else:
            done.touch()
    return found


def measure(names: Sequence[str], setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """One row: all of one number of bits, or all of a prefill, timed in turns."""
    found = prepare(names, setting)
    if options.prepare:
        for name in (n for n in names if n not in found):
            for process in turns.load_all([name], setting, found).values():
                if options.prefill:
                    process.ask("prefill", tokens=options.prefill, wake=0, count=1)
                process.close()
        return {}
    read, read_bytes = machine_peak.read_loop(setting.threads, machine_peak.read_bytes())
    at_once = 2 if setting.options["effort"] == "none" else 1  # nothing is tuned meanwhile
    ready = turns.load_all([n for n in names if n not in found], setting, found, at_once)
    try:
        calls = {n: _turn(process, options) for n, process in ready.items()}
        calls[READ] = _own_turn(read, options.per_turn)
        samples, failed = turns.in_turns(calls, rounds=options.rounds, pause_s=options.pause)
        memory = {n: p.ask("memory") for n, p in ready.items() if n in samples}
    finally:
        for process in ready.values():
            process.close()
    rate = read_bytes / timing.Timing.of(READ, samples.pop(READ)).median_s
    for name, why in failed.items():
        found[name] = {"reason": why}
    for name, seconds in samples.items():
        found[name] |= memory[name] | {"latency": timing.Timing.of(name, seconds).to_json()}
    return {
        "model": setting.model,
        "title": title_of(setting),
        "length": setting.length,
        "prefill": options.prefill,
        "read_bytes_per_s": rate,
        "machine": timing.machine() | {"threads": setting.threads},
        "contestants": {n: found[n] for n in names if n in found},
    }


def _turn(process: turns.Process, options: argparse.Namespace) -> turns.Turn:
    def turn() -> list[float]:
        if options.prefill:
            found = process.ask("prefill", tokens=options.prefill, wake=1, count=2)
        else:
            found = process.ask("steps", wake=WAKE, count=options.per_turn)
        seconds: list[float] = found["seconds"]
        return seconds

    return turn


def _own_turn(call: Callable[[], object], count: int) -> turns.Turn:
    def turn() -> list[float]:
        call()
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return turn


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rows that were measured now, beside those of the file, which is written after each."""
    content = read_json(options.out) or {"rows": {}}
    for model in options.models:
        for bits in options.bits:
            setting = setting_of(model, options, folder)
            key = f"{model}/{f'prefill {options.prefill}/' if options.prefill else ''}{bits}"
            print(f"{key} ...", file=sys.stderr, flush=True)
            row = measure(chosen(options, bits), setting, options)
            if row:
                content["rows"][key] = row | {"bits": bits}
                content["machine"] = row["machine"]
                write_json(options.out, content)
    return content


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; known: {', '.join(known)}")
        return names

    return parse


def _bits(text: str) -> list[int]:
    return [int(name) for name in _names([str(b) for b in BITS])(text)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    names = _names(list(CONTESTANTS))
    parser.add_argument(
        "--models", type=_names(list(SHAPES)), default=["llama"], metavar="NAME,...",
        help=f"of {', '.join(SHAPES)}; default: llama",
    )  # fmt: skip
    parser.add_argument("--bits", type=_bits, default=list(BITS), metavar="N,...")
    parser.add_argument(
        "--against", type=names, metavar="NAME,...", help="ours and these; default: all there are"
    )
    parser.add_argument("--without", type=names, default=[], metavar="NAME,...")
    parser.add_argument("--layers", type=int, help="default: as many as the model has")
    parser.add_argument("--length", type=int, default=256, help="of the cache")
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contestant")
    parser.add_argument("--per-turn", type=int, default=5, help="tokens that are timed in a turn")
    parser.add_argument("--pause", type=float, default=timing.PAUSE_S, metavar="SECONDS")
    parser.add_argument("--prepare", action="store_true", help="convert, compile and tune only")
    parser.add_argument("--folder", help="keeps weights and conversions; default: a temporary one")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/decode.json")
    parser.add_argument("--page", help="write the tables there, e.g. docs/decode.md")
    options = parser.parse_args(arguments)
    if options.per_turn + WAKE > TOKENS:
        parser.error(f"a turn has at most {TOKENS - WAKE} tokens")
    with tempfile.TemporaryDirectory(prefix="decode-") as temporary:
        content = run(options, Path(options.folder or temporary))
    if content["rows"]:
        print(decode_table.render(content))
        if options.page:
            Path(options.page).write_text(decode_table.page(content, options.out or ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
