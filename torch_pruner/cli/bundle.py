"""``torch-pruner bundle``: kernels of this device in one file, to be shipped. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import exc
from torch_pruner.cache.files import read_bounded
from torch_pruner.cli import arguments
from torch_pruner.text_tables import bytes_text

if TYPE_CHECKING:
    import argparse

    from torch_pruner.cache.bundle import Manifest
    from torch_pruner.compiler.bundles import BundleDevice

MAX_KEY_BYTES = 4096
MAX_REPORT_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for name, command, text in (
        ("create", create, "write the kernels of this device to a file"),
        ("inspect", inspect, "check a bundle and say what it holds; changes nothing"),
        ("load", load, "check a bundle and merge it into the cache"),
    ):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("file", type=Path, metavar="FILE", help="the bundle")
        text = "cpu, cuda, cuda:1, or a card that is not at hand (h200); default: cpu"
        sub.add_argument("--device", metavar="DEVICE", help=text)
        if name != "inspect":
            sub.add_argument("--cache-dir", metavar="DIR", help="the kernel cache to use")
        if name == "create":
            sub.add_argument(
                "--report", type=Path, metavar="REPORT.json", help="only the kernels it names"
            )
            sub.add_argument("--sign", type=Path, metavar="KEYFILE", help="sign with this secret")
        else:
            sub.add_argument(
                "--require-signature",
                type=Path,
                metavar="KEYFILE",
                help="refuse what was not signed with this secret",
            )
        if name == "load":
            text = "take its schedules as starting points for tuning, whatever device they are from"
            sub.add_argument("--as-seed", action="store_true", help=text)
        arguments.add_json(sub)
        sub.set_defaults(run=command)


def create(args: argparse.Namespace) -> int:
    """1 if there was nothing to write, or if kernels that are not tuned were left out."""
    from torch_pruner.compiler import bundles

    workloads = None if args.report is None else _workloads(args.report)
    key = _key("--sign", args.sign)
    try:
        device = _device(args.device)
        found = bundles.create(
            args.file, cache_dir=args.cache_dir, workloads=workloads, sign=key, device=device
        )
    except OSError as err:
        raise exc.OptionError("FILE", f"cannot write {args.file}: {err.strerror or err}") from err
    _show(args, found)
    if not found.kernels and not args.json:
        print("no kernel of this device and version is in the cache; run `torch-pruner tune MODEL`")
    return int(not found.kernels or bool(found.left_out))


def inspect(args: argparse.Namespace) -> int:
    """0 if it can be loaded here, 1 if it is sound but of another device or version."""
    from torch_pruner.cache import bundle
    from torch_pruner.compiler import bundles

    found = bundle.read(args.file, key=_key("--require-signature", args.require_signature)).manifest
    here = bundles.origin(_device(args.device))
    fits = (found.origin.digest, found.origin.codegen) == (here.digest, here.codegen)
    _show(args, found, fits=fits)
    return int(not fits)


def load(args: argparse.Namespace) -> int:
    from torch_pruner.compiler import bundles

    found = bundles.load_bundle(
        args.file,
        cache_dir=args.cache_dir,
        as_seed=args.as_seed,
        require_signature=_key("--require-signature", args.require_signature),
        device=_device(args.device),
    )
    _show(args, found)
    return 0


def _device(name: str | None) -> BundleDevice | None:
    """Only what is asked of a GPU needs torch."""
    if name is None:
        return None
    from torch_pruner.devices import bundle_device

    return bundle_device(name)


def _show(args: argparse.Namespace, found: Manifest, **more: bool) -> None:
    size = sum(size for _, size in found.files.values())
    if args.json:
        data = {k: v for k, v in asdict(found).items() if k != "files"}
        print(json.dumps({**data, "bytes": size, **more}, indent=2))
        return
    signed = "signed" if found.signed else "not signed"
    print(f"made by    {found.made_by} ({found.origin.codegen}), {signed}")
    print(f"device     {found.origin.device.get('name')} ({found.origin.digest[:8]})")
    print(f"holds      {found.kernels} kernels, {found.artifacts} artifacts of graphs,", end=" ")
    print(f"{found.records} records, {bytes_text(size)}")
    if "fits" in more:
        print(f"this one   {'the same device and version' if more['fits'] else 'is different'}")


def _key(flag: str, path: Path | None) -> bytes | None:
    """The secret in a file, less line ends at its end."""
    if path is None:
        return None
    from torch_pruner.cache.manifest import MIN_KEY_BYTES

    try:
        key = read_bounded(path, MAX_KEY_BYTES).rstrip(b"\r\n")
    except OSError as err:
        raise exc.OptionError(flag, f"cannot read {path}: {err.strerror or err}") from err
    if len(key) < MIN_KEY_BYTES:
        raise exc.OptionError(flag, f"{path} has fewer than {MIN_KEY_BYTES} bytes")
    return key


def _workloads(path: Path) -> set[str]:
    try:
        data: Any = json.loads(read_bounded(path, MAX_REPORT_BYTES))
        return {str(task["workload"]) for task in data["tasks"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise exc.OptionError("--report", f"{path} is not a report: {err}") from err
