"""Which versions of TVM this package works with, checked from package metadata alone.

TVM is never imported here: with a mismatched ``apache-tvm-ffi`` that import, or a call long after
it, ends the process. Whoever imports TVM calls ``check_tvm_versions`` first.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from pathlib import Path

from torch_pruner.exc import IncompatibleTVM

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
TVM_PACKAGES = ("apache-tvm", "apache-tvm-ffi")


def pins() -> dict[str, str]:
    """The pinned version of each package in ``constraints.txt``."""
    rows = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    return dict(rows)


@functools.cache
def installed_version(package: str) -> str | None:
    """The version of an installed distribution, found without importing it, once a process."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tvm_fix() -> str:
    """The command that installs the versions of TVM that work."""
    wanted = pins()
    return "pip install " + " ".join(f'"{p}=={wanted[p]}"' for p in TVM_PACKAGES)


def check_tvm_versions() -> None:
    """Do nothing if the pinned TVM and its FFI are installed.

    Raises:
        IncompatibleTVM: One is missing or of another version; the message holds the command to run.
    """
    wanted = pins()
    found = {p: installed_version(p) for p in TVM_PACKAGES}
    if any(found[p] != wanted[p] for p in TVM_PACKAGES):
        raise IncompatibleTVM(
            found=" and ".join(f"{p} {found[p] or '(not installed)'}" for p in TVM_PACKAGES),
            needs=" and ".join(f"{p} {wanted[p]}" for p in TVM_PACKAGES),
            fix=tvm_fix(),
        )
