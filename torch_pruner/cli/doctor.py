"""``torch-pruner doctor``: what this machine has, what is missing, and how to get it.

Imports neither torch nor TVM, so that it works, and answers at once, where they are broken.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from torch_pruner import config, versions
from torch_pruner.exc import MeterError, OptionError
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import CpuProbe, TargetSpec
from torch_pruner.tuner.measure.meter import RAPL

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

DISTRIBUTION = "torch-pruner"
# What each optional package is for, and the extra that brings it.
OPTIONAL = {
    "transformers": ("the demo and `hf:` models", "demo"),
    "xgboost": ("cost_model='xgb'", "xgboost"),
    "matplotlib": ("torch-pruner curve", "curve"),
    "tornado": ("executor='rpc'", "rpc"),
    "triton": ("kernels for GPUs, beside those in CUDA C", "triton"),
    "onnxruntime": ("a peer in benchmarks", "peers"),
    "openvino": ("a peer in benchmarks", "peers"),
}


class Status(StrEnum):
    """Only ``MISSING`` makes the command fail."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``fix`` is what to do about it; empty where nothing need be done."""

    name: str
    status: Status
    found: str
    fix: str = ""


def run(args: argparse.Namespace) -> int:
    """Print the report (``args.json``: as JSON). 0 if nothing is missing, else 1."""
    checks = report()
    if args.json:
        print(json.dumps([asdict(c) for c in checks], indent=2))
    else:
        width = max(len(c.name) for c in checks)
        for check in checks:
            print(f"{check.status:8}{check.name:{width}}  {check.found}")
            if check.fix:
                print(f"{'':8}{'':{width}}  -> {check.fix}")
    return int(any(c.status is Status.MISSING for c in checks))


def report() -> list[Check]:
    """Every check, in the order in which things depend on each other."""
    env = config.environment()
    settings, options = _options(env)
    return [
        _python(),
        _installed(),
        _torch(),
        *_tvm(),
        _compiler(config.c_compiler()),
        options,
        _cache(settings),
        *_cpu(),
        *_threads(settings, env, CpuProbe.read().usable_cores),
        _meter(),
        *_optional(),
    ]


def _python() -> Check:
    # An older one never gets here: the package cannot be installed or imported there.
    return Check("python", Status.OK, f"{sys.version.split()[0]} at {sys.executable}")


def _installed() -> Check:
    found = versions.installed_version(DISTRIBUTION)
    if found is None:
        fix = "run `pip install -e .` in the checkout: the entry point makes backend='pruner' known"
        return Check(DISTRIBUTION, Status.MISSING, "not installed", fix)
    return Check(DISTRIBUTION, Status.OK, found)


def _torch() -> Check:
    found, wanted = versions.installed_version("torch"), _required("torch")
    fix = f'pip install "torch{wanted}"'
    if found is None:
        return Check("torch", Status.MISSING, "not installed", fix)
    if not _in_range(found, wanted):
        return Check("torch", Status.MISSING, f"{found}, outside {wanted}", fix)
    return Check("torch", Status.OK, found)


def _tvm() -> list[Check]:
    wanted, checks = versions.pins(), []
    for package in versions.TVM_PACKAGES:
        found = versions.installed_version(package)
        good = found == wanted[package]
        text = found or "not installed"
        if not good:
            text += f", needs {wanted[package]}"
        status = Status.OK if good else Status.MISSING
        checks.append(Check(package, status, text, "" if good else versions.tvm_fix()))
    return checks


def _compiler(compiler: str | None) -> Check:
    """Link a library for real: a compiler without the C library's headers is a common half-way."""
    fix = "install gcc with the C library's headers (for example the packages gcc and libc6-dev)"
    if compiler is None:
        return Check("c compiler", Status.MISSING, "none found", fix)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <math.h>\nfloat probe(float x) { return sqrtf(x); }\n")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except subprocess.CalledProcessError as err:
            problem = f"{compiler} cannot link a library: {(err.stderr or '').strip()[:200]}"
            return Check("c compiler", Status.MISSING, problem, fix)
        except (OSError, subprocess.TimeoutExpired) as err:
            return Check("c compiler", Status.MISSING, f"{compiler}: {err}", fix)
    return Check("c compiler", Status.OK, compiler)


