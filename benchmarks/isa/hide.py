"""Runs a command as if the processor had AVX2 and no more, so that all contestants choose the
code that they have for such a one.

    python -m benchmarks.isa.hide -- python -m benchmarks.peers --networks mobilenet_v2 ...

In: a command. Out: its exit status. ``CPUID`` answers without AVX-512, AMX and AVX-VNNI
(``hide.c``, built with the C compiler at hand), and ``/proc/cpuinfo`` is without their flags, in a
mount namespace of the command's own. Caches, ports and clocks stay this processor's: what comes of
it is a table of "this processor without", not of another. Needs Linux and the right to mount.

Where ``CPUID`` can be made to fault (the flag ``cpuid_fault``; Intel's) nothing else is done.
Elsewhere the command sees patched copies (``patched.py``) of this environment's shared libraries
and of C and C++ compilers, mounted over them for it alone. ``--copies FOLDER`` keeps them for the
next time: making them takes a few minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from benchmarks.isa import patched

SOURCE = Path(__file__).with_name("hide.c")
HIDDEN = re.compile(r"\b(avx512\w*|avx_vnni\w*|avx_ifma|avx_ne_convert|amx_\w+)\s?")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
_MOUNTED = (
    'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 125; shift 2; done; shift; exec "$@"'
)


def without_hidden(cpuinfo: str) -> str:
    """The text of ``/proc/cpuinfo`` without the flags that are hidden."""
    return HIDDEN.sub("", cpuinfo)


def hide(command: list[str], folder: Path, kept: Path | None = None) -> int:
    """Run ``command``, with files in ``folder`` and patched libraries in ``kept``.

    Raises ``RuntimeError`` where something is missing that it takes.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("unshare") is None:
        raise RuntimeError("it takes a C compiler, and unshare of util-linux")
    given = Path("/proc/cpuinfo").read_text()
    library, cpuinfo = folder / "hide.so", folder / "cpuinfo"
    cpuinfo.write_text(without_hidden(given))
    mounts, flags = [(cpuinfo, Path("/proc/cpuinfo"))], []
    if "cpuid_fault" not in given.split():
        kept = kept or folder
        kept.mkdir(parents=True, exist_ok=True)
        installed = Path(sysconfig.get_path("platlib"))
        mounts += patched.copies(patched.executing(installed, COMPILERS), kept)
        flags = ["-DPATCHED"]
    build = [compiler, "-O2", "-shared", "-fPIC", *flags, "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(build, check=True)
    paths = [str(path) for pair in mounts for path in pair]
    inside = ["unshare", "--mount", "sh", "-c", _MOUNTED, "sh", *paths, "--"]
    # Only the command itself is without: sh and mount need not be.
    preloaded = [*inside, "env", f"LD_PRELOAD={library}", *command]
    return subprocess.run(preloaded, check=False, env=os.environ).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isa.hide", description=__doc__)
    parser.add_argument("--copies", type=Path, help="where patched libraries are kept")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return hide(given.command, Path(folder), given.copies)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
