"""Runs a command as if the processor had AVX2 and no more, so that all contestants choose the
code that they have for such a one.

    python -m benchmarks.isa.hide -- python -m benchmarks.peers --networks mobilenet_v2 ...

In: a command. Out: its exit status. ``CPUID`` answers without AVX-512, AMX and AVX-VNNI
(``hide.c``, built with the C compiler at hand), and ``/proc/cpuinfo`` is without their flags, in a
mount namespace of the command's own. Caches, ports and clocks stay this processor's: what comes of
it is a table of "this processor without", not of another. Needs Linux on an Intel processor whose
``CPUID`` can be made to fault (the flag ``cpuid_fault``), and the right to mount.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("hide.c")
HIDDEN = re.compile(r"\b(avx512\w*|avx_vnni\w*|avx_ifma|avx_ne_convert|amx_\w+)\s?")
_MOUNTED = 'mount --bind "$1" /proc/cpuinfo && shift && exec "$@"'


def without_hidden(cpuinfo: str) -> str:
    """The text of ``/proc/cpuinfo`` without the flags that are hidden."""
    return HIDDEN.sub("", cpuinfo)


def hide(command: list[str], folder: Path) -> int:
    """Run ``command``. Raises ``RuntimeError`` where something is missing that it takes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("unshare") is None:
        raise RuntimeError("it takes a C compiler, and unshare of util-linux")
    given = Path("/proc/cpuinfo").read_text()
    if "cpuid_fault" not in given.split():
        raise RuntimeError("CPUID cannot be made to fault on this processor")
    library, cpuinfo = folder / "hide.so", folder / "cpuinfo"
    build = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(build, check=True)
    cpuinfo.write_text(without_hidden(given))
    inside = ["unshare", "--mount", "sh", "-c", _MOUNTED, "sh", str(cpuinfo)]
    # Only the command itself is without: sh and mount need not be.
    preloaded = [*inside, "env", f"LD_PRELOAD={library}", *command]
    return subprocess.run(preloaded, check=False, env=os.environ).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isa.hide", description=__doc__)
    parser.add_argument("command", nargs="+")
    command = parser.parse_args(arguments).command
    with tempfile.TemporaryDirectory() as folder:
        try:
            return hide(command, Path(folder))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