def _options(env: Mapping[str, str]) -> tuple[config.Config, Check]:
    try:
        settings = config.Config.from_options(env=env)
    except OptionError as err:
        fix = "correct or unset the variable; docs/env.md lists all of them"
        return config.Config(), Check("options", Status.MISSING, str(err), fix)
    names = sorted(n for n in env if n.startswith(config.PREFIX))
    unknown = [n for n in names if n not in config.ENV_VARS]
    if unknown:
        found = f"unknown and ignored: {', '.join(unknown)}"
        return settings, Check("options", Status.NOTE, found, "docs/env.md lists the known ones")
    return settings, Check("options", Status.OK, ", ".join(names) or "no variable is set")


def _cache(settings: config.Config) -> Check:
    root = settings.cache_root
    fix = "set TORCH_PRUNER_CACHE_DIR to a directory that this user may write"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root) as file:
            file.write(b"probe")
            file.flush()
    except OSError as err:
        return Check("cache directory", Status.MISSING, f"{root}: {err.strerror}", fix)
    return Check("cache directory", Status.OK, f"{root}, writable")


def _cpu() -> list[Check]:
    probe = CpuProbe.read()
    device, spec = DeviceFingerprint.detect(probe), TargetSpec.detect(probe=probe)
    cores = f"{probe.physical_cores} cores, {probe.usable_cores} usable"
    found = f"{device.name}, {cores}, LLVM name {spec.mcpu}, {spec.vector_bytes * 8}-bit vectors"
    flags = Check("cpu features", Status.OK, " ".join(device.isa) or "none that kernels use")
    return [Check("cpu", Status.OK, found), flags]


def _threads(settings: config.Config, env: Mapping[str, str], usable_cores: int) -> list[Check]:
    wanted = settings.threads
    if wanted is not None and wanted > usable_cores:
        found = f"{wanted} threads on {usable_cores} usable cores"
        checks = [Check("threads", Status.NOTE, found, "kernels slow down with threads in excess")]
    else:
        checks = [Check("threads", Status.OK, str(wanted or "as torch.get_num_threads()"))]
    number, bind = env.get("TVM_NUM_THREADS"), env.get("TVM_BIND_THREADS")
    if number is not None and number != str(wanted or usable_cores):
        found = f"TVM_NUM_THREADS={number} differs from {wanted or usable_cores}"
        fix = "unset it; set TORCH_PRUNER_THREADS instead"
        checks.append(Check("tvm threads", Status.NOTE, found, fix))
    if bind not in (None, "0"):
        found = f"TVM_BIND_THREADS={bind} pins threads to cores"
        fix = "unset it: timings vary twofold on a busy machine"
        checks.append(Check("tvm pinning", Status.NOTE, found, fix))
    return checks


def _meter() -> Check:
    """Of the CPUs: those of GPUs are the driver's business."""
    try:
        meter = RAPL.open()
    except MeterError as err:
        found = f"none, needed for objective='energy': {err.reason}"
        return Check("energy meter", Status.NOTE, found, err.fix)
    return Check("energy meter", Status.OK, meter.name)


def _optional() -> list[Check]:
    checks = []
    for package, (use, extra) in OPTIONAL.items():
        found = versions.installed_version(package)
        if found is None:
            fix = f'pip install "{DISTRIBUTION}[{extra}]"'
            checks.append(Check(package, Status.NOTE, f"not installed, needed for {use}", fix))
        else:
            checks.append(Check(package, Status.OK, found))
    return checks


def _required(package: str) -> str:
    """The version range that our own metadata asks for; empty when we are not installed."""
    try:
        rows = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return ""
    return next((m[1] for r in rows if (m := re.fullmatch(rf"{package}([<>=!~].*)", r))), "")


def _in_range(version: str, wanted: str) -> bool:
    """Whether ``version`` obeys bounds like ``<2.16,>=2.11``; its suffix (``+cpu``) is ignored."""
    have = _release(version)
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", wanted):
        if (have < _release(bound)) == (sign == ">="):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"[\d.]+", version)
    return tuple(int(n) for n in numbers[0].strip(".").split(".")) if numbers else ()
